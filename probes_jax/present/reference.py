"""The registry as people and programs read it: table, Markdown, JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from probes_jax.spec.metric import Cadence, MetricSpec, Priority

if TYPE_CHECKING:
    from rich.table import Table

_PREAMBLE = """\
<!-- Generated from the registry; do not edit. Write it again with `make docs`
     (python -m probes_jax metrics --markdown > docs/metrics.md). -->

# Metrics

Every number that a run can report. A name is a template: `{path}` stands for the path of a layer or a parameter, any
other word in braces for one name. *Absent* means that there is no measurement: no point is written, never a zero. NaN
means that NaN was measured. A mean is always a summed numerator over a summed denominator.

Priority says who looks: P0 are the signals of the first screen, P1 is opened when a P0 moves, P2 serves one
investigation. Every metric is written with the step, and `data/tokens_total` beside it.
"""


def as_dict(spec: MetricSpec) -> dict[str, Any]:
    """One entry in plain types."""
    values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    return {
        name: value.name if isinstance(value, Priority) else value.value if isinstance(value, Cadence) else value
        for name, value in values.items()
    }


def as_json(specs: Iterable[MetricSpec]) -> str:
    """A JSON list with one object a metric."""
    return json.dumps([as_dict(spec) for spec in specs], indent=2, ensure_ascii=False, allow_nan=False)


def as_markdown(specs: Iterable[MetricSpec]) -> str:
    """The metric reference: one section a family, one entry a metric."""
    families: dict[str, list[str]] = {}
    for spec in specs:
        families.setdefault(spec.name.split("/", 1)[0], []).append(_entry(spec))
    sections = [f"## {family}\n\n" + "\n".join(entries) for family, entries in families.items()]
    return "\n".join([_PREAMBLE, *sections]).rstrip() + "\n"


def _entry(spec: MetricSpec) -> str:
    unit = "no unit" if spec.unit == "1" else spec.unit
    return (
        f"### `{spec.name}`\n\n"
        f"{_code(spec.symbol)} · {unit} · {spec.priority.name} · {spec.cadence.value}\n\n"
        f"    {spec.definition}\n\n"
        f"- Catches: {_text(spec.catches)}\n"
        f"- Reduced: {_text(spec.reduction)}\n"
        f"- Taken: {_text(spec.timing)}\n"
        f"- Source: {_text(spec.source)}\n"
    )


def _code(text: str) -> str:
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}"


def _text(text: str) -> str:
    """Escapes what Markdown would take for markup."""
    for mark in "\\*_<|#":
        text = text.replace(mark, f"\\{mark}")
    return text


def as_text(spec: MetricSpec) -> str:
    """One entry in plain text: all that is known of it."""
    unit = "no unit" if spec.unit == "1" else spec.unit
    return (
        f"{spec.name}: {spec.symbol}, {unit}, {spec.priority.name}, {spec.cadence.value}\n"
        f"  definition  {spec.definition}\n"
        f"  catches     {spec.catches}\n"
        f"  reduced     {spec.reduction}\n"
        f"  taken       {spec.timing}\n"
        f"  source      {spec.source}"
    )


def as_table(specs: Iterable[MetricSpec]) -> Table:
    """A rich table: name, symbol, unit, priority, cadence, what it catches."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("metric", "symbol", "unit", "priority", "cadence", "catches"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("priority", "unit"))
    for spec in specs:
        row = (spec.name, spec.symbol, spec.unit, spec.priority.name, spec.cadence.value, spec.catches)
        table.add_row(*(Text(cell) for cell in row))
    return table
