"""Statistics of observed activations and of their backward gradients."""

from probes_jax.spec.metric import Cadence, MetricSpec, Priority

_SOURCE = "Deng 2026, Reading a Pretraining Run, section 6"
_SUMS = "sums and counts over elements, microbatches and shards, then divided"
_MAX = "maximum over elements, microbatches and shards"

# statistic, symbol, unit, definition, reduction, what it catches
_STATS = (
    (
        "abs_max",
        "max|x|",
        "1",
        "max |x|: NaN if any element is NaN, else inf if any is, else the maximum",
        _MAX,
        "outlier, overflow, local explosion",
    ),
    (
        "finite_abs_max",
        "max|x| finite",
        "1",
        "max |x| over the finite elements",
        _MAX,
        "the scale beside a non-finite maximum",
    ),
    ("nan_count", "#NaN", "count", "number of NaN elements", "exact sum", "which tensor a NaN lives in"),
    ("inf_count", "#inf", "count", "number of infinite elements", "exact sum", "overflow"),
    ("mean_square", "M_2", "1", "sum(x^2) / N", _SUMS, "energy scale, in the form that merges"),
    ("rms", "RMS", "1", "sqrt(M_2)", _SUMS, "scale drift"),
    ("abs_mean", "mean|x|", "1", "sum(|x|) / N", _SUMS, "typical scale; its gap from RMS shows a few large elements"),
    ("zero_fraction", "Z_x", "1", "#{x == 0} / N", _SUMS, "sparsity, underflow, inactive paths"),
    ("mean", "mean", "1", "sum(x) / N", _SUMS, "a drifting offset"),
    (
        "std",
        "std",
        "1",
        "sqrt(sum((x - mean)^2) / N), taken about a pivot so that it is right when |mean| >> std",
        _SUMS,
        "a distribution that widens or collapses",
    ),
    ("min", "min", "1", "min x", _MAX, "one-sided outliers"),
    ("max", "max", "1", "max x", _MAX, "one-sided outliers"),
)


def _family(prefix: str, what: str, timing: str, worst: str) -> tuple[MetricSpec, ...]:
    first = MetricSpec(
        name=f"{prefix}/abs_max",
        symbol="max|x|",
        unit="1",
        priority=Priority.P0,
        cadence=Cadence.EVERY_100,
        definition=f"the worst absolute maximum over all {what}, and which one it is",
        reduction="maximum over points and layers",
        timing=timing,
        catches=worst,
        source=_SOURCE,
    )
    statistics = (
        MetricSpec(
            name=f"{prefix}/{{path}}/{stat}",
            symbol=symbol,
            unit=unit,
            priority=Priority.P1,
            cadence=Cadence.EVERY_100,
            definition=definition,
            reduction=reduction,
            timing=timing,
            catches=catches,
            source=_SOURCE,
        )
        for stat, symbol, unit, definition, reduction, catches in _STATS
    )
    return (first, *statistics)


METRICS = (
    *_family(
        "act",
        "observed activations",
        "forward pass of the step, as the module returned it",
        "overflow, non-finite values, silent corruption anywhere in the forward pass",
    ),
    *_family(
        "grad_act",
        "backward gradients of observed activations",
        "backward pass of the step: of the mean loss, without loss scale; absent where the loss does not depend on it",
        "an explosion on its way back, seen at the layer where it begins",
    ),
    MetricSpec(
        name="grad_act/{path}/gain",
        symbol="backward gain",
        unit="1",
        priority=Priority.P1,
        cadence=Cadence.EVERY_100,
        definition="||gradient at a block's input|| / ||gradient at its output||, of blocks numbered in a row; none "
        "for the first",
        reduction=_SUMS,
        timing="backward pass of the step: of the mean loss, without loss scale",
        catches="a block that makes gradients explode or vanish on their way back",
        source="public notes of large runs",
    ),
)
