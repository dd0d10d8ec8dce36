"""Which experts each token goes to, from what a router returned."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from probes_jax.stats.exact import encode_count
from probes_jax.stats.partial import WHOLE, Split, cut
from probes_jax.stats.per_token import NOTHING, ROUTER, PerToken
from probes_jax.stats.sketch import count_buckets
from probes_jax.stats.summary import Summary

EXPERT, MARGIN = "expert", "margin"
NO_TOP_K = (
    "the router returns a score for each expert, but not to how many of them a token goes; say so: pj.Plan(top_k=...)"
)
NO_EXPERTS = (
    "the router returns the numbers of the chosen experts, but nothing says how many experts there are; say so in the "
    "model: pj.observe_routing(name, indices, experts=...)"
)


def read_routing(output: Any, top_k: int | None) -> PerToken | str:
    """What a router's output says of each token; else why it says nothing, and what to do.

    Args:
        output: What the module returned: scores, logits or weights float `[*positions, E]`, numbers of the chosen
            experts int `[*positions, k]`, or both, in any pytree.
        top_k: Experts a token goes to, where there are scores only.
    """
    arrays = [x for x in jax.tree.leaves(output) if hasattr(x, "dtype") and jnp.ndim(x) > 1]
    scores = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]
    chosen = next((x for x in arrays if jnp.issubdtype(x.dtype, jnp.integer)), None)
    wide = max(scores, key=lambda x: x.shape[-1], default=None)
    if chosen is not None:
        if wide is None or wide.shape[-1] <= chosen.shape[-1] or wide.shape[:-1] != chosen.shape[:-1]:
            return NO_EXPERTS
        return of_tokens(chosen, wide.shape[-1], wide)
    if wide is None:
        return "the router returns no array with an axis of experts; say in the model: pj.observe_routing(...)"
    if top_k is None:
        return NO_TOP_K
    if top_k >= wide.shape[-1]:
        return (
            f"Plan top_k={top_k}, but the router returns scores of {wide.shape[-1]} experts: there is no choice. "
            "Experts chosen elsewhere are named with pj.observe_routing"
        )
    return of_tokens(jax.lax.top_k(wide, top_k)[1], wide.shape[-1], wide)


def of_tokens(
    indices: jax.Array, experts: int, scores: jax.Array | None = None, bias: jax.Array | None = None
) -> PerToken:
    """The chosen experts of each token, and by how much the last one was chosen.

    Args:
        indices: int `[*positions, k]`.
        experts: E.
        scores: float `[*positions, E]`: the margin is the k-th largest less the one after it.
        bias: float `[E]`, what is added to the score of each expert.
    """
    k = indices.shape[-1]
    columns = [jax.lax.stop_gradient(indices).astype(jnp.float32)]
    names: tuple[str, ...] = (EXPERT,) * k
    if scores is not None and k < experts:
        highest = jax.lax.top_k(jax.lax.stop_gradient(scores).astype(jnp.float32), k + 1)[0]
        last, after = highest[..., k - 1 : k], highest[..., k:]  # an expert that is closed has the score -inf
        columns.append(jnp.where(jnp.isneginf(after), NOTHING, last - after))
        names = (*names, MARGIN)
    bias = None if bias is None else jax.lax.stop_gradient(bias).astype(jnp.float32)
    return PerToken(jnp.concatenate(columns, axis=-1), ROUTER, names, indices.ndim - 1, experts, bias)


def margins(found: PerToken) -> PerToken | None:
    """Of the routing of tokens, by how much the last expert was chosen; None where that is not known."""
    if MARGIN not in found.names:
        return None
    return dataclasses.replace(found, values=found.values[..., -1:], names=(MARGIN,), bias=None)


def summarize_bias(bias: jax.Array, split: Split = WHOLE) -> Summary:
    """The numbers of each expert as `mean` rows, `bias.shape` the stack: a shard has them in their places, others not.

    Args:
        bias: float `[*stack, E]`; `NOTHING` is absent.
        split: How the mesh shards it.
    """
    x, sizes = cut(bias.astype(jnp.float32), split), dict(split.sizes)
    rows, array = len(x.axes), x.array
    for axis in range(bias.ndim):
        array = jnp.concatenate([array] * (bias.shape[axis] // array.shape[rows + axis]), rows + axis)
    mine = jnp.ones(array.shape, bool)
    for axis in range(bias.ndim):
        here, length = jnp.zeros(array.shape, jnp.int32), x.array.shape[rows + axis]
        for name in split.dims[axis] if axis < len(split.dims) and length < bias.shape[axis] else ():
            here = here * sizes[name] + jax.lax.broadcasted_iota(jnp.int32, array.shape, x.axes.index(name))
        mine &= jax.lax.broadcasted_iota(jnp.int32, array.shape, rows + axis) // length == here
    told = mine & (array != NOTHING)
    leaves = {"total": jnp.where(told, array, 0.0), "weight": told.astype(jnp.float32)}
    behind = {key: jnp.moveaxis(leaf, range(rows), range(bias.ndim, leaf.ndim)) for key, leaf in leaves.items()}
    return Summary.of(behind, "mean", x.axes)


def count_experts(found: PerToken, valid: jax.Array, split: Split = WHOLE) -> Summary:
    """How many valid tokens each expert got: `tally` rows with the stack axes of `found` and one of experts.

    Args:
        found: From `of_tokens`.
        valid: Which positions count, bool `[*positions]`.
        split: How the mesh shards `found.values`, the stack not at all.
    """
    stack, k = len(found.stack_shape()), found.names.count(EXPERT)
    x = cut(found.values[..., :k], split)
    rows = len(x.axes)
    ok = cut(valid, Split(split.dims[stack:], split.sizes)).array
    ok = ok.reshape(*x.rows, *(1,) * stack, *ok.shape[rows:], 1)
    counted = ok & (x.array >= 0) & (x.array < found.size)
    number = jnp.where(counted, x.array, 0).astype(jnp.int32)
    kept = x.array.shape[: rows + stack]
    counts = count_buckets(number.reshape(*kept, -1), counted.reshape(*kept, -1), found.size)
    counts = jnp.moveaxis(counts, range(rows), range(stack + 1, stack + 1 + rows))
    return Summary.of({"count": encode_count(counts.astype(jnp.uint32))}, "tally", x.axes)
