"""What each family of metrics adds to a full step by itself: time, bytes of the report, series."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import probes_jax as pj
from benchmarks.figure import Figure, interleave
from benchmarks.step_time import SHAPES, fresh_programs, make_state, ratio
from probes_jax.spec.plan import FAMILIES, MORE

COMMAND = "python -m benchmarks.run families"
SHAPE = "4 layers of 128, batch 8 x 128"
ABSENT = ("router", "replica")  # no experts, one device


def _plan(*families: str, **more: Any) -> dict[str, Any]:
    rest = tuple(family for family in FAMILIES if family not in (*families, *MORE))
    return {"without": rest, "more": tuple(family for family in families if family in MORE), **more}


def _plans() -> dict[str, dict[str, Any]]:
    plans = {family: _plan(family) for family in FAMILIES if family not in ABSENT}
    plans["precision, of act and grad"] = _plan("act", "grad", precision=True)
    plans["stages"] = _plan(stages=True)
    return {"no family": _plan(), **plans}


def measure(rounds: int = 30) -> Iterator[Figure]:
    """A full step with one family and no other against the plain step; ten minutes."""
    state, batch = make_state(*SHAPES[SHAPE])
    runs, sizes = fresh_programs(state, batch, {"plain": "off"}), {}
    for name, plan in _plans().items():
        state, batch = make_state(*SHAPES[SHAPE], **plan)
        runs |= fresh_programs(state, batch, {name: "full"})
        layout = pj.monitored_train_step(state, batch)[1].layout
        sizes[name] = 4 * layout.size
    taken = interleave(runs, rounds, seed=0)
    for name in _plans():
        yield ratio(f"full step with {name} / plain step, {SHAPE}", taken[name] / taken["plain"], None, COMMAND)
        own = np.array([sizes[name] - (sizes["no family"] if name != "no family" else 0)]) / 1000
        yield Figure(f"report of {name}, {SHAPE}", *(float(own[0]),) * 3, "kB a scan", "", None, COMMAND)
