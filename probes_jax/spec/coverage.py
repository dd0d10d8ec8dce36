"""What of a model is seen and what is not: a row for every point, and a reason for everything that is missing."""

from __future__ import annotations

import dataclasses
import functools
import html
import itertools
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from probes_jax.spec.fold_names import Folded, fold_names

_LAYER = "[*]"  # stands for a layer number in the name of a point of a scanned layer
_MOST = 8  # lines of what is missing, where it is printed
_SHOWN = 3  # names on such a line
HEADINGS = ("point", "layers", "role", "class", "shape", "out of", "measured")
ONE_DEVICE = "everything is on one device: nothing has a copy to differ from"  # nothing to mend
LIGHT_ONLY = (
    "activations are observed by the full program only, every Plan.scan_every steps (never with PROBES_JAX=off): a "
    "report of such a step, and `probes coverage`, say what is seen and what is missing"
)


@dataclasses.dataclass(frozen=True)
class SeenPoint:
    """A float output of one call of one method of one module, as the trace of the step came across it.

    Attributes:
        name: Its name in metrics, with `[*]` for the number of a scanned layer.
        role: What it is in the model, such as `query`.
        class_name: Class of the module.
        method: Name of the method.
        call: 0-based number of this call of this method of this module within a step.
        shape: Shape of the value, in one iteration where it is inside a scan.
        layers: Length of each axis of scanned layers, the outermost first; each layer has values of its own.
        through: Transforms that the value comes out of, the outermost first.
        reported: Whether its values come back.
        gradient: Whether the gradient that comes back to it is measured, too.
    """

    name: str
    role: str = "other"
    class_name: str = ""
    method: str = "__call__"
    call: int = 0
    shape: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()
    through: tuple[str, ...] = ()
    reported: bool = False
    gradient: bool = False

    def labels(self) -> list[str]:
        """Its name in every layer.

        >>> SeenPoint("blocks[*]/mlp", layers=(2,)).labels()
        ['blocks[0]/mlp', 'blocks[1]/mlp']
        """
        labels = []
        for index in itertools.product(*(range(length) for length in self.layers)):
            name = self.name
            for number in index:
                name = name.replace(_LAYER, f"[{number}]", 1) if _LAYER in name else f"{name}[{number}]"
            labels.append(name)
        return labels

    @property
    def measured(self) -> str:
        """How much of it is measured, in words."""
        return ("there and back" if self.gradient else "forward") if self.reported else "missing"


