"""Output logits against float64 NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from probes_jax.signals.logits import measure_logits
from probes_jax.stats.partial import WHOLE, Split
from tests.stats.reference import finalized


@pytest.mark.parametrize("split", [WHOLE, Split.of((("data",), (), ("model",)), {"data": 4, "model": 2})])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values(split, dtype):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(8, 3, 6)) * 20, dtype)
    weight = rng.choice([0.0, 0.5, 1.0], (8, 3)).astype(np.float32)
    rows = measure_logits(logits, jnp.asarray(weight), split)
    exact = np.asarray(logits.astype(jnp.float32), np.float64)
    assert finalized(rows["largest"])[0]["abs_max"] == pytest.approx(np.abs(exact).max())
    lse = np.log(np.exp(exact).sum(-1))[weight > 0]
    assert finalized(rows["logsumexp"])[0][""] == pytest.approx(lse.mean(), rel=1e-5)


def test_without_weights_every_position_counts():
    rows = measure_logits(jnp.zeros((2, 4)), None, WHOLE)
    assert finalized(rows["logsumexp"])[0][""] == pytest.approx(np.log(4.0))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_element_shows(bad):
    logits = np.ones((2, 3, 4), np.float32)
    logits[1, 2, 3] = bad
    logits[1, 2, 0] = 5.0
    rows = measure_logits(jnp.asarray(logits), None, WHOLE)
    (found,) = finalized(rows["logits"].merge(rows["largest"]))
    assert (found["nan_count"], found["inf_count"]) == ((1, 0) if np.isnan(bad) else (0, 1))
    assert found["finite_abs_max"] == (5.0 if bad == -np.inf else 1.0)  # classes at -inf are masked
    assert not np.isfinite(found["abs_max"])


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_positions_count_once_however_the_classes_are_cut(shards):
    logits = np.random.default_rng(0).normal(size=(2, 3, 6)).astype(np.float32)
    logits[0, 0, ::2] = np.nan
    logits[0, 1, 1], logits[0, 1, 4] = np.nan, np.inf
    logits[0, 2, :] = np.inf
    logits[1, 0, 3:] = -np.inf
    logits[1, 1, :] = -np.inf
    rows = measure_logits(jnp.asarray(logits), None, Split.of(((), (), ("model",)), {"model": shards}))
    counts = finalized(rows["logits"])[0]
    assert (counts["nan_count"], counts["inf_count"]) == (2, 3)
    expected = max(np.abs(logits[1, 2]).max(), abs(logits[1, 0, :3].max()))
    highest = [found["finite_abs_max"] for found in finalized(rows["largest"])]
    assert max(value for value in highest if value is not None) == pytest.approx(expected)
