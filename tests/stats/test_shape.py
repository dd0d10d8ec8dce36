"""Excess kurtosis against float64, of parts merged in any way, and where it is none."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probes_jax.stats.partial import Split
from probes_jax.stats.precision import summarize_magnitude_precisely, summarize_moments_precisely
from probes_jax.stats.shape import WIDTH, collapse_parts, kurtosis, merge_parts, scale_parts
from probes_jax.stats.summary import Summary, merge_all
from tests.stats.reference import check, finalized

FORMS = [summarize_moments_precisely, summarize_magnitude_precisely]


def by_definition(x) -> float | None:
    x = np.asarray(x).astype(np.float32).astype(np.float64).ravel()
    if x.size == 0 or not np.isfinite(x).all():
        return None if x.size == 0 else np.nan
    d = x - x.mean()
    return None if (x == x[0]).all() else np.mean(d**4) / np.mean(d**2) ** 2 - 3


def found_in(summary: Summary) -> float | None:
    parts = summary.parts
    for _ in summary.axes:
        parts = collapse_parts(parts, 0)
    value, some = kurtosis(parts)
    return float(value) if some else None


def assert_right(found, x, rel=1e-4):
    want = by_definition(x)
    if want is None or np.isnan(want):
        assert found is want or np.isnan(found)
    else:
        assert found == pytest.approx(want, rel=rel, abs=rel)


def tensors():
    rng = np.random.default_rng(0)
    return {
        "normal": rng.normal(size=(64, 48)),
        "heavy tails": rng.standard_t(3, size=(64, 48)),
        "uniform": rng.uniform(size=(64, 48)),
        "one outlier": np.where(np.arange(3072).reshape(64, 48) == 1000, 1e4, rng.normal(size=(64, 48))),
        "outliers first": np.where(np.arange(3072).reshape(64, 48) < 200, 1e3, rng.normal(size=(64, 48))),
        "two values": np.where(rng.random((64, 48)) < 0.5, -1.0, 1.0),
        "one of many": np.where(np.arange(3072).reshape(64, 48) == 5, 1.0, 0.0),
        "tiny": 1e-12 * rng.normal(size=(64, 48)),
        "tinier": 1e-30 * rng.normal(size=(64, 48)),
        "huge": 1e30 * rng.normal(size=(64, 48)),
        "all equal": np.full((64, 48), 0.1),
        "zero": np.zeros((64, 48)),
        "nan": np.where(np.arange(3072).reshape(64, 48) == 9, np.nan, rng.normal(size=(64, 48))),
        "inf": np.where(np.arange(3072).reshape(64, 48) == 9, np.inf, rng.normal(size=(64, 48))),
        "inf first": np.where(np.arange(3072).reshape(64, 48) == 0, -np.inf, rng.normal(size=(64, 48))),
        "one element": np.ones((1, 1)),
        "two elements": np.array([[1.0, 2.0]]),
        "none": np.ones((0, 4)),
    }


@pytest.mark.parametrize("summarize", FORMS)
@pytest.mark.parametrize("case", tensors())
def test_the_definition(case, summarize):
    x = tensors()[case].astype(np.float32)
    assert_right(found_in(summarize(x)), x)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_narrow_tensors(dtype):
    x = np.random.default_rng(1).standard_t(5, size=(512, 300)).astype(dtype)
    assert_right(found_in(summarize_moments_precisely(x)), x)


@pytest.mark.parametrize("shape", [(512,), (64, 96), (300, 500)])
@pytest.mark.parametrize("summarize", FORMS)
def test_a_mean_ten_thousand_times_the_deviation(summarize, shape):
    x = (1e4 + np.random.default_rng(2).standard_t(4, size=shape)).astype(np.float32)
    assert_right(found_in(summarize(x)), x, rel=2e-3)


@pytest.mark.parametrize("lengths", [(64, 64, 64), (191, 1), (1, 2, 64, 125), (100, 92)])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_ragged_parts_whose_means_differ(lengths, offset):
    x = (offset + np.random.default_rng(0).normal(size=sum(lengths))).astype(np.float32)
    x[: lengths[0]] += 3.0
    edges = np.cumsum([0, *lengths])
    parts = [summarize_moments_precisely(x[a:b]) for a, b in itertools.pairwise(edges)]
    assert_right(found_in(merge_all(parts)), x, rel=2e-3 if offset else 1e-4)
    assert_right(found_in(merge_all(parts[::-1])), x, rel=2e-3 if offset else 1e-4)


@given(st.integers(0, 2**16), st.lists(st.sampled_from([1, 2, 5, 16]), min_size=1, max_size=8))
@settings(max_examples=25, deadline=None)
def test_any_split_in_any_order_gives_the_value_of_the_whole(seed, lengths):
    rng = np.random.default_rng(seed)
    x = (10.0 ** rng.integers(-12, 8) * (rng.normal(size=sum(lengths)) + rng.integers(0, 3))).astype(np.float32)
    edges = np.cumsum([0, *lengths])
    parts = [summarize_moments_precisely(x[a:b]).parts for a, b in itertools.pairwise(edges)]
    order = rng.permutation(len(parts))
    merged = functools.reduce(merge_parts, [parts[i] for i in order])
    for found in (merged, collapse_parts(jnp.stack(parts), 0)):
        value, some = kurtosis(found)
        assert_right(float(value) if some else None, x, rel=1e-3)


def test_constant_parts_of_different_constants():
    parts = [summarize_moments_precisely(np.full(n, value, np.float32)) for n, value in ((3, 0.1), (5, 0.7))]
    assert all(found_in(part) is None for part in parts)
    assert_right(found_in(merge_all(parts)), [0.1] * 3 + [0.7] * 5)
    same = [summarize_moments_precisely(np.full(n, 0.1, np.float32)) for n in (3, 5, 7)]
    assert found_in(merge_all(same)) is None


def test_a_part_of_nothing_changes_nothing():
    x = summarize_moments_precisely(np.float32([1.0, 2.0, 7.0])).parts
    nothing = jnp.zeros(WIDTH)
    np.testing.assert_array_equal(merge_parts(x, nothing), x)
    np.testing.assert_array_equal(merge_parts(nothing, x), x)
    assert not kurtosis(merge_parts(nothing, nothing))[1]
    assert collapse_parts(jnp.zeros((0, WIDTH)), 0).tolist() == [0.0] * WIDTH


def test_a_factor_leaves_it_as_it_is():
    x = np.float32([1.0, 2.0, 7.0, 7.5])
    scaled = scale_parts(summarize_moments_precisely(x).parts, jnp.float32(1 / 1024))
    other = summarize_moments_precisely(np.float32([3.0, 1.0]) / 1024).parts
    value, _ = kurtosis(merge_parts(scaled, other))
    assert_right(float(value), np.float32([*x, 3072.0 / 1024, 1.0]) / 1024)


@pytest.mark.parametrize("dims", [(("data",),), ((), ("model",)), (("data",), ("model",))])
def test_shards_and_stacks(dims):
    split = Split.of(dims, {"data": 2, "model": 4})
    x = np.random.default_rng(3).standard_t(3, size=(24, 8)).astype(np.float32)
    summary = summarize_moments_precisely(x, split)
    assert summary.parts.shape == (*(dict(split.sizes)[axis] for axis in split.axes), WIDTH)
    assert_right(found_in(summary), x)
    stacked = jax.vmap(summarize_moments_precisely)(np.stack([x, 2 * x + 1]))
    assert_right(found_in(stacked.collapse(0)), np.stack([x, 2 * x + 1]))
    assert_right(
        found_in(stacked.carried().collapse(0).merge(stacked.collapse(0).identity())), np.stack([x, 2 * x + 1])
    )


def test_the_usual_statistics_are_the_same():
    x = np.random.default_rng(4).normal(size=(30, 7)).astype(np.float32)
    for summarize in FORMS:
        values = finalized(summarize(x))[0]
        check({name: value for name, value in values.items() if "flow/" not in name}, x)
        assert values["underflow/e4m3"] == np.mean((x != 0) & (np.abs(x) <= 2.0**-10))
    assert summarize_magnitude_precisely(x).narrowed("magnitude").kind == "magnitude"


def test_parts_unlike_in_size_mean_and_tail():
    values = [1.0, 2.0, 9.0, 4.0, 4.5, 30.0, 31.0, 32.0]
    a, b = (summarize_moments_precisely(np.float32(x)).parts for x in (values[:3], values[3:]))
    assert_right(float(kurtosis(merge_parts(a, b))[0]), values)
