"""Balance of experts, of loads that are merged over shards and microbatches."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from probes_jax.signals.measured import Measured, measured
from probes_jax.signals.parameters import Infos, Tensors
from probes_jax.spec.summary import LIMB_BITS, LIMBS
from probes_jax.stats.summary import Summary

Value = tuple[jax.Array, jax.Array]  # float32 and presence, one for each layer


def to_loads(limbs: jax.Array, experts: int) -> jax.Array:
    """Limbs `[layers * E, 4]` to valid tokens float32 `[layers, E]`, exact below 2^24."""
    weights = jnp.asarray([2.0 ** (LIMB_BITS * index) for index in range(LIMBS)], jnp.float32)
    return (limbs * weights).sum(axis=-1).reshape(-1, experts)


def balance(loads: jax.Array, shards: int | None) -> dict[str, Value]:
    """What every step tells: I, MaxVio, and the imbalance of expert-parallel shards.

    Args:
        loads: c_i, float32 `[layers, E]`.
        shards: Into how many shards of neighbours the experts are cut; None where that is not known.

    Returns:
        Absent for a layer that got no valid token.
    """
    total = loads.sum(axis=-1)
    some = total > 0

    def imbalance(parts: jax.Array) -> jax.Array:
        return parts.max(axis=-1) * parts.shape[-1] / jnp.where(some, total, 1.0)

    found = {"imbalance": (imbalance(loads), some), "max_violation": (imbalance(loads) - 1.0, some)}
    if shards is not None:
        found["shard_imbalance"] = (imbalance(loads.reshape(loads.shape[0], shards, -1).sum(axis=-1)), some)
    return found


def spread(loads: jax.Array) -> dict[str, Value]:
    """What a scan tells besides: H, H_norm, experts without a token, exp(H)."""
    total = loads.sum(axis=-1, keepdims=True)
    some = total[:, 0] > 0
    p = loads / jnp.where(total > 0, total, 1.0)
    entropy = -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0), axis=-1)
    return {
        "entropy": (entropy, some),
        "entropy_norm": (entropy / jnp.log(jnp.float32(loads.shape[-1])), some),
        "dead_experts": (jnp.sum(loads == 0, axis=-1).astype(jnp.float32), some),
        "effective_experts": (jnp.exp(entropy), some),
    }


@functools.partial(jax.tree_util.register_dataclass, data_fields=("rows", "bias"), meta_fields=("labels", "path"))
@dataclasses.dataclass(frozen=True)
class Loads:
    """Valid tokens of each expert of one router.

    Attributes:
        rows: `tally` rows with the stack axes of its layers and one of experts.
        labels: A name for each layer, without what follows it.
        path: Path of the router's module.
        bias: `mean` rows of the same stack: a number for each expert, where the model itself hands it over.
    """

    rows: Summary
    labels: tuple[str, ...]
    path: tuple[str, ...]
    bias: Summary | None = None

    def merge(self, other: Loads) -> Loads:
        """Both parts together."""
        bias = None if self.bias is None or other.bias is None else self.bias.merge(other.bias)
        return Loads(self.rows.merge(other.rows), self.labels, self.path, bias)

    @property
    def experts(self) -> int:
        """E."""
        return self.rows.stack_shape()[-1]

    def names(self, stat: str) -> tuple[str, ...]:
        """A name for each expert of each layer."""
        return tuple(f"{label}/{stat}/expert[{index}]" for label in self.labels for index in range(self.experts))

    def measured(self) -> Measured:
        """The entry that is reduced; what a report tells of it is worked out in the graph."""
        return measured(self.names("tokens"), self.rows, hidden=True)

    def read(self, limbs: jax.Array, shards: int | None, *, scan: bool) -> dict[tuple[str, ...], Value]:
        """What a report tells, by its names.

        Args:
            limbs: The merged rows, `[layers * E, 4]`.
            shards: See `balance`.
            scan: Whether to tell everything.
        """
        loads = to_loads(limbs, self.experts)
        values = balance(loads, shards) | (spread(loads) if scan else {})
        found = {tuple(f"{label}/{stat}" for label in self.labels): value for stat, value in values.items()}
        if scan:
            total = loads.sum(axis=-1, keepdims=True)
            share = loads / jnp.where(total > 0, total, 1.0)
            found[self.names("load")] = share, jnp.broadcast_to(total > 0, share.shape)
        return found


def find_expert_shards(path: tuple[str, ...], experts: int, tensors: Tensors, infos: Infos) -> int | None:
    """Into how many shards the mesh cuts the experts of a router: as it cuts the parameters beside it, `[E, ...]`.

    Args:
        path: Path of the router's module.
        experts: E.
        tensors: Parameters, or their gradients.
        infos: What is known of them.

    Returns:
        None where none of them is cut along that axis. The router's own are cut by features, if at all.
    """
    for key, info in infos.items():
        if key[: len(path) - 1] != path[:-1] or key[: len(path)] == path:
            continue
        stack = info.stack_axis if isinstance(info.stack_axis, tuple) else (info.stack_axis,)
        lies = zip(tensors[key].shape, info.split.dims)
        length, cut = next(((n, axes) for axis, (n, axes) in enumerate(lies) if axis not in stack), (0, ()))
        if cut and length == experts:
            sizes = dict(info.split.sizes)
            return math.prod(sizes[axis] for axis in cut)
    return None
