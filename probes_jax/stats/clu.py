"""Summaries as `clu.metrics.Metric` classes, for loops that keep their metrics in a `clu.metrics.Collection`.

    @flax.struct.dataclass
    class EvalMetrics(clu.metrics.Collection):
        hidden: as_clu_metric("moments").from_output("hidden")
        loss: as_clu_metric("mean").from_output("loss")

    metrics = metrics.merge(EvalMetrics.single_from_model_output(hidden=..., loss=..., mask=...))
    writer.write_scalars(step, collection_scalars(metrics))

The only file that imports CLU's metrics, which do not need TensorFlow. Parts of any size merge exactly as everywhere
in this library; a collection that runs for more than a few thousand batches should be reset now and then, since its
sums are float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import clu.metrics
import flax.struct
import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from probes_jax.spec.summary import KINDS, Reduce
from probes_jax.stats.moments import summarize_extreme, summarize_magnitude, summarize_moments, summarize_norm
from probes_jax.stats.summary import Summary


def _summarize_mean(values: jax.Array, mask: jax.Array | None) -> Summary:
    values = jnp.asarray(values)
    weight = jnp.ones(values.shape, jnp.float32) if mask is None else jnp.asarray(mask).astype(jnp.float32)
    if weight.shape != values.shape[: weight.ndim]:
        raise ValueError(f"mask has shape {weight.shape}, which is no leading part of the values' {values.shape}")
    weight = jnp.broadcast_to(weight.reshape(weight.shape + (1,) * (values.ndim - weight.ndim)), values.shape)
    # A masked value has no say, whatever it is: where, not a product, because of NaN.
    total = jnp.sum(jnp.where(weight == 0, 0.0, weight * values.astype(jnp.float32)))
    return Summary.of({"total": total, "weight": jnp.sum(weight)}, "mean")


def _of_tensor(summarize: Callable[[jax.Array], Summary]) -> Callable[[jax.Array, jax.Array | None], Summary]:
    return lambda values, mask: summarize(jnp.asarray(values))


_SUMMARIZE: dict[str, Callable[[jax.Array, jax.Array | None], Summary]] = {
    "moments": _of_tensor(summarize_moments),
    "magnitude": _of_tensor(summarize_magnitude),
    "norm": _of_tensor(summarize_norm),
    "extreme": _of_tensor(summarize_extreme),
    "mean": _summarize_mean,
}


def _nothing(kind: str) -> Summary:
    def leaf(width: int, reduce: Reduce) -> jax.Array:
        return jnp.full((width,) if width else (), 0.0 if reduce is Reduce.SUM else -math.inf, jnp.float32)

    return Summary.of({item.name: leaf(item.width, item.reduce) for item in KINDS[kind].leaves}, kind)


@functools.cache
def as_clu_metric(kind: str) -> type[clu.metrics.Metric]:
    """A `clu.metrics.Metric` class over one kind of summary. The same class each time.

    Its `from_model_output(values, mask=None, **_)` makes the summary, `merge` and `reduce` merge it, and `compute()`
    returns the finalized statistics by name as Python floats; a statistic without a measurement is left out. `mask`
    (weights of the leading dimensions) is what a `mean` is weighted by; the statistics of tensors are over all
    elements and take no notice of it.

    Args:
        kind: `moments`, `magnitude`, `norm`, `extreme` (statistics of a tensor) or `mean` (a weighted mean).

    Raises:
        ValueError: No such kind.

    Example:
        >>> import jax.numpy as jnp
        >>> Mean = as_clu_metric("mean")
        >>> parts = [jnp.ones(8), jnp.zeros(2)]  # eight right, then a short batch with none
        >>> first, second = (Mean.from_model_output(values=part) for part in parts)
        >>> print(round(first.merge(second).compute()["mean"], 6))
        0.8
    """
    if kind not in _SUMMARIZE:
        raise ValueError(f"as_clu_metric kind {kind!r} is unknown; known kinds: {', '.join(_SUMMARIZE)}")

    @flax.struct.dataclass
    class SummaryMetric(clu.metrics.Metric):
        summary: Summary

        @classmethod
        def from_model_output(cls, values: jax.Array, mask: jax.Array | None = None, **_: Any) -> SummaryMetric:
            return cls(summary=_SUMMARIZE[kind](values, mask))

        @classmethod
        def empty(cls) -> SummaryMetric:
            return cls(summary=_nothing(kind))

        def merge(self, other: SummaryMetric) -> SummaryMetric:
            return type(self)(summary=self.summary.merge(other.summary).carried())

        def reduce(self) -> SummaryMetric:
            return type(self)(summary=self.summary.collapse(0).carried())

        def compute(self) -> dict[str, float]:
            return _finalize(self.summary)

    SummaryMetric.__name__ = SummaryMetric.__qualname__ = f"{kind.capitalize()}Summary"
    return SummaryMetric


def _finalize(summary: Summary) -> dict[str, float]:
    if isinstance(summary.sums, jax.core.Tracer):
        raise RuntimeError("compute() of a summary runs on the host, in float64; call it outside of jit")
    rows = {name: np.asarray(leaf)[None] for name, leaf in summary.leaves.items()}
    columns = KINDS[summary.kind].finalize(rows)
    return {stat or summary.kind: float(value[0]) for stat, (value, present) in columns.items() if present[0]}


def collection_scalars(collection: clu.metrics.Collection) -> dict[str, float]:
    """What `collection.compute()` found, flat: `{"hidden/rms": ...}`, for `MetricWriter.write_scalars`."""
    out: dict[str, float] = {}
    for name, value in collection.compute().items():
        if isinstance(value, dict):
            out.update({f"{name}/{stat}": number for stat, number in value.items()})
        else:
            out[name] = float(value)
    return out
