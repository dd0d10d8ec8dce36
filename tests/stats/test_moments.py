import functools
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from probes_jax.stats.moments import summarize_extreme, summarize_magnitude, summarize_moments, summarize_norm
from tests.stats.reference import check, finalized, statistics

SUMMARIZE = {
    "moments": summarize_moments,
    "magnitude": summarize_magnitude,
    "norm": summarize_norm,
    "extreme": summarize_extreme,
}
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float64": np.float64}


def _all(x):
    return {kind: summarize(x) for kind, summarize in SUMMARIZE.items()}


_summaries = jax.jit(_all)
_summaries_of_each = jax.jit(jax.vmap(_all))


def _tensors(dtype) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    base = rng.normal(size=(6, 5))
    holed = np.where(rng.random((6, 5)) < 0.3, 0.0, base)

    def with_(**elements):
        out = base.copy()
        for index, value in enumerate(elements.values()):
            out[1, index] = value
        return out

    return {
        "normal": base,
        "zeros among others": holed,
        "all equal": np.full((6, 5), 0.1),
        "all zero": np.zeros((6, 5)),
        "negative zero": np.full((6, 5), -0.0),
        "all negative": -np.abs(base) - 1.0,
        "nan": with_(a=np.nan),
        "positive inf": with_(a=np.inf),
        "negative inf": with_(a=-np.inf),
        "both infs": with_(a=np.inf, b=-np.inf),
        "nan and both infs": with_(a=np.nan, b=np.inf, c=-np.inf, d=np.nan),
        "only nan": np.full((6, 5), np.nan),
        "only inf": np.full((6, 5), np.inf),
        "nan first": np.where(np.arange(30).reshape(6, 5) == 0, np.nan, base),
    }


@pytest.mark.parametrize("name", DTYPES)
def test_every_statistic_equals_its_definition(name):
    dtype = DTYPES[name]
    tensors = {case: x.astype(dtype) for case, x in _tensors(dtype).items()}
    with jax.enable_x64(name == "float64"):
        found = _summaries_of_each(np.stack(list(tensors.values())))
        for summary in found.values():
            assert all(leaf.dtype == jnp.float32 for leaf in summary.leaves.values())
            for (case, x), values in zip(tensors.items(), finalized(summary), strict=True):
                try:
                    check(values, x)
                except AssertionError as error:
                    raise AssertionError(f"{summary.kind} of {case!r}: {error}") from None


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1), (0,), (3, 0), (7,), (2, 3, 4)])
def test_every_shape(shape):
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    for kind, summary in _summaries(x).items():
        check(finalized(summary)[0], x, skip=("norm",) if not x.size and kind == "magnitude" else ())


def test_nothing_is_absent_and_not_zero():
    found = _summaries(np.zeros((0, 4), np.float32))
    for kind in ("moments", "magnitude", "extreme"):
        assert set(finalized(found[kind])[0].values()) == {None}
    assert finalized(found["norm"])[0] == {"norm": 0.0}


def test_all_equal_has_no_spread_at_all():
    for value in (0.1, 1e30, -3.3e-7, 65504.0):
        values = finalized(_summaries(np.full((6, 5), value, np.float32))["moments"])[0]
        assert values["std"] == 0.0


@pytest.mark.parametrize("shape", [(512,), (64, 96), (300, 500)])
def test_a_mean_ten_thousand_times_the_deviation(shape):
    x = (1e4 + np.random.default_rng(2).normal(size=shape)).astype(np.float32)
    values = finalized(_summaries(x)["moments"])[0]
    want = statistics(x)
    assert values["std"] == pytest.approx(want["std"], rel=5e-3)
    assert values["mean"] == pytest.approx(want["mean"], rel=1e-7)


def test_a_head_unlike_the_rest_is_no_trap():  # the pivot comes from the first elements
    x = np.random.default_rng(3).normal(size=(64, 256)).astype(np.float32)
    x[0, :128] = 1000.0
    check(finalized(_summaries(x)["moments"])[0], x, rtol=1e-5)
    x[0, 0] = np.inf
    assert finalized(_summaries(x)["moments"])[0]["max"] == np.inf


