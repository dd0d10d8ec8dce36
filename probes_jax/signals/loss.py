"""Token loss: global mean, per shard, per group, as sums that merge."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from probes_jax.signals.measured import Measured, measured
from probes_jax.stats.exact import encode_count
from probes_jax.stats.explicit import of_this_device
from probes_jax.stats.partial import Split, cut
from probes_jax.stats.summary import Summary


def _mean(total: jax.Array, weight: jax.Array, axes: tuple[str, ...]) -> Summary:
    return Summary.of({"total": total, "weight": weight}, "mean", axes)


def weighted_sums(nll: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Per-token `m * nll` and `m` in float32, with everything at or below weight 0 taken out (also its NaN).

    A weight that is NaN stays, so that it shows.
    """
    weight = weight.astype(jnp.float32)
    valid = ~(weight <= 0)
    return jnp.where(valid, nll.astype(jnp.float32) * weight, 0.0), jnp.where(valid, weight, 0.0)


def measure_loss(
    nll: jax.Array,
    weight: jax.Array,
    group: jax.Array | None,
    groups: tuple[str, ...],
    split: Split,
) -> dict[str, Summary]:
    """Loss rows of one microbatch, still in one row per token shard.

    Args:
        nll: Negative log-likelihood in nats, `[batch, length]` or `[batch]`.
        weight: Mask or weights of the same shape; a token is valid when its weight is above 0.
        group: Group id per token, same shape, or None.
        groups: Names of the groups; an id outside them counts as `other`.
        split: How the mesh shards `nll`.

    Returns:
        `mean` and `tally` rows by name: `loss`, `tokens`, and with groups `group` and `share` (stacked by group).
    """
    nll = jax.lax.stop_gradient(nll)
    loss, weight = weighted_sums(nll, jax.lax.stop_gradient(weight))
    losses, weights = cut(loss, split), cut(weight, split)
    axes, inner = losses.axes, losses.inner

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(x, axis=inner)

    rows = {
        "loss": _mean(total(losses.array), total(weights.array), axes),
        "tokens": Summary.of(
            {"count": encode_count(jnp.sum(weights.array > 0, axis=inner, dtype=jnp.uint32))}, "tally", axes
        ),
    }
    if group is not None:
        ids = cut(group, split).array
        known = (ids >= 0) & (ids < len(groups))
        members = [ids == index for index in range(len(groups))] + [~known]
        of_group = [jnp.where(member, weights.array, 0.0) for member in members]
        group_weight = jnp.stack([total(w) for w in of_group])
        group_loss = jnp.stack([total(jnp.where(member, losses.array, 0.0)) for member in members])
        everything = jnp.broadcast_to(total(weights.array), group_weight.shape)
        rows["group"] = _mean(group_loss, group_weight, axes)
        rows["share"] = _mean(group_weight, everything, axes)
    return rows


def measure_scalar_loss(value: jax.Array, axes: tuple[str, ...] = ()) -> dict[str, Summary]:
    """Rows of a loss given as one scalar: its mean over microbatches. Shards and groups are not known.

    Args:
        value: The loss, 0-d.
        axes: Under `shard_map`, the mesh axes over which devices have a loss each.
    """
    value = jax.lax.stop_gradient(value).astype(jnp.float32)
    return {"loss": of_this_device(_mean(value, jnp.ones_like(value), ()), axes, value)}


def measure_extra(value: jax.Array, weight: jax.Array, axes: tuple[str, ...] = ()) -> Summary:
    """An optimized scalar beside the loss; microbatches, and devices under `shard_map`, count by their weight."""
    value = jax.lax.stop_gradient(value).astype(jnp.float32)
    return of_this_device(_mean(jnp.where(weight != 0, value * weight, 0.0), weight, ()), axes, value, weight)


def name_loss(rows: dict[str, Summary], groups: tuple[str, ...], *, shards: bool = True) -> list[Measured]:
    """Report entries of the rows of `measure_loss` or `measure_scalar_loss`, merged over microbatches.

    Args:
        rows: What was measured.
        groups: Names of the groups.
        shards: Whether the rows are the shards: a loss that could not be cut has one row for all.
    """
    out = [measured("loss/mean", rows["loss"])]
    if "tokens" in rows:
        out.append(measured("data/tokens", rows["tokens"]))
        if shards:
            labels = tuple(f"loss/shard[{index}]" for index in range(rows["loss"].row_count))
            out.append(measured(labels, rows["loss"], gather=True))
    if "group" in rows:
        names = (*groups, "other")
        out.append(measured(tuple(f"loss/group/{name}/mean" for name in names), rows["group"]))
        out.append(measured(tuple(f"loss/group/{name}/token_share" for name in names), rows["share"]))
    return out
