"""What moved in a run, in the order in which it moved, and what moved first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from probes_jax.diagnose.walk import format_times, times_median
from probes_jax.present.first_screen import GUARD, Signal, format_value
from probes_jax.present.state import ALARMS, DETECTORS, History, State, states, where
from probes_jax.present.trouble import APART, Unusual, measured, numbers, rises, split
from probes_jax.present.walk import find_walk
from probes_jax.spec.plan import Plan

# Running counts of the train state: a rise is one more trouble on that step.
_COUNTS = (
    ("alert/nonfinite_steps", "NaN or infinite loss or gradient"),
    ("alert/guard/skipped_count", "update skipped"),
    ("data/empty_steps", "batch without a valid token"),
    ("opt/loss_scale_drops", "loss scale lowered"),
)
_WORST = ("logits/abs_max", "act/abs_max")  # a NaN or infinity in one of these is named
_COPIES = "replica/divergent_tensors"
_RATE = "opt/learning_rate"
_BEFORE = 10  # steps before a trouble in which a change of the learning rate is looked for
_LARGE = 2.0  # a factor from one step to the next that warm-up does not exceed


def find_movements(run: History, plan: Plan, signals: Sequence[Signal]) -> list[Unusual]:
    """What went wrong in the training itself, by its first step; before it what moved first, where several did.

    Args:
        run: The record.
        plan: Thresholds.
        signals: The first screen: each that is in alert has a line.
    """
    found = [*_counts(run), *_accepted(run), *_stopped(run), *_nonfinite(run), *_walks(run, plan)]
    found += [*_copies(run), *_co_spikes(run), *_spikes(run, plan)]
    told = {*ALARMS, *(name for item in found for name in item.signals)}
    found += _alerts(run, plan, [s.name for s in signals if s.state is State.ALERT and s.name not in told])
    return [*_first_to_move(run, found), *sorted(found, key=lambda item: item.steps[0])]


def _counts(run: History) -> Iterator[Unusual]:
    for name, what in _COUNTS:
        steps, total = rises(run, name)
        if steps:
            yield Unusual(what, steps, total)


def _accepted(run: History) -> Iterator[Unusual]:
    """Updates that were applied and should not have been, by whether the loss or gradient behind them was finite."""
    steps, _ = rises(run, "alert/nonfinite_accepted")
    behind = set(rises(run, "alert/nonfinite_steps")[0])
    taken = tuple(step for step in steps if step in behind)
    made = tuple(step for step in steps if step not in behind)
    if taken:
        yield Unusual("update applied that was made from a NaN or infinite loss or gradient", taken)
    if made:
        what = "update applied whose norm is NaN or infinite, made from a finite loss and gradient"
        yield Unusual(what, made)


def _stopped(run: History) -> Iterator[Unusual]:
    steps, _ = rises(run, GUARD)
    if steps:
        yield Unusual("run stopped by the guard", steps)


def _nonfinite(run: History) -> Iterator[Unusual]:
    for name in _WORST:
        steps, values = measured(run, name)
        bad = ~np.isfinite(values)
        if bad.any():
            first = where(run, name, int(steps[bad][0]))
            detail = f"first in {first}" if first else ""
            yield Unusual(f"NaN or infinity in {name}", numbers(steps[bad]), detail, (name,))


def _walks(run: History, plan: Plan) -> Iterator[Unusual]:
    """Where a gradient of an activation exploded: what the first scan that tells says of it."""
    found = find_walk(run, plan)
    if found is not None:
        for line in found.lines():
            yield Unusual(line, (found.step,))


def _copies(run: History) -> Iterator[Unusual]:
    steps, values = measured(run, _COPIES)
    if (values > 0).any():
        first = int(steps[values > 0][0])
        detail = f"first in {where(run, _COPIES, first)}; pj.find_divergence(state) names the devices"
        yield Unusual("copies of a tensor differ from device to device", numbers(steps[values > 0]), detail, (_COPIES,))


def _co_spikes(run: History) -> Iterator[Unusual]:
    steps, values = measured(run, "alert/co_spike")
    if (values > 0).any():
        yield Unusual("co-spike of loss and gradient norm", numbers(steps[values > 0]))


def _spikes(run: History, plan: Plan) -> Iterator[Unusual]:
    for name, signal in DETECTORS.items():
        steps, scores = measured(run, f"{signal}/spike/score")
        high = scores > plan.theta
        if high.any():
            worst = int(np.argmax(np.where(high, scores, -np.inf)))
            detail = f"worst score {format_value(scores[worst], '1')} at {steps[worst]:,}, threshold {plan.theta:g}"
            yield Unusual(f"spike of {name}", numbers(steps[high]), detail, (name,))


def _alerts(run: History, plan: Plan, names: Sequence[str]) -> Iterator[Unusual]:
    """Signals that are in alert now, and that no other rule speaks of."""
    together: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        steps, values, found = states(run, name, plan)
        finite = np.isfinite(values)
        high = (found == State.ALERT) & finite
        if high.any():
            worst = int(np.argmax(np.where(high, values, -np.inf)))
            times = times_median(float(values[worst]), values[:worst])
            against = "" if times is None else f", {format_times(times)} its median"
            detail = f"{format_value(values[worst], '1')} at {steps[worst]:,}{against}"
            yield Unusual(f"spike of {name}", numbers(steps[high]), detail, (name,))
        if not finite.all():
            together.setdefault(numbers(steps[~finite]), []).append(name)
    for steps, alike in together.items():
        yield Unusual(f"NaN or infinity in {', '.join(alike)}", steps, "", tuple(alike))


def _first_to_move(run: History, found: Sequence[Unusual]) -> Iterator[Unusual]:
    """Of the trouble in which most signals moved: which moved first, and whether the learning rate had changed."""
    moved = [(step, name) for item in found for step in item.steps for name in item.signals]
    steps = sorted({step for step, _ in moved})
    troubles = [[pair for pair in moved if s[0] <= pair[0] <= s[-1]] for s in split(steps, APART)]
    if not troubles:
        return
    trouble = max(troubles, key=lambda pairs: len({name for _, name in pairs}))
    first = min(step for step, _ in trouble)
    yield from _rate_changes(run, first)
    names = dict.fromkeys(name for step, name in trouble if step == first)
    if len({name for _, name in trouble}) > len(names):
        yield Unusual(f"{' and '.join(names)} moved first", (first,))


def _rate_changes(run: History, first: int) -> Iterator[Unusual]:
    for name in run.names():
        if name != _RATE and not name.startswith(f"{_RATE}/"):
            continue
        steps, values = measured(run, name)
        near = np.flatnonzero((steps[1:] >= first - _BEFORE) & (steps[1:] <= first)) + 1
        sizes = {int(at): _factor(float(values[at - 1]), float(values[at])) for at in near}
        at = max(sizes, key=lambda at: max(sizes[at], 1 / sizes[at]), default=None)
        if at is not None and max(sizes[at], 1 / sizes[at]) > _LARGE:
            before, after = (format_value(float(value), "1") for value in values[at - 1 : at + 1])
            ago = first - int(steps[at])
            how = (
                f"{ago} step{'s' if ago > 1 else ''} before the first movement" if ago else "as the first signal moved"
            )
            yield Unusual(
                f"{name} went from {before} to {after}", (int(steps[at]),), f"{format_times(sizes[at])}, {how}"
            )


def _factor(before: float, after: float) -> float:
    """How much larger; 1 where that says nothing."""
    usable = math.isfinite(before) and math.isfinite(after) and before > 0 and after > 0
    return after / before if usable else 1.0
