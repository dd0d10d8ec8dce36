"""Balance of experts."""

from probes_jax.spec.metric import Cadence, MetricSpec, Priority
from probes_jax.spec.sketch import QUANTILES

_SOURCE = "Deng 2026, Reading a Pretraining Run, section 7"
_PUBLIC = "public trouble reports of mixture-of-experts runs"
_SUMMED = "valid tokens of each expert, summed over microbatches and shards before any ratio; absent without one"
_TIMING = "forward pass of the step, of the experts that the router chose"
_P0 = Priority.P0

# name, symbol, unit, priority, cadence, definition, what it catches
_LAYER = (
    ("imbalance", "I", "1", _P0, Cadence.EVERY_STEP, "max c_i / mean c", "one expert that takes too much"),
    ("max_violation", "MaxVio", "1", _P0, Cadence.EVERY_STEP, "I - 1", "one expert that takes too much"),
    ("shard_imbalance", "I_shard", "1", _P0, Cadence.EVERY_STEP,
     "the largest over the mean of the loads summed by expert-parallel shard", "devices that wait for one another"),
    ("entropy", "H", "nat", Priority.P1, Cadence.EVERY_100, "-sum p ln p, p_i = c_i / sum c", "a collapse of routing"),
    ("entropy_norm", "H_norm", "1", Priority.P1, Cadence.EVERY_100, "H / ln E", "a collapse of routing"),
    ("dead_experts", "#{c_i == 0}", "count", Priority.P1, Cadence.EVERY_100, "experts without a valid token",
     "capacity that nothing uses"),
    ("effective_experts", "exp(H)", "1", Priority.P1, Cadence.EVERY_100, "exp(H)", "capacity that nothing uses"),
)  # fmt: skip
_WORST = {"imbalance", "max_violation", "shard_imbalance"}
_MARGIN = {"mean": "mean", "max": "maximum", **{name: f"quantile {share:g}" for name, share in QUANTILES.items()}}

METRICS = (
    *(
        MetricSpec(f"router/{name}", symbol, unit, priority, cadence,
                   f"the largest over all layers of {definition}, and which layer it is",
                   "maximum over layers", _TIMING, catches, _SOURCE)
        for name, symbol, unit, priority, cadence, definition, catches in _LAYER if name in _WORST
    ),
    *(
        MetricSpec(f"router/{{path}}/{name}", symbol, unit, Priority.P1, cadence, definition, _SUMMED, _TIMING,
                   catches, _SOURCE if name not in ("dead_experts", "effective_experts") else _PUBLIC)
        for name, symbol, unit, priority, cadence, definition, catches in _LAYER
    ),
    MetricSpec("router/{path}/load/{expert}", "p_i", "1", Priority.P2, Cadence.EVERY_100, "c_i / sum c", _SUMMED,
               _TIMING, "which expert is overloaded, or dead", _SOURCE),
    MetricSpec("router/{path}/bias/{expert}", "b_i", "1", Priority.P2, Cadence.EVERY_100,
               "what is added to the score of expert i: a parameter or carried array of the router, or one handed over",
               "of each expert; mean over microbatches where the model hands it over",
               "as the forward pass of the step used it, before any update",
               "a balance that only the bias holds up, or one that runs away", _SOURCE),
    *(
        MetricSpec(f"router/{{path}}/margin/{stat}", "top-k margin", "1", Priority.P2, Cadence.EVERY_100,
                   f"{what} over valid tokens of the k-th largest score less the (k+1)-th",
                   "over the valid tokens of all microbatches and shards; quantiles from counts in buckets, to 1 %",
                   "forward pass, of the scores as the router returned them", "routing that flips on noise", _SOURCE)
        for stat, what in _MARGIN.items()
    ),
)  # fmt: skip
