import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probes_jax.spec.summary import decode_count
from probes_jax.stats import exact
from probes_jax.stats.exact import count_true, encode_count, encode_static_count, normalize_count, split_weighted_mean

_encode = jax.jit(encode_count)
_normalize = jax.jit(normalize_count)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4))
@settings(max_examples=50, deadline=None)
def test_counts_survive_their_limbs(counts):
    limbs = np.asarray(_encode(np.asarray(counts, np.uint32)))
    assert limbs.max() < 256
    np.testing.assert_array_equal(decode_count(limbs), counts)


@given(st.integers(0, 2**48 - 1))
@settings(max_examples=100, deadline=None)
def test_sizes_of_any_length_survive_their_limbs(size):
    assert decode_count(encode_static_count(size)) == size


def test_sixty_five_thousand_parts_sum_exactly_in_float32():
    limbs = np.broadcast_to(encode_static_count(2**32 - 1), (65_536, 4))
    assert decode_count(np.sum(limbs, axis=0, dtype=np.float32)) == 65_536 * (2**32 - 1)


@given(st.lists(st.integers(0, 2**24 - 2**16), min_size=4, max_size=4))
@settings(max_examples=50, deadline=None)
def test_carrying_keeps_the_count(limbs):
    carried = np.asarray(_normalize(np.asarray(limbs, np.float32)))
    assert carried[:3].max() < 256
    assert decode_count(carried) == decode_count(np.asarray(limbs, np.float32))


@pytest.mark.parametrize("axes", [(0, 1, 2), (1,)])
def test_count_true_by_every_route(axes, monkeypatch):
    condition = np.random.default_rng(0).random((5, 8, 12)) < 0.4
    want = condition.sum(axis=axes)
    # float sum; uint32 sum; axis by axis; halves of one enormous axis
    for floats, wrap, limb_parts in ((2**24, 2**32, 2**16), (0, 2**32, 2**16), (0, 13, 2**16), (0, 7, 1)):
        monkeypatch.setattr(exact, "FLOAT_ONES", floats)
        monkeypatch.setattr(exact, "_WRAP", wrap)
        monkeypatch.setattr(exact, "_LIMB_PARTS", limb_parts)
        limbs = jax.jit(lambda c: count_true(c, axes))(condition)
        assert limbs.dtype == jnp.float32
        np.testing.assert_array_equal(decode_count(np.asarray(limbs)), want)


def test_no_count_of_a_tensor_past_two_to_the_thirty_two_is_left_to_one_uint32():
    shape = jax.ShapeDtypeStruct((70_000, 300, 300), bool)  # 6.3e9 elements, never allocated
    jaxpr = jax.make_jaxpr(lambda c: count_true(c, (0, 1, 2)))(shape)
    sums = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "reduce_sum" and e.invars[0].aval.dtype == np.uint32]
    assert sums
    for equation in sums:
        reduced = np.prod([equation.invars[0].aval.shape[axis] for axis in equation.params["axes"]])
        assert reduced < 2**32


_split = jax.jit(split_weighted_mean, static_argnums=1)


@pytest.mark.parametrize("weight", [1, 7, 4096, 4097, 16_777_216, 123_456_789, 2**33 + 5])
def test_a_weighted_mean_keeps_thirty_four_bits(weight):
    mean = (1e4 + np.random.default_rng(0).normal(size=64)).astype(np.float32)
    found = {name: np.asarray(leaf, np.float64) for name, leaf in _split(mean, weight).items()}
    exact_mean = mean.astype(np.float64)
    np.testing.assert_allclose(found["mean_hi"] + found["mean_lo"], weight * exact_mean, rtol=2**-34)
    np.testing.assert_allclose(found["sq_hi"] + found["sq_lo"], weight * exact_mean**2, rtol=2**-33)
    # The high parts of like parts sum without any rounding.
    for name in ("mean_hi", "sq_hi"):
        high = np.asarray(_split(mean, weight)[name])
        assert np.sum(high, dtype=np.float32) == np.sum(high, dtype=np.float64)


def test_an_overflow_of_the_mean_is_inf_and_not_nan():
    found = _split(np.asarray([3e38, 1e30], np.float32), 100)
    assert np.isinf(found["mean_hi"][0])
    assert np.isinf(found["sq_hi"]).all()
    assert not any(np.isnan(leaf).any() for leaf in found.values())
