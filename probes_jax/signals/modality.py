"""Tokens of several modalities: their share, and the scale at which they enter the backbone."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from probes_jax.signals.measured import Measured, measured
from probes_jax.stats.partial import Split, cut
from probes_jax.stats.summary import Summary

SHARE, SCALE = "media/{0}/token_share", "media/{0}/scale"


def measure_shares(modality: jax.Array, valid: jax.Array, split: Split, *, count: int) -> Summary:
    """`mean` rows with a stack axis of modalities: valid tokens of each over all valid tokens.

    Args:
        modality: Ids, int `[*positions]`; those outside of `[0, count)` are of none.
        valid: Which positions count, bool of the same shape.
        split: How the mesh shards them.
        count: How many modalities there are.
    """
    return measure_scales(jnp.ones(modality.shape, jnp.float32), modality, valid, split, count=count, of_all=True)


def measure_scales(
    square: jax.Array, modality: jax.Array, valid: jax.Array, split: Split, *, count: int, of_all: bool = False
) -> Summary:
    """`mean` rows with a stack axis of modalities: the mean of `square` over the valid tokens of each.

    Args:
        square: Mean square of each token's embedding, float32 `[*positions]`.
        modality: See `measure_shares`.
        valid: See `measure_shares`.
        split: See `measure_shares`.
        count: See `measure_shares`.
        of_all: Divide by all valid tokens.
    """
    x, ids, ok = (cut(array, split) for array in (jax.lax.stop_gradient(square), modality, valid))
    totals, weights = [], []
    for number in range(count):
        own = ok.array & (ids.array == number)
        totals.append(jnp.sum(jnp.where(own, x.array, 0.0), axis=x.inner))
        weights.append(jnp.sum((ok.array if of_all else own).astype(jnp.float32), axis=x.inner))
    return Summary.of({"total": jnp.stack(totals), "weight": jnp.stack(weights)}, "mean", x.axes)


def name_modalities(rows: dict[str, Summary], names: tuple[str, ...]) -> list[Measured]:
    """Report entries: shares in every step, and in a scan the scales, which are read in the graph."""
    out = []
    if "modality" in rows:
        out.append(measured(tuple(SHARE.format(name) for name in names), rows["modality"]))
    if "scale" in rows:
        out.append(measured(tuple(SCALE.format(name) for name in names), rows["scale"], hidden=True))
    return out


def scale_ratios(total: jax.Array, weight: jax.Array, names: tuple[str, ...]) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Gamma of each modality but the first, which is the text.

    Args:
        total: Merged leaves of the scales, float32 `[modalities]`.
        weight: The same.
        names: Of the modalities.

    Returns:
        RMS over the RMS of the text, and whether both have a token.
    """
    rms = jnp.sqrt(total / jnp.where(weight > 0, weight, 1.0))
    text = jnp.where(rms[0] > 0, rms[0], 1.0)
    return {
        f"media/{name}/scale_ratio": (rms[index] / text, (weight[index] > 0) & (weight[0] > 0) & (rms[0] != 0))
        for index, name in enumerate(names)
        if index
    }