def test_l059_ones_in_bfloat16():
    values = finalized(_summaries(np.ones((768,), ml_dtypes.bfloat16))["moments"])[0]
    assert (values["mean"], values["std"], values["rms"]) == (1.0, 0.0, 1.0)


def test_bfloat16_sums_do_not_stop_growing():
    x = np.full((1000, 40), 0.3, ml_dtypes.bfloat16)
    for summary in _summaries(x).values():
        check(finalized(summary)[0], x)


def test_an_overflow_of_squares_shows_as_inf_with_no_infinite_element():
    x = (1e30 * np.random.default_rng(4).normal(size=(6, 5))).astype(np.float32)
    found = {kind: finalized(summary)[0] for kind, summary in _summaries(x).items()}
    assert found["magnitude"]["norm"] == found["norm"]["norm"] == np.inf
    assert found["moments"]["rms"] == found["moments"]["std"] == np.inf
    assert found["magnitude"]["inf_count"] == found["moments"]["nan_count"] == 0
    check(found["moments"], x, skip=("rms", "mean_square", "std"))
    check(found["magnitude"], x, skip=("rms", "mean_square", "norm"))


def test_an_overflow_of_sums_is_inf_not_nan():
    values = finalized(_summaries(np.full((6, 5), 3e38, np.float32))["moments"])[0]
    assert values["abs_mean"] == values["rms"] == values["mean"] == np.inf
    assert values["abs_max"] == pytest.approx(3e38)
    assert values["inf_count"] == 0


def test_squares_below_the_range_vanish_and_the_maximum_does_not():
    x = np.full((6, 5), 1e-25, np.float32)
    values = finalized(_summaries(x)["magnitude"])[0]
    assert values["norm"] == 0.0
    assert values["abs_max"] == pytest.approx(1e-25)
    assert values["abs_mean"] == pytest.approx(1e-25)
    assert values["zero_fraction"] == 0.0


def test_subnormals_are_counted_all_alike():
    x = np.full((6, 5), 1e-40, np.float32)  # below float32's normal range
    values = finalized(_summaries(x)["magnitude"])[0]
    assert values["zero_fraction"] in (0.0, 1.0)  # flushed, or kept
    assert values["abs_max"] in (0.0, pytest.approx(1e-40, rel=1e-4))
    half = np.full((6, 5), 6e-8, np.float16)  # subnormal in float16, normal in float32
    check(finalized(_summaries(half)["magnitude"])[0], half)


def test_float64_beyond_float32_counts_as_infinite():
    with jax.enable_x64(True):
        values = finalized(_summaries(np.asarray([1.0, 1e300]))["magnitude"])[0]
    assert values["inf_count"] == 1
    assert values["abs_max"] == np.inf


@pytest.mark.parametrize("kind", SUMMARIZE)
def test_strict_promotion_and_x64_change_nothing(kind):
    x = np.random.default_rng(5).normal(size=(6, 5)).astype(np.float32)
    plain = finalized(jax.jit(SUMMARIZE[kind])(x))
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
        assert finalized(jax.jit(functools.partial(SUMMARIZE[kind]))(x)) == plain


def test_counts_are_exact_past_two_to_the_twenty_four():
    x = np.zeros((4097, 4097), np.int8)  # 16,785,409 elements, one byte each
    x[5, 7] = 3
    values = finalized(jax.jit(summarize_magnitude)(x))[0]
    assert values["zero_fraction"] == (x.size - 1) / x.size
    assert values["norm"] == 3.0


def test_a_measurement_has_no_gradient():
    def loss(x):
        found = _all(x)
        return jnp.sum(x * x) + sum(leaf.sum() for s in found.values() for leaf in s.leaves.values())

    x = np.random.default_rng(6).normal(size=(6, 5)).astype(np.float32)
    np.testing.assert_array_equal(jax.grad(loss)(x), 2 * x)


def test_no_warning_is_raised_on_the_way():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in (np.zeros((0, 4), np.float32), np.full((6, 5), np.nan, np.float32), np.full((6, 5), 3e38, np.float32)):
            for summary in _summaries(x).values():
                finalized(summary)
