"""The robust spike score of a recorded series, by the detectors' formula: for metrics that no detector follows."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from probes_jax.spec.plan import Guard, Plan

_EPSILON = 1e-30
_CHUNK = 2048  # rows of one window matrix: 2 MiB


def find_plan(manifest: Mapping[str, Any]) -> Plan:
    """The thresholds that a run was recorded with, those of its last attempt; `Plan()` where it does not say.

    Taken over are window, history, floor, theta, the unit, and whether there is a guard.

    >>> find_plan({"attempts": [{"plan": "Plan(groups=(), theta=4.5)"}]}).theta
    4.5
    """
    attempts = manifest.get("attempts") or [{}]
    said = attempts[-1].get("plan") or {}
    guarded = "guard=Guard(" in said if isinstance(said, str) else said.get("guard")
    if isinstance(said, str):
        said = {name: ast.literal_eval(value) for name, value in re.findall(r"\b(\w+)=([\d.e+-]+)(?=[,)])", said)}
    known = ("window", "min_history", "deviation_floor", "theta", "unit")
    taken = {name: said[name] for name in known if name in said}
    return dataclasses.replace(Plan(), guard=Guard() if guarded else None, **taken)


def robust_scores(values: np.ndarray, present: np.ndarray, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Spike score of every value against the earlier ones.

    z_t = 0.6745 (u_t - q_t) / max(D_t, floor), u = ln(x + 1e-30), q = median of the last `plan.window` earlier u,
    D = median of |u - q| over them.

    Args:
        values: float64 `[T]`.
        present: bool `[T]`.
        plan: Window, least history, floor.

    Returns:
        Scores float64 `[T]` (+inf for a NaN or infinite value), and where there is one, bool `[T]`: not where the
        value is absent or not positive, nor before the window holds `plan.min_history` values.
    """
    usable = present & np.isfinite(values) & (values > 0)
    u = np.log(np.where(usable, values, 1.0) + _EPSILON)
    history = u[usable]
    before = np.cumsum(usable) - usable  # usable values before each step
    padded = np.concatenate([np.full(plan.window, np.nan), history])
    windows = np.lib.stride_tricks.sliding_window_view(padded, plan.window)
    scores = np.full(values.shape, np.nan)
    scored = usable & (before >= plan.min_history)
    at = np.flatnonzero(scored)
    for part in np.array_split(at, max(1, -(-at.size // _CHUNK))):
        window = windows[before[part]]
        center = np.nanmedian(window, axis=1) if part.size else np.zeros(0)
        spread = np.nanmedian(np.abs(window - center[:, None]), axis=1) if part.size else np.zeros(0)
        scores[part] = 0.6745 * (u[part] - center) / np.maximum(spread, plan.deviation_floor)
    wild = present & ~np.isfinite(values) & (before >= plan.min_history)
    scores[wild] = np.inf
    return scores, scored | wild
