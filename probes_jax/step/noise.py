"""What of a microbatch's gradient goes into the gradient noise scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from probes_jax.detect.noise_scale import NoiseState, estimate_noise, noise_scale, update_noise
from probes_jax.signals.measured import Measured, measured
from probes_jax.signals.parameters import ParameterInfo, measure_squares
from probes_jax.stats.summary import Summary
from probes_jax.stats.types import filled
from probes_jax.step.objective import Notes, Objective
from probes_jax.step.pack import Scalars
from probes_jax.step.reduce import Reduced
from probes_jax.step.select import Path, flatten

KEY, PARTS = "grad/noise_scale", "grad/microbatch_norm"
ONE = "it compares the gradients of parts of a batch with that of the whole: microbatches=K splits it"
UNWEIGHED = "loss_fn returns one number, so the tokens of a microbatch are not known; return pj.Loss(nll=...)"
SPLIT = "under shard_map and pmap the gradient of a microbatch is spread over the devices until the step has ended"


class Noise(NamedTuple):
    """Merged over microbatches."""

    rows: tuple[Summary, ...]  # `norm` rows of sqrt(1 / b_k) g_k, by how the parameters are sharded
    batches: jax.Array  # float32 []: microbatches with a valid token

    def merge(self, other: Noise) -> Noise:
        """Both together."""
        rows = tuple(mine.merge(theirs) for mine, theirs in zip(self.rows, other.rows, strict=True))
        return Noise(rows, self.batches + other.batches)

    def identity(self) -> Noise:
        """That of no microbatch."""
        return Noise(tuple(rows.identity() for rows in self.rows), filled(self.batches, 0.0))

    def scaled(self, factor: jax.Array) -> Noise:
        """That of gradients times a positive number."""
        return Noise(tuple(rows.scaled(factor) for rows in self.rows), self.batches)


Measure = Callable[[Any, jax.Array], Noise]  # (gradients of a sum over tokens, their weight)


def noise_of(
    objective: Objective, infos: Mapping[Path, ParameterInfo], microbatches: int, notes: Notes
) -> Measure | None:
    """What measures a microbatch; None where nothing is to be measured, or cannot be: then `notes` say why."""
    if not objective.scan or "noise" in objective.plan.left_out or all(info.frozen for info in infos.values()):
        return None
    if microbatches == 1 or objective.partition.manual:
        notes.missing[KEY] = ONE if microbatches == 1 else SPLIT
        return None

    def measure(gradients: Any, weight: jax.Array) -> Noise:
        some = weight > 0
        inverse = jnp.where(some, 1.0 / jnp.sqrt(jnp.where(some, weight, 1.0)), 0.0)
        return Noise(measure_squares(flatten(gradients), infos), some.astype(jnp.float32)).scaled(inverse)

    return measure


def name_noise(noise: Noise | None) -> list[Measured]:
    """The report entry of what was merged."""
    return [] if noise is None else [measured(PARTS, *noise.rows)]


def watch_noise(
    state: NoiseState, noise: Noise | None, reduced: Reduced, gradient_norm: jax.Array
) -> tuple[NoiseState, Scalars]:
    """The estimates of this step, and the scale from all so far."""
    if noise is None:
        return state, {}
    parts, tokens = reduced.leaf(PARTS, "sum_sq")[0], reduced.leaf("loss/mean", "weight")[0]
    trace, square, known = estimate_noise(parts, jnp.square(gradient_norm), tokens, noise.batches)
    state = update_noise(state, trace, square, known)
    scale, some = noise_scale(state)
    return state, {"grad/noise/trace": (trace, known), "grad/noise/square": (square, known), KEY: (scale, some)}
