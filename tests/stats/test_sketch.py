"""The sketch tells every quantile to one percent, however the values are split."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from probes_jax.spec import sketch
from probes_jax.spec.summary import KINDS
from probes_jax.stats.partial import Split
from probes_jax.stats.sketch import _added, _multiplied, bucket_of, sketched, summarize_spread
from tests.stats.reference import finalized


def samples(kind, n=4000):
    rng = np.random.default_rng(0)
    return {
        "lognormal": lambda: np.exp(rng.normal(0.0, 3.0, n)),
        "uniform": lambda: rng.random(n),
        "narrow": lambda: 1.0 + 1e-3 * rng.random(n),
        "tiny": lambda: 2e-6 * (1.0 + rng.random(n)),
        "large": lambda: 4e5 * (1.0 + rng.random(n)),
        "two values": lambda: np.where(rng.random(n) < 0.9, 0.01, 100.0),
    }[kind]().astype(np.float32)


def ranked(values, share):
    """Nearest rank, the slow way."""
    return np.sort(values.astype(np.float64))[max(int(np.ceil(share * values.size)) - 1, 0)]


@pytest.mark.parametrize("kind", ["lognormal", "uniform", "narrow", "tiny", "large", "two values"])
def test_every_quantile_is_told_to_one_percent(kind):
    values = samples(kind)
    rows = summarize_spread(jnp.asarray(values), jnp.ones(values.shape, bool))
    (host,) = finalized(rows["sketch"])
    device = sketched(rows["sketch"].sums[None], jnp.asarray([values.max()]))
    for name, share in sketch.QUANTILES.items():
        want = ranked(values, share)
        assert host[name] == pytest.approx(want, rel=sketch.ERROR), name
        assert float(device[name][0]) == pytest.approx(want, rel=sketch.ERROR), name
    (spread,) = finalized(rows["spread"])
    assert spread == {"mean": pytest.approx(values.astype(np.float64).mean(), rel=1e-5), "max": values.max()}


def test_each_value_of_the_range_is_told_to_one_percent():
    """Every bucket, and both sides of every edge."""
    edges = sketch.LOW * sketch.GROWTH ** np.arange(sketch.SIZE - 1)
    values = np.concatenate([edges * (1 + step) for step in (-2e-6, 0.0, 2e-6)]).astype(np.float32)
    values = values[(values >= sketch.LOW) & (values <= sketch.HIGH)]
    told = sketch.representatives()[np.asarray(bucket_of(jnp.asarray(values)))]
    assert np.abs(told / values - 1).max() <= sketch.ERROR


def test_outside_of_the_range():
    values = jnp.asarray([0.0, 1e-9, 1e7, 3e7])
    rows = summarize_spread(values, jnp.ones(4, bool))
    found = sketched(rows["sketch"].sums[None], jnp.asarray([3e7]))
    assert [float(found[name][0]) for name in ("p50", "p90")] == [0.0, pytest.approx(3e7)]


def test_what_is_not_valid_does_not_count_and_nothing_is_absent():
    values, valid = jnp.asarray([1.0, 50.0, 2.0]), jnp.asarray([True, False, True])
    rows = summarize_spread(values, valid)
    assert finalized(rows["spread"]) == [{"mean": 1.5, "max": 2.0}]
    assert finalized(rows["sketch"])[0]["p99"] == pytest.approx(2.0, rel=0.01)
    none = summarize_spread(values, jnp.zeros(3, bool))
    assert set(finalized(none["spread"])[0].values()) == set(finalized(none["sketch"])[0].values()) == {None}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows_in_mean_and_maximum(bad):
    rows = summarize_spread(jnp.asarray([1.0, bad]), jnp.ones(2, bool))
    (spread,) = finalized(rows["spread"])
    assert not np.isfinite(spread["mean"])
    assert not np.isfinite(spread["max"])
    assert finalized(rows["sketch"])[0]["p99"] == pytest.approx(1.0, rel=0.01)


def test_any_split_gives_the_counts_of_the_whole():
    values, valid = jnp.asarray(samples("lognormal").reshape(8, 500)), jnp.ones((8, 500), bool)
    whole = summarize_spread(values, valid)
    cut = summarize_spread(values, valid, Split((("data",),), (("data", 8),)))
    np.testing.assert_array_equal(cut["sketch"].sums.sum(axis=0), whole["sketch"].sums)
    parts = [summarize_spread(values[at], valid[at]) for at in (slice(0, 3), slice(3, 8))]
    merged = parts[1]["sketch"].merge(parts[0]["sketch"])
    np.testing.assert_array_equal(merged.sums, whole["sketch"].sums)


def test_both_ways_of_counting_are_one():
    """A product of two matrices on a TPU, one addition a value elsewhere."""
    rng = np.random.default_rng(1)
    bucket = jnp.asarray(rng.integers(0, sketch.SIZE, (3, 700)), jnp.int32)
    counted = jnp.asarray(rng.random((3, 700)) < 0.8)
    want = np.stack([np.bincount(b[c], minlength=sketch.SIZE) for b, c in zip(np.asarray(bucket), np.asarray(counted))])
    np.testing.assert_array_equal(_added(sketch.SIZE, bucket, counted), want)
    np.testing.assert_array_equal(jax.jit(_multiplied, static_argnums=0)(sketch.SIZE, bucket, counted), want)


def test_the_kinds_say_their_statistics():
    assert KINDS["sketch"].stats == tuple(sketch.QUANTILES)
    assert KINDS["spread"].stats == ("mean", "max")
