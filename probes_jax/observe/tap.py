"""A tap: nothing in the forward pass; in the backward pass it summarizes the gradient that comes by.

The summary leaves the backward pass as the gradient of an argument of zeros, the slot. It is counted once under remat,
and once per iteration in a scan, where the slot has a leading axis. Gradients of a shared slot are *added* by JAX, and
a sum of maxima is no maximum: every tap has a slot of its own, each iteration too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from probes_jax.stats.summary import Summary

Measure = Callable[[jax.Array], Summary]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def tap(measure: Measure, x: jax.Array, slot: Summary) -> jax.Array:
    """`x` itself. The gradient of `slot` is the summary of the gradient of `x`.

    Args:
        measure: Summarizes an array of the shape of `x`; static.
        x: A real array.
        slot: Zeros, in the structure that `measure` returns.

    Example:
        >>> import jax.numpy as jnp
        >>> from probes_jax.stats.moments import summarize_norm
        >>> slot = jax.tree.map(jnp.zeros_like, summarize_norm(jnp.ones(2)))
        >>> loss = lambda slot: 3.0 * tap(summarize_norm, jnp.ones(2), slot).sum()
        >>> print(jax.grad(loss)(slot).leaves["sum_sq"])
        18.0
    """
    return x


def _forward(measure: Measure, x: jax.Array, slot: Summary) -> tuple[jax.Array, None]:
    return x, None


def _backward(measure: Measure, _: None, gradient: jax.Array) -> tuple[jax.Array, Summary]:
    return gradient, measure(gradient)


tap.defvjp(_forward, _backward)


def fits(slot: Summary, measured: Summary) -> bool:
    """Whether a slot has the structure and the shapes of what will be measured."""
    return jax.tree.structure(slot) == jax.tree.structure(measured) and all(
        a.shape == b.shape for a, b in zip(jax.tree.leaves(slot), jax.tree.leaves(measured), strict=True)
    )
