"""The walk through one scan of a recorded run, with the run's own history."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from probes_jax.diagnose.walk import LEAST, Walk, is_jump, walk
from probes_jax.present.state import History
from probes_jax.present.trouble import format_steps, measured, spiked
from probes_jax.spec.plan import Plan
from probes_jax.spec.readings import Readings

WORST = "grad_act/abs_max"  # over all points: where it is in proportion, no walk is needed

Points = Mapping[str, tuple[np.ndarray, np.ndarray]]  # steps and values of a point's absolute maximum, by metric


def scanned_steps(points: Points) -> np.ndarray:
    """Steps at which the activations of single points were measured and written, rising."""
    steps = [steps for name, (steps, _) in points.items() if name.startswith("act/")]
    return np.unique(np.concatenate([np.zeros(0, np.int64), *steps]))


def read_points(run: History) -> Points:
    """Every point of a run, there and back. The recorder may have left a scan out to keep its budget."""
    ends = ("act/abs_max", WORST)
    names = (n for n in run.names() if n.startswith(("act/", "grad_act/")) and n.endswith("/abs_max"))
    return {name: measured(run, name) for name in names if name not in ends}


def walk_run(run: History, step: int | None = None) -> Walk:
    """The walk at one step of a run; by default the last that scanned, or where the NaN in it began.

    A later scan tells nothing of that: the update after the first one has spread it over the parameters.

    Raises:
        ValueError: The run has no scan, or none at this step.
    """
    points = read_points(run)
    scanned = scanned_steps(points)
    if not scanned.size:
        raise ValueError("the run holds no scan of activations; Plan.scan_every says when one is made")
    step = _telling(run, scanned) if step is None else step
    if step not in scanned:
        near = scanned[np.argmin(np.abs(scanned - step))]
        raise ValueError(f"activations were not measured at step {step}; the nearest step that did is {near}")
    return _walk_at(step, points)


def find_walk(run: History, plan: Plan) -> Walk | None:
    """The walk at the first scan that tells where a trouble began; None where none does.

    Looked at are scans whose worst gradient is out of proportion, and the first scan from each spike on: there a single
    layer can be, while the worst of all is not.
    """
    spikes, worst = spiked(run, plan), jumps(run)
    points = read_points(run) if spikes or worst else {}
    scanned = scanned_steps(points)
    after = [int(scanned[at]) for at in np.searchsorted(scanned, spikes) if at < scanned.size]
    steps = sorted({*worst, *after} & set(scanned.tolist()))
    walks = (_walk_at(step, points) for step in steps)
    return next((found for found in walks if found.lines()), None)


def verdict(run: History, found: Walk, plan: Plan) -> list[str]:
    """What a walk says; where it says nothing, why, and where to look."""
    if found.lines():
        return found.lines()
    scanned, spikes = scanned_steps(read_points(run)), spiked(run, plan)
    earlier = scanned[scanned < found.step]
    out = ["Nothing jumps against its own history."]
    if earlier.size < LEAST:
        count = "no scan" if not earlier.size else f"{earlier.size} scan{'s' if earlier.size > 1 else ''}"
        out = [f"No layer has a history yet: {count} before step {found.step:,}, and a median is taken of {LEAST}."]
    unseen = [step for step in spikes if step > scanned[-1]]
    told = find_walk(run, plan)
    if told is not None and told.step != found.step:
        out.append(f"The scan at step {told.step:,} tells more: --step {told.step}.")
    elif unseen:
        out.append(
            f"The trouble is at {format_steps(unseen)}, after the last scan, at step {scanned[-1]:,}: scan more often "
            "(Plan.scan_every)."
        )
    return out


def _walk_at(step: int, points: Points) -> Walk:
    here = {name: values[steps == step] for name, (steps, values) in points.items()}
    present = np.array([values.size > 0 for values in here.values()], bool)
    last = np.array([values[-1] if values.size else np.nan for values in here.values()])
    readings = Readings(step, "full", tuple(points), last, present)
    return walk(readings, lambda name: points[name][1][points[name][0] < step])


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
    steps, values = measured(run, name)
    return steps[~np.isfinite(values)]


def jumps(run: History) -> list[int]:
    """Scanned steps whose worst gradient of an activation is out of proportion to those before it, or not finite."""
    steps, values = measured(run, WORST)
    return [int(step) for index, step in enumerate(steps) if is_jump(float(values[index]), values[:index])]
