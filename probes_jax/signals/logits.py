"""The model's output: absolute maximum and mean logsumexp, every step.

Logits are the largest array of a step, and this runs in every one. Only reductions over the classes are taken of them,
of the kind that the loss takes too: XLA makes them where it makes the logits. Anything that looks at each logit by
itself (a count of NaN) makes it write an array of their size (v5e, head of 32,768 classes: 33 MB a device).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from probes_jax.signals.measured import Measured, measured
from probes_jax.spec.summary import LIMBS
from probes_jax.stats.exact import count_true
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
        `extreme` rows; where there are classes in two parts, `logits` and `largest`, and with `mean` rows of logsumexp
        over the valid positions.
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
    return {**_extremes(logits, lse, split), "logsumexp": Summary.of(sums, "mean", total.axes)}


def _extremes(logits: jax.Array, lse: jax.Array, split: Split) -> dict[str, Summary]:
    """Two parts of one `extreme`: what is not finite, by position, and the largest |logit| of what is."""
    nan, high = jnp.isnan(lse), jnp.isposinf(lse)
    # Over devices a maximum may lose a NaN and costs an all-reduce of its own; a sum shares that of logsumexp.
    low = jnp.isnan(jnp.sum(logits.astype(jnp.float32) * 0.0, axis=-1)) & ~nan & ~high
    positions = Split(split.dims[: lse.ndim], split.sizes)
    counts = {name: cut(where, positions) for name, where in (("nan", nan), ("inf", high | low))}
    rows = counts["nan"].axes
    part = cut(logits, split)
    top, bottom = (reduce(part.array, axis=-1).astype(jnp.float32) for reduce in (jnp.max, jnp.min))
    classes = range(len(rows), len(part.axes))  # the axes that cut the classes
    bad, masked = (jnp.expand_dims(cut(x, positions).array, classes) for x in (nan | high, low))
    # The largest of a position with masked classes is its largest logit.
    largest = jnp.where(masked, jnp.abs(top), jnp.maximum(jnp.abs(top), jnp.abs(bottom)))
    finite = jnp.where(bad | ~jnp.isfinite(largest), -jnp.inf, largest)
    found = {name: count_true(where.array, where.inner) for name, where in counts.items()}
    highest = jnp.max(finite, axis=tuple(range(len(part.axes), finite.ndim)), initial=-jnp.inf)
    none = jnp.zeros((*highest.shape, LIMBS), jnp.float32)
    return {
        "logits": Summary.of({**found, "abs_max": jnp.full(found["nan"].shape[:-1], -jnp.inf)}, "extreme", rows),
        "largest": Summary.of({"nan": none, "inf": none, "abs_max": highest}, "extreme", part.axes),
    }


def has_classes(shape: tuple[int, ...]) -> bool:
    """Whether the last axis of an output can be one of classes; that of a regression is not."""
    return len(shape) > 1 and shape[-1] > 1


def name_logits(rows: dict[str, Summary]) -> list[Measured]:
    """Report entries of the rows of `measure_logits`."""
    names = {"logits/{stat}": ("logits", "largest"), "logits/logsumexp": ("logsumexp",)}
    found = {label: [rows[name] for name in parts if name in rows] for label, parts in names.items()}
    return [measured(label, *parts) for label, parts in found.items() if parts]
