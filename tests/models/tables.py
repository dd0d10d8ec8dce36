"""Writes docs/coverage_models.md: `python -m tests.models.tables > docs/coverage_models.md`. Nothing is compiled."""

from __future__ import annotations

import importlib.metadata
import sys

import jax

import probes_jax as pj
from probes_jax.present.coverage import as_markdown
from tests.models.train import start
from tests.models.zoo import MODELS, RealModel

_PREAMBLE = """\
<!-- Generated; do not edit. Write it again with `make docs-models`. -->

# What is seen of models that we did not write

Each model is made from its package as it is, with a toy's sizes and random weights, and wrapped with `pj.wrap`; its
code is not edited. `make test-models` trains each of them for three steps with gradients of activations on, and checks
that every point below reports, that loss and parameters are those of a plain optax loop, and that the step compiles
once. It installs {versions} beside the first pair of pins.

One row is one point, or all layers that are alike in it; *out of* names the transforms that the value comes out of,
*there and back* means that its gradient is measured, too. Of a run of your own, `probes coverage` prints such a table.
"""


def coverage_of(real: RealModel) -> pj.Coverage:
    """What a step of this model sees, from its trace alone."""
    state = start(real, real.make())
    return jax.eval_shape(lambda batch: pj.monitored_train_step(state, batch)[1], real.batch(0)).coverage


def as_page() -> str:
    """The page as Markdown."""
    packages = [f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "google-tunix")]
    sections = [_PREAMBLE.format(versions=" and ".join(packages))]
    for real in MODELS:
        coverage = coverage_of(real)
        counts = f"{len(coverage.reported)} of {len(coverage.seen)} points reported."
        sections.append(f"## {real.title}\n\n{counts}\n\n{as_markdown(coverage)}")
    return "\n".join(sections)


if __name__ == "__main__":
    sys.stdout.write(as_page())
