"""What monitoring carries from step to step, beside parameters and optimizer state."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from probes_jax.detect.clip_rate import ClipState, init_clip
from probes_jax.detect.co_spike import CoSpikeState, init_co_spike
from probes_jax.detect.guard import GuardState, init_guard
from probes_jax.detect.noise_scale import NoiseState, init_noise
from probes_jax.detect.window import WindowState, init_window
from probes_jax.spec.plan import Plan
from probes_jax.step.loss_scale import LossScale, LossScaleState, init_loss_scale

VERSION = 1
SIGNALS = ("loss", "grad", "update")  # what the spike detectors watch: L, G_2, norm of the applied update


class MonitorState(NamedTuple):
    """Saved with the train state; a checkpoint of another plan or version restores with defaults for what is new."""

    version: jax.Array  # uint32
    window: WindowState  # one row per signal of SIGNALS
    co_spike: CoSpikeState
    clip: ClipState
    guard: GuardState
    loss_scale: LossScaleState
    tokens: jax.Array  # uint32 [2]: valid tokens so far, low and high word (an int64 would wrap without x64)
    learning_rate_multiplier: jax.Array  # float32; 1 unless a response lowered it
    noise: NoiseState


def init_monitor(plan: Plan, loss_scale: LossScale | None) -> MonitorState:
    """The state before the first step."""
    return MonitorState(
        version=jnp.uint32(VERSION),
        window=init_window(len(SIGNALS), plan.window),
        co_spike=init_co_spike(),
        clip=init_clip(plan.clip_window),
        guard=init_guard(),
        loss_scale=init_loss_scale(loss_scale),
        tokens=jnp.zeros((2,), jnp.uint32),
        learning_rate_multiplier=jnp.float32(1.0),
        noise=init_noise(),
    )


def add_tokens(total: jax.Array, limbs: jax.Array) -> jax.Array:
    """Two-word total plus a count given as four float limbs of eight bits (each an exact integer below 2^24)."""
    low, high = total[0], total[1]
    for index in range(limbs.shape[-1]):
        value = limbs[index].astype(jnp.uint32)
        shift = 8 * index
        part = value << shift  # the low word's share
        high = high + ((value >> (32 - shift)) if shift else jnp.uint32(0))
        low, before = low + part, low
        high = high + (low < before).astype(jnp.uint32)  # the carry of the addition
    return jnp.stack([low, high])
