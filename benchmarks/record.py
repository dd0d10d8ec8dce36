"""What `record()` costs the training thread."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import probes_jax as pj
from benchmarks.figure import Figure, bootstrap
from benchmarks.step_time import SHAPES, make_state
from probes_jax.spec.layout import FORMAT, HEADER, PROGRAMS, Entry, Layout
from probes_jax.spec.summary import KINDS

COMMAND = "python -m benchmarks.run record"
TITLE = "record() on the training thread"
SIZES = {100: 30.0, 10_000: 100.0}  # scalars of a report: microseconds aimed at
_WIDTH = 1024  # of the matrix product that a made-up step computes, so that `record` finds it under way


@dataclasses.dataclass(frozen=True)
class _Report:
    buffer: jax.Array
    layout: Layout


def _times(steps: int, plan: pj.Plan | None, next_report: Callable[[], Any]) -> np.ndarray:
    """Microseconds of each `record()` while a run folder is written, without those of the first tenth."""
    taken = []
    with tempfile.TemporaryDirectory() as folder, pj.Recorder(folder, plan) as recorder:
        for _ in range(steps):
            report = next_report()
            start = time.perf_counter()
            recorder.record(report)
            taken.append((time.perf_counter() - start) * 1e6)
            jax.block_until_ready(report.buffer)
    return np.array(taken[steps // 10 :])


def _trained() -> Callable[[], Any]:
    """The reports of a model that trains."""
    state, batch = make_state(*next(iter(SHAPES.values())))

    def step() -> Any:
        nonlocal state
        state, report = pj.monitored_train_step(state, batch)
        return report

    return step


def _made_up(scalars: int) -> Callable[[], Any]:
    """Reports of at least so many scalars: the statistics of as many layers as that takes."""
    layers = -(-scalars // len(KINDS["moments"].stats))
    names = tuple(f"act/block[{layer}]/mlp/{{stat}}" for layer in range(layers))
    layout = Layout("full", (Entry("moments", names),))

    @jax.jit
    def pack(step: jax.Array, x: jax.Array) -> jax.Array:
        head = jnp.stack([jnp.uint32(FORMAT), step, jnp.uint32(1), jnp.uint32(PROGRAMS.index("full"))])
        values = jnp.broadcast_to(jnp.max(x @ x), layout.size - HEADER)
        return jnp.concatenate([head, jax.lax.bitcast_convert_type(values, jnp.uint32)])

    steps, x = itertools.count(), jnp.ones((_WIDTH, _WIDTH))

    def step() -> Any:
        return _Report(pack(np.uint32(next(steps)), x), layout)

    return step


def _figure(name: str, taken: np.ndarray, target: float) -> Figure:
    value, low, high = bootstrap(taken)
    return Figure(name, value, low, high, "us", f"<= {target:g}", value <= target, COMMAND)


def measure(steps: int = 120) -> list[Figure]:
    """Microseconds of `record()`: while a real model trains, and with reports of stated sizes."""
    plan = pj.Plan(groups=("code", "docs", "law"))
    figures = [_figure(TITLE, _times(steps, plan, _trained()), 100.0)]
    for scalars, target in SIZES.items():
        figures.append(_figure(f"{TITLE}, {scalars:,} scalars", _times(steps, None, _made_up(scalars)), target))
    return figures
