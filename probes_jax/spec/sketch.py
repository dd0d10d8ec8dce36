"""A quantile sketch that merges by addition: counts of values in log-spaced buckets.

A bucket holds the values in `(LOW * GROWTH^(i-1), LOW * GROWTH^i]` and answers with the one number that is within the
same relative error of both its ends (Masson, Rim and Lee 2019, "DDSketch", section 2). Nothing is lost by merging: the
counts of all shards, layers and microbatches are the counts of the whole.

Values in [1e-6, 1e6] are told to 1 %. Below, and for zero, the answer is 0; above, it is the largest value measured,
which is kept beside the sketch.
"""

from __future__ import annotations

import math

import numpy as np

LOW, HIGH = 1e-6, 1e6
ERROR = 0.01
_BOUND = 0.0099  # what the buckets are made for; the rest is for a logarithm in float32
GROWTH = (1 + _BOUND) / (1 - _BOUND)
_BETWEEN = math.ceil(math.log(HIGH / LOW) / math.log(GROWTH))
SIZE = _BETWEEN + 2  # with one for what is below, and one for what is above
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def representatives() -> np.ndarray:
    """What stands for each bucket, float64 `[SIZE]`: 0 for the first one, inf for the last."""
    between = LOW * GROWTH ** np.arange(1, _BETWEEN + 1) * 2 / (1 + GROWTH)
    return np.concatenate([[0.0], between, [np.inf]])


def quantiles(counts: np.ndarray) -> dict[str, np.ndarray]:
    """The quantiles of `QUANTILES` by nearest rank: the least value that the stated share of values does not exceed.

    Args:
        counts: `[..., SIZE]`.

    Returns:
        float64 `[...]` for each; NaN where nothing was counted. `inf` stands for more than `HIGH`.
    """
    reached = np.cumsum(np.asarray(counts, np.float64), axis=-1)
    total = reached[..., -1]
    table = representatives()
    found = {}
    for name, share in QUANTILES.items():
        bucket = (reached < np.ceil(share * total)[..., None]).sum(axis=-1)
        found[name] = np.where(total > 0, table[np.minimum(bucket, SIZE - 1)], np.nan)
    return found
