"""Attention: the largest logit, and how many keys a query looks at."""

from probes_jax.spec.metric import Cadence, MetricSpec, Priority
from probes_jax.spec.sketch import QUANTILES

_PUBLIC = "public notes of large runs: growing attention logits and collapsed entropy come before divergence"
_TIMING = "forward pass, before the softmax, over the keys that a query sees"
_TOKENS = "over the valid queries and the heads of all microbatches and shards"
_SHARES = {"mean": "mean", "max": "maximum", **{name: f"quantile {share:g}" for name, share in QUANTILES.items()}}

METRICS = (
    MetricSpec("attention/logit", "max q.k/sqrt(d)", "1", Priority.P1, Cadence.EVERY_100,
               "the largest attention logit of all layers, and which layer it is", "maximum over layers", _TIMING,
               "logits that grow until the softmax is one-hot", _PUBLIC),
    MetricSpec("attention/{path}/logit/max", "max q.k/sqrt(d)", "1", Priority.P1, Cadence.EVERY_100,
               "max q.k/sqrt(d), with the bias, over batch, heads and positions", f"maximum {_TOKENS}", _TIMING,
               "logits that grow until the softmax is one-hot", _PUBLIC),
    *(
        MetricSpec(f"attention/{{path}}/entropy/{stat}", "H(attention row)", "nat", Priority.P1, Cadence.EVERY_100,
                   f"{what} of the entropy of the row of weights of a query and head",
                   f"{_TOKENS}; quantiles from counts in buckets, to 1 %", _TIMING,
                   "heads that look at one key only, or at all alike", _PUBLIC)
        for stat, what in _SHARES.items()
    ),
)  # fmt: skip
