"""All statistics of one tensor in one pass, against the cheapest reduction and against one reduction for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.figure import Figure, bootstrap, interleave
from benchmarks.rivals import statistics
from probes_jax.stats.moments import summarize_moments

COMMAND = "python -m benchmarks.run kernel"
SHAPE = (4096, 4096)


def _runs(x: jax.Array) -> dict[str, Callable[[], Any]]:
    forms = {"ours": summarize_moments, "naive": statistics, "sum(x*x)": lambda x: jnp.sum(x * x)}
    # What makes the tensor is not part of it, and a result per statistic is all that leaves.
    jitted = {name: jax.jit(form) for name, form in forms.items()}
    runs = {name: lambda form=form: jax.block_until_ready(form(x)) for name, form in jitted.items()}
    for run in runs.values():
        run()
    return runs


def measure(rounds: int = 25) -> list[Figure]:
    """Ratios of times, both dtypes."""
    figures = []
    for dtype in (jnp.float32, jnp.bfloat16):
        x = jax.random.normal(jax.random.key(0), SHAPE, dtype)
        taken = interleave(_runs(x), rounds)
        which = f"{np.dtype(dtype).name} {list(SHAPE)}"
        for other, target in (("sum(x*x)", 6.0), ("naive", 1 / 8)):
            value, low, high = bootstrap(taken["ours"] / taken[other])
            title = f"one-pass statistics / {other}, {which}"
            figures.append(Figure(title, value, low, high, "ratio", f"<= {target:g}", value <= target, COMMAND))
    return figures
