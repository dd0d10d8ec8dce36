"""What narrower formats would lose, and how heavy the tails are: of activations, of their gradients, of gradients."""

from probes_jax.spec.metric import Cadence, MetricSpec, Priority

_FAMILIES = (
    ("act", "forward pass of the step, as the module returned it"),
    (
        "grad_act",
        "backward pass of the step, as it computes it: with the loss scale, and in microbatches with the loss divided "
        "by all tokens, valid or not",
    ),
    ("grad", "unscaled, accumulated over microbatches, before clipping"),
)
_SUMS = "exact counts over elements, microbatches and shards, then divided"
# format, its name in full, where it begins to lose
_FORMATS = (
    ("bf16", "bfloat16", "0 < |x| <= 2^-134", "|x| >= 2^128 - 2^119"),
    ("e4m3", "float8 e4m3fn, unscaled", "0 < |x| <= 2^-10", "|x| > 464"),
    ("e5m2", "float8 e5m2, unscaled", "0 < |x| <= 2^-17", "|x| >= 61440"),
)
# statistic, symbol, definition, reduction, what it catches
_STATS = (
    (
        "kurtosis",
        "kurt",
        "sum((x - mean)^4) / N / (sum((x - mean)^2) / N)^2 - 3; absent where all elements are equal, NaN where one is "
        "not finite",
        "central moments of parts, each about its own mean, merged pair by pair",
        "outliers that a narrow format or a per-tensor scale cannot hold",
    ),
    *(
        (
            f"underflow/{name}",
            f"U {name}",
            f"share of the elements that {full} rounds to zero: {low}; its subnormal numbers are not lost",
            _SUMS,
            "small values that vanish in a narrower format",
        )
        for name, full, low, _ in _FORMATS
    ),
    *(
        (
            f"overflow/{name}",
            f"O {name}",
            f"share of the elements that are finite and that {full} rounds to what is not: {high}",
            _SUMS,
            "large values that a narrower format cannot hold",
        )
        for name, full, _, high in _FORMATS
    ),
)

METRICS = tuple(
    MetricSpec(
        name=f"{prefix}/{{path}}/{stat}",
        symbol=symbol,
        unit="1",
        priority=Priority.P2,
        cadence=Cadence.EVERY_100,
        definition=definition,
        reduction=reduction,
        timing=f"{timing}; with Plan(precision=True) only",
        catches=catches,
        source="defined here",
    )
    for prefix, timing in _FAMILIES
    for stat, symbol, definition, reduction, catches in _STATS
)
