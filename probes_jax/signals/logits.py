"""The model's output: absolute maximum and mean logsumexp, every step."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from probes_jax.signals.measured import Measured, measured
from probes_jax.stats.moments import summarize_extreme
from probes_jax.stats.partial import Split, cut
from probes_jax.stats.summary import Summary


def measure_logits(logits: jax.Array, weight: jax.Array | None, split: Split) -> dict[str, Summary]:
    """Rows of the output logits.

    Args:
        logits: `[..., classes]`.
        weight: Token weights of shape `logits.shape[:-1]`; None counts every position.
        split: How the mesh shards `logits`.

    Returns:
        `extreme` rows over all logits, and `mean` rows of logsumexp over the valid positions, where there are classes.
    """
    logits = jax.lax.stop_gradient(logits)
    if not has_classes(logits.shape):
        return {"logits": summarize_extreme(logits, split)}
    lse = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    weight = jnp.ones(lse.shape, jnp.float32) if weight is None else weight.astype(jnp.float32)
    valid = (weight > 0).astype(jnp.float32)
    token_split = Split(split.dims[: lse.ndim], split.sizes)
    total = cut(jnp.where(valid > 0, lse, 0.0), token_split)
    count = cut(valid, token_split)
    sums = {"total": jnp.sum(total.array, axis=total.inner), "weight": jnp.sum(count.array, axis=count.inner)}
    return {"logits": summarize_extreme(logits, split), "logsumexp": Summary.of(sums, "mean", total.axes)}


def has_classes(shape: tuple[int, ...]) -> bool:
    """Whether the last axis of an output can be one of classes; that of a regression is not."""
    return len(shape) > 1 and shape[-1] > 1


def name_logits(rows: dict[str, Summary]) -> list[Measured]:
    """Report entries of the rows of `measure_logits`."""
    names = {"logits": "logits/{stat}", "logsumexp": "logits/logsumexp"}
    return [measured(label, rows[name]) for name, label in names.items() if name in rows]
