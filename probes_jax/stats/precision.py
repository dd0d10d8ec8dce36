"""What a tensor would lose in a narrower format, and how heavy its tails are, beside its usual summary."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from probes_jax.stats.fold import fold
from probes_jax.stats.formats import loss_folds
from probes_jax.stats.moments import summarize_magnitude, summarize_moments
from probes_jax.stats.partial import WHOLE, Split, cut
from probes_jax.stats.shape import WIDTH, deviation_folds, shape_parts
from probes_jax.stats.summary import Summary


def _beside(summarize: Callable[[jax.Array, Split], Summary], x: jax.Array, split: Split) -> Summary:
    """The summary with counts of what formats lose, and with the parts of the kurtosis.

    A second pass goes about the mean that the first one found. A shared pivot would do only near the mean, and tails
    are what decides a fourth moment.
    """
    plain, moments = summarize(x, split), summarize_moments(x, split)
    part = cut(jax.lax.stop_gradient(x), split)
    size = part.part_size
    if size == 0:
        lost = {name: jnp.zeros_like(plain.leaves["nan"]) for name in loss_folds()}
        parts = jnp.zeros((*part.rows, WIDTH), jnp.float32)
    else:
        leaf = moments.leaves
        known = (leaf["nan"].sum(axis=-1) == 0) & (leaf["inf"].sum(axis=-1) == 0)
        high, low = (jnp.where(known, bound, 0.0) for bound in (leaf["max"], -leaf["neg_min"]))
        mean = (leaf["mean_hi"] + leaf["mean_lo"]) / size
        center = jnp.where(known & jnp.isfinite(mean), jnp.clip(mean, low, high), low)
        scale = high / 2 - low / 2
        found = fold(part, {**loss_folds(), **deviation_folds(center, scale)})
        lost = {name: found[name] for name in loss_folds()}
        parts = shape_parts(part, found, center, scale, known)
    leaves = {**plain.leaves, **lost}
    return dataclasses.replace(Summary.of(leaves, f"precise_{plain.kind}", plain.axes), parts=parts)


@functools.partial(jax.jit, static_argnames="split", inline=False)  # as in `stats.moments`
def summarize_moments_precisely(x: jax.Array, split: Split = WHOLE) -> Summary:
    """`summarize_moments`, what formats lose, and the kurtosis. `precise_moments` rows."""
    return _beside(summarize_moments, x, split)


@functools.partial(jax.jit, static_argnames="split", inline=False)
def summarize_magnitude_precisely(x: jax.Array, split: Split = WHOLE) -> Summary:
    """`summarize_magnitude`, what formats lose, and the kurtosis. `precise_magnitude` rows."""
    return _beside(summarize_magnitude, x, split)
