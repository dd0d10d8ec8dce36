"""Microbatches: gradients of sums are added and divided once, summaries merge, the state is carried through."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from probes_jax.observe.point import Point
from probes_jax.observe.record import slots_like
from probes_jax.signals.parameters import ParameterInfo
from probes_jax.stats.manual import add_up
from probes_jax.stats.summary import Summary, is_summary
from probes_jax.stats.types import filled, in_automatic_mode, types_of
from probes_jax.step.loss_scale import unscale
from probes_jax.step.noise import KEY, UNWEIGHED, noise_of
from probes_jax.step.objective import Notes, Objective, Part
from probes_jax.step.select import Path

Key = jax.Array


def _split(batch: Any, count: int, shards: int) -> Any:
    """`[B, ...]` to `[count, B / count, ...]`, every shard giving its part to every microbatch where it can."""

    def leaf(x: jax.Array) -> jax.Array:
        size = x.shape[0]
        if shards > 1 and size % (shards * count) == 0:
            parts = x.reshape(shards, count, size // (shards * count), *x.shape[1:])
            return jnp.moveaxis(parts, 1, 0).reshape(count, size // count, *x.shape[1:])
        return x.reshape(count, size // count, *x.shape[1:])

    def lies(x: jax.Array) -> Callable[..., Any]:
        def dims(before: Any, sizes: Any) -> Any:
            fits = x.shape[0] // count % math.prod(sizes[axis] for axis in before[0]) == 0
            return (), before[0] if fits else (), *before[1:]

        return dims

    return jax.tree.map(lambda x: in_automatic_mode(leaf, lies(x), x), batch)


def accumulate(
    objective: Objective,
    params: Any,
    merge: Callable[[Any], Any],
    state: Any,
    batch: Any,
    key: Key,
    scale: jax.Array | None,
    microbatches: int,
    notes: Notes,
    infos: Mapping[Path, ParameterInfo],
) -> tuple[jax.Array, Any, Part]:
    """Value and gradient of the whole batch's mean loss, unscaled, and everything measured, merged.

    Args:
        objective: The function to differentiate.
        params: What is trained; `merge` puts the frozen rest back.
        merge: Trained parameters to all parameters.
        state: The model's state, carried through the microbatches in order.
        batch: Arrays with the examples on axis 0.
        key: Key of this step; microbatch `k` gets `fold_in(key, k)`.
        scale: Loss scale, or None.
        microbatches: K; axis 0 is split into K parts.
        notes: Filled with what tracing finds out.
        infos: What is known of each trained parameter.

    Returns:
        The loss (float32, 0-d), its gradients in the parameters' dtype, and the merged parts. Without a valid token
        loss and gradients are zero. Under a `shard_map` of the user's, this device's share of the loss.
    """
    factor = jnp.float32(1.0) if scale is None else scale

    def mean(p: Any, taps: Any, s: Any, b: Any, k: Key) -> tuple[jax.Array, Part]:
        total, weight, part = objective(merge(p), s, b, k, notes, taps)
        weight = add_up(weight, objective.partition.apart(total, weight))
        some = weight != 0  # a NaN among the weights is no empty batch
        return jnp.where(some, total / jnp.where(some, weight, 1.0), 0.0) * factor, part

    def summed(p: Any, taps: Any, s: Any, b: Any, k: Key) -> tuple[jax.Array, Part]:
        total, _, part = objective(merge(p), s, b, k, notes, taps)
        return total * (
            factor / (notes.tokens * microbatches)
        ), part  # a gradient of the size of the mean's, in float16

    noise = noise_of(objective, infos, microbatches, notes)
    if microbatches == 1:
        key = jax.random.fold_in(key, 0)
        slots = _slots(objective, summed, params, state, batch, key)
        differentiate = jax.value_and_grad(mean, (0, 1), has_aux=True)
        (value, part), (gradients, taps) = differentiate(params, slots, state, batch, key)
        gradients = gradients if scale is None else unscale(gradients, scale)
        return (
            value / factor,
            gradients,
            _with_backward(part, _backward(notes, taps), None if scale is None else 1 / scale),
        )

    parts = _split(batch, microbatches, objective.partition.shards)
    first = jax.tree.map(lambda x: x[0], parts)
    slots = _slots(objective, summed, params, state, first, key)
    value_and_grad = jax.value_and_grad(summed, (0, 1), has_aux=True)

    def differentiate(*args: Any) -> Any:
        (total, part), (gradients, taps) = value_and_grad(*args)
        if noise is not None and "tokens" in part.rows:
            part = dataclasses.replace(part, noise=noise(gradients, part.weight))
        return (total, part), (gradients, taps)

    shapes = types_of(differentiate, params, slots, state, first, key)
    sums = jax.tree.map(lambda x: filled(x, 0.0), (shapes[0][0], shapes[1][0]))
    carry = sums, _identity(slots), _nothing(shapes[0][1], state)

    def body(carry: Any, at: tuple[jax.Array, Any]) -> tuple[Any, Any]:
        index, microbatch = at
        so_far, backward, merged = carry
        here = jax.random.fold_in(key, index)
        (total, part), (gradients, taps) = differentiate(params, slots, merged.state, microbatch, here)
        added = jax.tree.map(lambda a, g: a + g.astype(jnp.float32), so_far, (total, gradients))
        backward = jax.tree.map(Summary.merge, backward, taps, is_leaf=is_summary)
        aux, part = part.aux, dataclasses.replace(part, aux=None, raw=())
        return (added, backward, merged.merge(part)), aux

    ((total, gradients), taps, part), aux = jax.lax.scan(
        body, carry, (jnp.arange(microbatches, dtype=jnp.uint32), parts)
    )
    weight = add_up(part.weight, objective.partition.apart(total, part.weight))
    some, factor = weight != 0, factor / (notes.tokens * microbatches)
    divide = jnp.where(some, 1.0 / (jnp.where(some, weight, 1.0) * factor), 0.0)
    gradients = jax.tree.map(lambda g, p: (g * divide).astype(p.dtype), gradients, params)
    part = dataclasses.replace(part, aux=aux)
    if part.noise is not None:
        part = dataclasses.replace(part, noise=part.noise.scaled(divide * jnp.sqrt(weight)))
    elif noise is not None:
        notes.missing[KEY] = UNWEIGHED
    return total * divide, gradients, _with_backward(part, _backward(notes, taps), divide)


def _slots(objective: Objective, summed: Any, params: Any, state: Any, batch: Any, key: Key) -> Any:
    """Zeros for the taps on activations, in the structure of what one evaluation measures; nothing without taps."""
    if not objective.backward:
        return ()
    _, part = types_of(summed, params, None, state, batch, key)
    return slots_like(part.raw)


def _backward(notes: Notes, taps: Any) -> dict[Point, Summary]:
    return notes.backward(taps) if taps else {}


def _with_backward(part: Part, found: dict[Point, Summary], factor: jax.Array | None) -> Part:
    """The part with the gradients of its points, unscaled and of the mean loss, as the parameters' gradients are."""
    if factor is not None:  # without a token every gradient is zero already
        safe = jnp.where(factor != 0, factor, 1.0)
        found = {point: summary.scaled(safe) for point, summary in found.items()}
    return dataclasses.replace(part, raw=(), gradients=tuple(found.values()), gradient_names=tuple(found))


def _identity(tree: Any) -> Any:
    return jax.tree.map(Summary.identity, tree, is_leaf=is_summary)


def _nothing(shape: Part, state: Any) -> Part:
    """The part of no microbatch: merging it changes nothing."""
    kept = (shape.rows, shape.points, shape.extra, shape.tokens, shape.loads)
    rows, points, extra, tokens, loads = map(_identity, kept)
    noise = None if shape.noise is None else shape.noise.identity()
    nothing = filled(shape.weight, 0.0)
    return Part(nothing, rows, points, extra, state, None, shape.names, tokens=tokens, loads=loads, noise=noise)
