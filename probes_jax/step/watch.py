"""From merged values to detectors, counters and alerts, inside the step."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from probes_jax.detect.clip_rate import push_clip
from probes_jax.detect.co_spike import CoSpikeState, update_co_spike
from probes_jax.detect.guard import GuardState
from probes_jax.detect.spike import SpikeScores, is_spike, score_spikes
from probes_jax.detect.window import WindowState
from probes_jax.spec.plan import Plan
from probes_jax.step.monitor import SIGNALS, MonitorState, add_tokens
from probes_jax.step.pack import Counters, Scalars
from probes_jax.step.reduce import Reduced

_LOSS, _GRAD, _UPDATE = range(len(SIGNALS))


@dataclasses.dataclass(frozen=True)
class Values:
    """Merged values that decisions are made on; the same on every device."""

    loss: jax.Array  # float32, nats
    has_loss: jax.Array  # bool: any valid token
    gradient_norm: jax.Array  # float32, over parameters that the optimizer moves
    all_gradient_norm: jax.Array  # float32, over everything that the optimizer sees
    finite: jax.Array  # bool: no NaN or inf in loss, extra terms or gradient
    finite_gradient: jax.Array  # bool: no NaN or inf in any gradient, that of frozen parameters included


def read_values(reduced: Reduced) -> Values:
    """Loss and gradient norm from merged leaves."""
    total, weight = reduced.leaf("loss/mean", "total")[0], reduced.leaf("loss/mean", "weight")[0]
    has_loss = weight != 0  # a NaN among the weights is no empty batch
    loss = total / jnp.where(has_loss, weight, 1.0)
    keys = {entry.key for entry in reduced.layout.entries}
    square, frozen, bad = jnp.float32(0.0), jnp.float32(0.0), jnp.float32(0.0)
    if "grad/{stat}" in keys:
        square = reduced.leaf("grad/{stat}", "sum_sq")[0]
    if "grad_frozen/{stat}" in keys:
        frozen = reduced.leaf("grad_frozen/{stat}", "sum_sq")[0]
    for key in keys & {"grad/{stat}", "grad_frozen/{stat}"}:  # a clip spreads a frozen NaN to all parameters
        bad = bad + reduced.leaf(key, "nan").sum() + reduced.leaf(key, "inf").sum()
    finite = (jnp.isfinite(loss) | ~has_loss) & (bad == 0)
    for key in keys:
        if key.startswith("loss/extra/"):  # a constant term leaves the gradient as it is, but not what is optimized
            finite &= jnp.isfinite(reduced.leaf(key, "total")[0])
    return Values(loss, has_loss, jnp.sqrt(square), jnp.sqrt(square + frozen), finite, bad == 0)


def update_norm(reduced: Reduced) -> jax.Array:
    """Norm of the update that was really applied, float32, 0-d."""
    return jnp.sqrt(reduced.leaf("update/{stat}", "sum_sq")[0])


def score(
    window: WindowState, plan: Plan, values: Values, update_norm: jax.Array | None
) -> tuple[WindowState, SpikeScores]:
    """Spike scores of loss, gradient norm and update norm."""
    update = jnp.float32(0.0) if update_norm is None else update_norm
    readings = jnp.stack([values.loss, values.gradient_norm, update])
    present = jnp.stack([values.has_loss, values.has_loss, jnp.bool_(update_norm is not None)])
    return score_spikes(window, readings, present, min_history=plan.min_history, floor=plan.deviation_floor)


def is_co_spike(scores: SpikeScores, theta: float) -> jax.Array:
    """C_t: loss and gradient norm spike on the same step."""
    high = is_spike(scores, theta)
    return high[_LOSS] & high[_GRAD]


def watch(
    monitor: MonitorState,
    guard: GuardState,
    plan: Plan,
    reduced: Reduced,
    values: Values,
    update: jax.Array,
    clipped: jax.Array | None,
) -> tuple[MonitorState, Scalars, Counters]:
    """Updates the detectors and names what they say.

    Args:
        monitor: State before the step.
        guard: Guard counters after this step's decision.
        plan: Thresholds.
        reduced: All merged leaves of the step.
        values: Loss and gradient norm.
        update: Norm of the update, float32, 0-d.
        clipped: Whether the clip stage shrank the gradient, or None where that is not known.

    Returns:
        New monitor state (loss scale untouched), scalars, counters.
    """
    window, scores = score(monitor.window, plan, values, update)
    co_spike = update_co_spike(monitor.co_spike, scores.z[_LOSS], scores.z[_GRAD], is_co_spike(scores, plan.theta))
    scalars = {**_spike_scalars(scores), **_co_spike_scalars(scores, plan.theta, co_spike)}
    clip = monitor.clip
    if clipped is not None:
        clip, rate, known = push_clip(clip, clipped, values.has_loss)
        scalars["grad/clip_rate"] = (rate, known)
    tokens, counters = monitor.tokens, _guard_counters(guard)
    if any(entry.key == "data/tokens" for entry in reduced.layout.entries):
        tokens = add_tokens(tokens, reduced.leaf("data/tokens", "count")[0])
        counters["data/tokens_total"] = tokens
    counters["alert/co_spike/count"] = co_spike.count
    counters["alert/co_spike/nonfinite_count"] = co_spike.nonfinite
    return monitor._replace(window=window, co_spike=co_spike, clip=clip, guard=guard, tokens=tokens), scalars, counters


def _spike_scalars(scores: SpikeScores) -> Scalars:
    names = {"u": scores.u, "median": scores.q, "deviation": scores.deviation, "score": scores.z}
    present = {
        "u": scores.applicable,
        "median": scores.has_history,
        "deviation": scores.has_history,
        "score": scores.scored,
    }
    return {
        f"{signal}/spike/{stat}": (value[index], present[stat][index])
        for index, signal in enumerate(SIGNALS)
        for stat, value in names.items()
    }


def _co_spike_scalars(scores: SpikeScores, theta: float, state: CoSpikeState) -> Scalars:
    known = scores.scored[_LOSS] & scores.scored[_GRAD]
    return {
        "alert/co_spike": (is_co_spike(scores, theta).astype(jnp.float32), known),
        "alert/co_spike/magnitude": (state.magnitude, True),
    }


def _guard_counters(guard: GuardState) -> Counters:
    return {
        "alert/guard/skipped_count": guard.skipped,
        "alert/guard/consecutive": guard.consecutive,
        "alert/guard/stopped": guard.stopped,
        "alert/nonfinite_steps": guard.nonfinite_steps,
        "alert/nonfinite_accepted": guard.accepted_bad,
        "opt/steps_applied": guard.applied,
        "data/empty_steps": guard.empty_steps,
    }
