"""Attention logits and how wide each row spreads, without more of the matrix at a time than a block of rows."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from probes_jax.stats.per_token import ATTENTION, PerToken

LOGIT = "logit"
COLUMNS = (LOGIT, "entropy")
_ROWS = 256  # of the matrix, at a time


def apart(found: PerToken) -> tuple[PerToken, ...]:
    """The logit, which may be negative, and the rest; what is of another family in one."""
    if found.family != ATTENTION:
        return (found,)
    first = dataclasses.replace(found, values=found.values[..., :1], names=found.names[:1])
    return first, dataclasses.replace(found, values=found.values[..., 1:], names=found.names[1:])


def measure_attention(
    query: jax.Array,
    key: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
) -> PerToken:
    """The largest logit and the entropy of its row, of each query and head.

    Args:
        query: `[*batch, T, heads, d]`.
        key: `[*batch, S, heads, d]`, or with fewer heads that divide those of the query.
        bias: Added to the logits; broadcasts to `[*batch, heads, T, S]`.
        mask: bool, of the same shape: which keys a query sees.
        scale: What q.k is multiplied by; None: 1 / sqrt(d).
        is_causal: Whether a query sees the keys up to its own position only.

    Returns:
        `COLUMNS` of each query and head, over the keys that it sees: the largest logit, and the entropy in nats. A
        query that sees nothing has no measurement. Heads are not reduced: a mesh may shard them.
    """
    query, key = jax.lax.stop_gradient((query, key))
    bias = None if bias is None else jax.lax.stop_gradient(bias)
    heads, length = query.shape[-2], query.shape[-3]
    if key.shape[-2] != heads:
        key = jnp.repeat(key, heads // key.shape[-2], axis=-2)
    factor = float(query.shape[-1]) ** -0.5 if scale is None else scale
    whole = (*query.shape[:-3], heads, length, key.shape[-3])

    def rows(start: jax.Array | int, count: int) -> jax.Array:
        def part(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, start, count, axis=-2) if x.shape[-2] == length > count else x

        some = jax.lax.dynamic_slice_in_dim(query, start, count, axis=query.ndim - 3) if count < length else query
        logits = jnp.einsum("...qhd,...khd->...hqk", some, key, preferred_element_type=jnp.float32) * factor
        if bias is not None:
            logits = logits + part(jnp.broadcast_to(bias, (*bias.shape[:-2], *whole[-2:])).astype(jnp.float32))
        seen = jnp.ones((), bool) if mask is None else part(jnp.broadcast_to(mask, (*mask.shape[:-2], *whole[-2:])))
        if is_causal:
            at = start + jax.lax.broadcasted_iota(jnp.int32, (count, whole[-1]), 0)
            seen = seen & (jax.lax.broadcasted_iota(jnp.int32, (count, whole[-1]), 1) <= at)
        logits = jnp.where(seen, logits, -jnp.inf)
        highest = logits.max(axis=-1)
        shifted = logits - jnp.where(jnp.isneginf(highest), 0.0, highest)[..., None]
        weight = jnp.exp(shifted)
        total = weight.sum(axis=-1)
        mean = jnp.where(jnp.isneginf(shifted), 0.0, weight * shifted).sum(axis=-1) / jnp.where(total == 0, 1.0, total)
        entropy = jnp.where(total == 0, -jnp.inf, jnp.maximum(jnp.log(total) - mean, 0.0))
        return jnp.stack([jnp.moveaxis(x, -1, -2) for x in (highest, entropy)], axis=-1)

    blocks = length // _ROWS if length % _ROWS == 0 else 1
    if blocks == 1:
        values = rows(0, length)
    else:
        found = jax.lax.map(lambda index: rows(index * _ROWS, _ROWS), jnp.arange(blocks))
        values = jnp.moveaxis(found, 0, -4).reshape(*query.shape[:-1], len(COLUMNS))
    return PerToken(values, ATTENTION, COLUMNS, query.ndim - 1)