@dataclasses.dataclass(frozen=True)
class Coverage:
    """Which points of a model were seen, which of them report, and why the others do not. Static, and hashable.

    `print` is short; a notebook shows the table; `pandas.DataFrame(list(coverage.points))` has every row.

    Attributes:
        points: Every point that the trace of the step came across, in forward order. Empty for a program that
            observes no activations.
        missing: (point or metric, reason and the line that mends it).
        stored: (family, how many of its series the online writers do not get; the store has them).
        warnings: Sentences about what is measured and is not as it should be, each with what to change.
    """

    points: tuple[SeenPoint, ...] = ()
    missing: tuple[tuple[str, str], ...] = ()
    stored: tuple[tuple[str, int], ...] = ()
    warnings: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return self._hash  # it is part of every report's structure: hashed once

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.points, self.missing, self.stored, self.warnings))

    @functools.cached_property
    def seen(self) -> tuple[str, ...]:
        """Names of all points."""
        return tuple(point.name for point in self.points)

    @functools.cached_property
    def reported(self) -> tuple[str, ...]:
        """Names of the points whose statistics came back."""
        return tuple(point.name for point in self.points if point.reported)

    def __str__(self) -> str:
        counts = f"{len(self.reported)} of {len(self.seen)} observed points reported"
        none = "no activations are observed" if "act" in dict(self.missing) else LIGHT_ONLY
        return "\n".join([counts if self.points else none, *missing_lines(self.missing), *self.lines()])

    def why(self, name: str) -> str | None:
        """Why a metric, or what lies below its name, is missing; None where no reason is known.

        >>> coverage = Coverage(missing=(("router", "no router was seen"), ("blocks[*]/mlp", "lost")))
        >>> coverage.why("router/entropy"), coverage.why("act/blocks[3]/mlp/rms"), coverage.why("loss/mean")
        ('no router was seen', 'lost', None)
        """
        name = re.sub(r"\[\d+\]", _LAYER, name)
        reasons = {re.sub(r"\[\d+\]", _LAYER, key): reason for key, reason in self.missing}
        for whole in (name, name.partition("/")[2]):  # points are named without the family of what is measured there
            for key in sorted(reasons, key=len, reverse=True):
                if f"{whole}/".startswith(f"{key}/"):
                    return reasons[key]
        return None

    def lines(self) -> list[str]:
        """What goes to the store only, and the warnings.

        >>> Coverage(stored=(("act", 1200), ("grad", 300))).lines()
        ['  1,500 series go to the store only: act 1,200, grad 300']
        """
        total = sum(count for _, count in self.stored)
        families = ", ".join(f"{family} {count:,}" for family, count in self.stored)
        stored = [f"  {total:,} series go to the store only: {families}"] if total else []
        return [*stored, *(f"  {warning}" for warning in self.warnings)]

    def table(self) -> list[tuple[str, ...]]:
        """The points as rows of text under `HEADINGS`; layers that are alike are one row.

        >>> point = SeenPoint("blocks[*]/mlp", "feed_forward", "MLP", layers=(12,), shape=(2, 8))
        >>> Coverage((point,)).table()
        [('blocks[0..11]/mlp', '12', 'feed_forward', 'MLP', '2x8', '', 'missing')]
        """
        labelled = ((label, _common(point)) for point in self.points for label in point.labels())
        return [_cells(folded) for folded in fold_names(labelled)]

    def _repr_html_(self) -> str:
        rows = "".join(_html_row("td", cells) for cells in self.table())
        told = (*missing_lines(self.missing, most=None), *self.lines())
        lines = "".join(f"<li>{html.escape(line.strip())}</li>" for line in told)
        counts = html.escape(str(self).splitlines()[0])
        return f"<p>{counts}</p><table>{_html_row('th', HEADINGS)}{rows}</table><ul>{lines}</ul>"

    def to_json(self) -> dict[str, Any]:
        """As plain numbers, texts, lists and dicts."""
        return {
            "points": [dataclasses.asdict(point) for point in self.points],
            "missing": [{"name": name, "reason": reason} for name, reason in self.missing],
            "stored": [{"family": family, "series": count} for family, count in self.stored],
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Coverage:
        """The inverse of `to_json`; what this version does not know is left out.

        Raises:
            KeyError, TypeError: It is not what `to_json` made.
        """
        known = dataclasses.fields(SeenPoint)
        points = tuple(
            SeenPoint(**{f.name: _as(str(f.type), f.name, point[f.name]) for f in known if f.name in point})
            for point in data["points"]
        )
        words = ("name", "reason")
        missing = tuple(tuple(_as("str", word, item[word]) for word in words) for item in data["missing"])
        stored = tuple(
            (_as("str", "family", s["family"]), _as("int", "series", s["series"])) for s in data.get("stored", ())
        )
        return cls(points, missing, stored, _as("tuple[str, ...]", "warnings", data.get("warnings", ())))


def missing_lines(missing: Iterable[tuple[str, str]], most: int | None = _MOST) -> list[str]:
    """A line for every reason, with the first few names; what lies in a module that is named goes without saying.

    Args:
        missing: (point or metric, reason) pairs.
        most: Lines at most; None gives all, with all names.

    Example:
        >>> missing_lines([("b[0]", "lost"), ("b[1]", "lost"), ("b[0]/up", "lost"), ("b[1]/up", "lost")])
        ['  missing b[0..1] (4 in all): lost']
    """
    reasons: dict[Hashable, list[Folded]] = {}
    for folded in fold_names(missing):
        reasons.setdefault(folded.key, []).append(folded)
    lines = [f"  missing {_names(group, most is not None)}: {reason}" for reason, group in reasons.items()]
    if most is not None and len(lines) > most:
        return [*lines[:most], f"  and for {len(lines) - most} more reasons, in report.coverage.missing"]
    return lines


def _names(group: Sequence[Folded], short: bool) -> str:
    """The names of what is missing for one reason; short, the first of the outermost modules and the number of all."""
    if not short:
        return ", ".join(folded.name for folded in group)
    first = {re.sub(r"#\d+", "", folded.name): folded.name for folded in reversed(group)}
    outermost = [name for base, name in first.items() if not any(base.startswith((f"{m}/", f"{m}.")) for m in first)]
    shown = outermost[::-1][:_SHOWN]
    count = sum(folded.count for folded in group)
    every = len(shown) == len(group)
    return ", ".join(shown) + ("" if every else f" ({count} in all)")


def _common(point: SeenPoint) -> SeenPoint:
    """What points that share a row have in common."""
    return dataclasses.replace(point, name="", layers=())


def _cells(folded: Folded) -> tuple[str, ...]:
    point = folded.key
    assert isinstance(point, SeenPoint)
    method = "" if point.method == "__call__" else f".{point.method}"
    return (
        folded.name,
        str(folded.count),
        point.role,
        f"{point.class_name}{method}",
        "x".join(map(str, point.shape)),
        " ".join(point.through),
        point.measured,
    )


def _html_row(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _as(kind: str, name: str, value: Any) -> Any:
    """A value, perhaps from JSON, as the `kind` that it had before: `str`, `tuple[int, ...]`."""
    item = kind.removeprefix("tuple[").removesuffix(", ...]")
    many = isinstance(value, list | tuple)
    if many != (item != kind) or any(type(one).__name__ != item for one in (value if many else [value])):
        raise TypeError(f"{name} must be {kind}, got {type(value).__name__}")
    return tuple(value) if many else value
