"""Is a signal all right? Three rules, the same for every step of its history.

    alert   the value is NaN or infinite; its spike score exceeds theta; or it is an alarm that is on
    watch   its spike score exceeds theta / 2; or it counts troubles, and there have been some
    new     it is to have a score, and there are too few earlier values for one
    ok      anything else that was measured
    no data nothing was measured

The score of loss, gradient norm and update norm is the one that the step's detectors reported. Every other positive
signal is scored against its own earlier values by the same formula. A sustained value is nobody's spike: rules about
level and trend are not made here.

A signal that only steps with a tensor scan measure waits thousands of steps for a score. Until then it is compared with
its few earlier scans, as the walk does: `JUMP` times their median is alert, half of that watch.
"""

from __future__ import annotations

import enum
from typing import Any, Protocol

import numpy as np

from probes_jax.diagnose.walk import JUMP, times_median
from probes_jax.present.score import robust_scores
from probes_jax.spec.catalog import REGISTRY
from probes_jax.spec.metric import Cadence
from probes_jax.spec.plan import Plan


class State(enum.IntEnum):
    """Of one signal at one step."""

    NO_DATA = -2
    NEW = -1
    OK = 0
    WATCH = 1
    ALERT = 2

    @property
    def text(self) -> str:
        return self.name.lower().replace("_", " ")


class History(Protocol):
    """A recorded run, as `probes_jax.open_run` gives it."""

    def names(self) -> list[str]: ...
    def series(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...
    def which(self, name: str) -> tuple[np.ndarray, list[str]]: ...
    def events(self) -> list[dict[str, Any]]: ...
    def manifest(self) -> dict[str, Any]: ...
    def flight_step(self) -> int | None: ...
    def lacking(self) -> dict[int, tuple[int, ...] | None]: ...
    def damaged(self) -> list[str]: ...
    def coverage(self) -> list[dict[str, Any]]: ...


# On: anything but zero.
ALARMS = ("alert/co_spike", "alert/guard/stopped", "alert/nonfinite_accepted", "replica/divergent_tensors")
TROUBLES = ("alert/co_spike/count",)  # counts of what is over; not zero: watch
LEVELS = ("grad/clip_rate",)  # moves in steps of 1/W: a spike score says nothing about it
DETECTORS = {"loss/mean": "loss", "grad/norm": "grad", "update/norm": "update"}


def read(run: History, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, values and presence of one metric; empty where the run has no such series."""
    try:
        return run.series(name)
    except KeyError:
        return np.zeros(0, np.int64), np.zeros(0), np.zeros(0, bool)


def where(run: History, name: str, step: int) -> str:
    """The layer or shard behind a worst-of metric at a step; empty for every other metric."""
    try:
        steps, labels = run.which(name)
    except KeyError:
        return ""
    at = np.flatnonzero(steps == step)
    return labels[int(at[-1])] if at.size else ""


def states(run: History, name: str, plan: Plan, recent: int = 10_000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """State of one signal at each step at which it was measured.

    Args:
        run: The record.
        name: The metric.
        plan: Thresholds.
        recent: Only so many of the last steps are looked at.

    Returns:
        Steps int64 `[T]`, values float64 `[T]`, states int8 `[T]` (values of `State`).
    """
    steps, values, present = read(run, name)
    known = present & np.isfinite(values)
    earlier = (np.cumsum(known) - known)[-recent:]
    steps, values, present = steps[-recent:], values[-recent:], present[-recent:]
    out = np.full(steps.shape, State.OK, np.int8)
    if name in ALARMS or name in TROUBLES:
        with np.errstate(invalid="ignore"):
            out[values != 0] = State.ALERT if name in ALARMS else State.WATCH
    elif name not in LEVELS:
        score = _scores(run, name, steps, values, present, plan)
        unscored = np.isnan(score) & (earlier < plan.min_history)
        out[unscored] = State.NEW
        out[score > plan.theta / 2] = State.WATCH
        out[score > plan.theta] = State.ALERT
        if is_scanned(name):
            times = times_earlier(values, present & unscored)
            out[times >= JUMP / 2] = State.WATCH
            out[times >= JUMP] = State.ALERT
    out[~np.isfinite(values)] = State.ALERT
    return steps[present], values[present], out[present]


def is_scanned(name: str) -> bool:
    """Whether only steps with a tensor scan measure it."""
    spec = REGISTRY.find(name)
    return spec is not None and spec.cadence is Cadence.EVERY_100


def times_earlier(values: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Each value over the median of those before it, float64 `[T]`; NaN where there are too few of them."""
    out = np.full(values.shape, np.nan)
    for at in np.flatnonzero(present):
        times = times_median(float(values[at]), values[:at][present[:at]])
        out[at] = np.nan if times is None else times
    return out


def _scores(
    run: History, name: str, steps: np.ndarray, values: np.ndarray, present: np.ndarray, plan: Plan
) -> np.ndarray:
    """Spike scores float64 `[T]`, NaN where there is none."""
    if name in DETECTORS:
        at, score, known = read(run, f"{DETECTORS[name]}/spike/score")
        out = np.full(steps.shape, np.nan)
        found = np.isin(steps, at[known])
        out[found] = score[known][np.searchsorted(at[known], steps[found])]
        return out
    return robust_scores(values, present, plan)[0]


def since(steps: np.ndarray, found: np.ndarray) -> int | None:
    """The first step of the last stretch of equal states; None without any.

    >>> since(np.array([0, 1, 2, 3]), np.array([0, 2, 0, 0]))
    2
    """
    if not steps.size:
        return None
    changed = np.flatnonzero(found != found[-1])
    return int(steps[changed[-1] + 1 if changed.size else 0])
