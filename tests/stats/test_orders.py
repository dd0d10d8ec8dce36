"""Orders of magnitude from counts by exponent, against quantiles of the sorted values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from probes_jax.spec.orders import ERROR, QUANTILES, SIZE
from probes_jax.spec.summary import decode_count
from probes_jax.stats import orders
from probes_jax.stats.orders import read_orders, sample_steps, summarize_orders
from probes_jax.stats.partial import Split
from tests.stats.reference import finalized


def read(rows):
    """Statistics of rows that are merged over their axes."""
    stack = len(rows["orders"].stack_shape())
    over = tuple(range(stack, stack + len(rows["orders"].axes)))
    buckets = np.asarray(rows["histogram"].leaves["buckets"]).sum(axis=over).reshape(-1, SIZE)
    highest = np.asarray(rows["orders"].leaves["abs_max"]).max(axis=over).reshape(-1)
    found = {name: np.asarray(x) for name, x in jax.jit(read_orders)(buckets, highest).items()}
    return [
        {**kept, **{name: float(x[at]) for name, x in found.items()}}
        for at, kept in enumerate(finalized(rows["orders"]))
    ]


def check(found, x):
    values = np.sort(np.abs(np.asarray(x, np.float64).ravel()))
    values = values[values > 0]
    want = {name: values[max(int(np.ceil(share * values.size)) - 1, 0)] for name, share in QUANTILES.items()}
    for name, value in want.items():
        assert found[name] == pytest.approx(value, rel=ERROR * 1.001), name
    assert found["spread"] == pytest.approx(np.log10(values[-1] / want["p50"]), abs=0.027)
    assert found["max"] == pytest.approx(values[-1], rel=1e-6)
    assert found["zero_fraction"] == pytest.approx(1 - values.size / np.size(x))


def squares(shape, seed=0, decades=3.0):
    rng = np.random.default_rng(seed)
    return np.where(rng.random(shape) < 0.1, 0.0, 10.0 ** rng.normal(-12, decades, shape))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("shape", [(), (7,), (30, 40), (3, 4, 50)])
def test_quantiles_and_spread(shape, dtype):
    x = (squares(shape) * (1e12 if dtype == np.float16 else 1)).clip(0, 6e4).astype(dtype)
    check(read(summarize_orders(x))[0], x)


def test_the_ends_of_float32():
    x = np.array([1.2e-38, 3e-20, 1.0, 3e20, 3e38], np.float32)
    check(read(summarize_orders(x))[0], x)
    alike = np.full((5,), 1.0, np.float32)
    (found,) = read(summarize_orders(alike))
    assert found["spread"] == 0.0
    assert found["p10"] == found["p99"] == 1.0  # never above the maximum


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows_in_the_maximum(bad):
    x = np.array([1.0, 1.0, bad], np.float32)
    (found,) = read(summarize_orders(x))
    np.testing.assert_equal(found["max"], bad)
    assert found["p99"] == pytest.approx(1.0, rel=ERROR)


def test_nothing_but_zeros_has_no_quantile():
    rows = summarize_orders(np.zeros((4, 4), np.float32))
    assert float(rows["histogram"].leaves["buckets"].sum()) == 0
    assert read(rows)[0]["zero_fraction"] == 1.0


def test_any_split_gives_the_counts_of_the_whole():
    x = squares((8, 64)).astype(np.float32)
    whole = summarize_orders(x)
    cut = summarize_orders(x, Split((("data",), ("model",)), (("data", 4), ("model", 2))))
    np.testing.assert_array_equal(cut["histogram"].sums.sum(axis=(0, 1)), whole["histogram"].sums)
    assert read(cut) == read(whole)
    layers = jax.vmap(summarize_orders)(jnp.asarray(x))
    for found, layer in zip(read(layers), x, strict=True):
        check(found, layer)


def test_a_large_tensor_is_sampled_but_for_its_extremes(monkeypatch):
    monkeypatch.setattr(orders, "SAMPLE", 512)
    x = squares((96, 128), decades=0.5).astype(np.float32)
    x[1, 1] = 1.0
    rows = summarize_orders(jnp.asarray(x))  # of a shape that no other test has
    taken = float(rows["histogram"].sums.sum())
    assert 100 < taken <= 512
    (found,) = read(rows)
    assert found["max"] == 1.0
    assert found["zero_fraction"] == (x == 0).mean()
    assert np.log10(found["p50"]) == pytest.approx(np.log10(np.median(x[x > 0])), abs=0.1)


@pytest.mark.parametrize("shape", [(), (5,), (512, 4), (10**9,), (50_257, 4096), (2, 3, 2**20), (64, 64, 64)])
def test_the_sample_is_of_the_stated_size(shape):
    steps = sample_steps(shape)
    assert all(step % 2 for step in steps)
    kept = np.prod([-(-n // step) for n, step in zip(shape, steps)])
    assert kept <= orders.SAMPLE
    assert kept >= min(np.prod(shape), orders.SAMPLE / 4)


def test_counts_are_exact():
    rows = summarize_orders(jnp.asarray([0.0, 0.0, 2.0, np.nan], jnp.float32))
    counts = {
        name: int(decode_count(np.asarray(rows["orders"].leaves[name]))) for name in ("count", "zeros", "nan", "inf")
    }
    assert counts == {"count": 4, "zeros": 2, "nan": 1, "inf": 0}
