from __future__ import annotations

import pathlib

from probes_jax.present.reference import as_markdown
from probes_jax.spec.catalog import REGISTRY

_DOC = pathlib.Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_reference_is_what_the_registry_says():
    assert _DOC.read_text(encoding="utf-8") == as_markdown(REGISTRY), "run `make docs` and commit docs/metrics.md"


def test_every_metric_stands_in_it_once_with_all_that_is_known():
    text = as_markdown(REGISTRY)
    for spec in REGISTRY:
        assert text.count(f"### `{spec.name}`\n") == 1
        entry = text.split(f"### `{spec.name}`\n")[1].split("\n### ")[0]
        assert spec.definition in entry and spec.priority.name in entry and spec.cadence.value in entry


def test_families_are_not_split():
    headings = [line for line in as_markdown(REGISTRY).splitlines() if line.startswith("## ")]
    assert len(headings) == len(set(headings))


def test_text_is_not_taken_for_markup():
    entry = as_markdown([spec for spec in REGISTRY if spec.name == "alert/co_spike/nonfinite_count"])
    assert "`#C_t = inf`" in entry
