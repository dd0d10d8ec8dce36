"""The walk through one scan of a recorded run, with the run's own history."""

from __future__ import annotations

import numpy as np

from probes_jax.diagnose.walk import Walk, is_jump, walk
from probes_jax.present.state import History, read
from probes_jax.spec.readings import Readings

WORST = "grad_act/abs_max"  # over all points: where it is in proportion, no walk is needed


def scanned_steps(run: History) -> np.ndarray:
    """Steps at which activations were measured, rising."""
    steps, _, present = read(run, "act/abs_max")
    return steps[present]


def walk_run(run: History, step: int | None = None) -> Walk:
    """The walk at one step of a run; by default the last that scanned, or where the NaN in it began.

    A later scan tells nothing of that: the update after the first one has spread it over the parameters.

    Raises:
        ValueError: The run has no scan, or none at this step.
    """
    scanned = scanned_steps(run)
    if not scanned.size:
        raise ValueError("the run holds no scan of activations; Plan.scan_every says when one is made")
    step = _telling(run, scanned) if step is None else step
    if step not in scanned:
        near = scanned[np.argmin(np.abs(scanned - step))]
        raise ValueError(f"activations were not measured at step {step}; the nearest step that did is {near}")
    names = tuple(n for n in run.names() if n.startswith(("act/", "grad_act/")) and n.endswith("/abs_max"))
    values = np.full(len(names), np.nan)
    present = np.zeros(len(names), bool)
    past: dict[str, np.ndarray] = {}
    for index, name in enumerate(names):
        steps, column, seen = read(run, name)
        here = np.flatnonzero((steps == step) & seen)
        if here.size:
            values[index], present[index] = column[here[-1]], True
        past[name] = column[(steps < step) & seen]
    return walk(Readings(step, "full", names, values, present), past.__getitem__)


def _telling(run: History, scanned: np.ndarray) -> int:
    """The last scan; of several in a row up to it that were not finite, the first."""
    spoilt = {int(step) for name in ("act/abs_max", WORST) for step in _not_finite(run, name)}
    told = int(scanned[-1])
    for step in map(int, scanned[::-1]):
        if step not in spoilt:
            break
        told = step
    return told


def _not_finite(run: History, name: str) -> np.ndarray:
    steps, values, present = read(run, name)
    return steps[present & ~np.isfinite(values)]


def jumps(run: History) -> list[int]:
    """Scanned steps whose worst gradient of an activation is out of proportion to those before it, or not finite."""
    steps, values, present = read(run, WORST)
    steps, values = steps[present], values[present]
    return [int(step) for index, step in enumerate(steps) if is_jump(float(values[index]), values[:index])]
