"""Everything about a training step that does not change from step to step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

from probes_jax.observe.clip import ClipProbe
from probes_jax.signals.parameters import ParameterInfo
from probes_jax.spec.plan import Plan
from probes_jax.step.loss_scale import LossScale
from probes_jax.step.partition import Partition
from probes_jax.step.select import Path


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity: static to jit
class Settings:
    """What `TrainState.create` worked out once.

    Attributes:
        binding: The wrapped model.
        tx: The optimizer.
        loss_fn: The user's loss function.
        plan: What is measured.
        partition: What is known of the mesh.
        microbatches: Parts that axis 0 of a batch is split into.
        loss_scale: Loss-scale settings, or None.
        key_impl: Name of the key implementation behind `TrainState.key`.
        infos: What is known of each trained parameter.
        shardings: Sharding of every leaf of the state, or None on one device.
        lies: Sharding of each parameter and each tensor of the optimizer state, by name.
        donate: Whether the step may reuse the state's buffers.
        clip: How the chain's clip stage is asked whether it clips, or None.
        missing: Metrics that this run cannot have, and why.
        routes: Whether the model has routers: they are looked at in every step.
        reach: Share of the trained elements that the gradient of each extra term reaches, by the metric's name.
        warnings: What is not as it should be, and what to change; every report's coverage has them.
    """

    binding: Any
    tx: optax.GradientTransformationExtraArgs
    loss_fn: Callable[..., Any]
    plan: Plan
    partition: Partition
    microbatches: int
    loss_scale: LossScale | None
    key_impl: str
    infos: dict[Path, ParameterInfo]
    shardings: Any
    lies: dict[str, Any]
    donate: bool
    clip: ClipProbe | None
    missing: dict[str, str]
    routes: bool = False
    reach: dict[str, float] = dataclasses.field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    programs: dict[str, Any] = dataclasses.field(default_factory=dict)  # name -> jitted function, filled on first use

    @property
    def skips_overflow(self) -> bool:
        """Whether an overflowed gradient is skipped: a dynamic loss scale works by that."""
        return self.loss_scale is not None and self.loss_scale.dynamic

    def replicated(self) -> jax.sharding.Sharding | None:
        mesh = self.partition.mesh
        return None if mesh is None else jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
