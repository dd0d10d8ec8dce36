"""Every change of one element is seen, every swap that was tried is, and both forms are one number."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probes_jax.stats import checksum as module
from probes_jax.stats.checksum import checksum

MASK = 2**32 - 1
DTYPES = [
    np.float32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, np.int32, np.int16, np.int8, np.uint8,
    np.uint32, np.bool_, np.complex64, ml_dtypes.int4, ml_dtypes.uint4,
]  # fmt: skip
_sum = jax.jit(checksum)


def scrambled(word: int) -> int:
    word = (word ^ (word >> 16)) * 0x7FEB352D & MASK
    word = (word ^ (word >> 15)) * 0x846CA68B & MASK
    return word ^ (word >> 16)


def by_definition(words) -> int:
    return sum(scrambled((int(w) + p * 0x9E3779B9) & MASK) for p, w in enumerate(np.ravel(words))) & MASK


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (2, 3, 5), (0,), (4, 0)])
def test_it_is_the_sum_by_its_definition(shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    assert int(_sum(x)) == by_definition(x.view(np.uint32))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_flipped_bit_is_seen(dtype):
    rng = np.random.default_rng(1)
    x = rng.integers(0, 2, 12).astype(dtype) if dtype is np.bool_ else rng.integers(-8, 8, 12).astype(np.int8)
    x = x if dtype is np.bool_ else x.astype(dtype)
    whole, size = int(_sum(x)), x.dtype.itemsize
    narrow = {"int4": 4, "uint4": 4, "bool": 1}
    for element in range(x.size):
        for bit in range(narrow.get(x.dtype.name, 8 * size)):
            raw = x.copy().view(np.uint8).reshape(x.size, size)
            raw[element, bit // 8] ^= 1 << bit % 8
            if narrow.get(x.dtype.name) == 4:  # kept in a byte each, sign extended
                raw = (np.int8(raw << 4) >> 4).view(np.uint8) if x.dtype.name == "int4" else raw & 15
            assert int(_sum(raw.reshape(-1).view(dtype))) != whole, (element, bit)


def test_every_bit_of_keys_and_of_wide_elements_is_seen():
    keys = jax.random.split(jax.random.key(0), 4)
    other = jax.random.wrap_key_data(jax.random.key_data(keys).at[2, 1].set(7))
    assert int(_sum(keys)) != int(_sum(other))
    with jax.enable_x64(True):
        x = np.asarray([1.0, 2.0, 3.0])
        found = {int(jax.jit(checksum)((x.view(np.uint64) ^ (np.uint64(1) << np.uint64(bit))).view(np.float64)))
                 for bit in range(64)}  # fmt: skip
        assert len(found | {int(jax.jit(checksum)(x))}) == 65


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**16))
@settings(max_examples=20, deadline=None)
def test_swaps_are_seen(difference, seed):
    """Also of x and -x, whose bits differ by 2^31, which an even difference of weights would cancel."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 2**32, 64, dtype=np.uint64).astype(np.uint32)
    whole, swapped = int(_sum(words)), []
    for other in (difference, 2**31, 1):
        i, j = rng.choice(64, 2, replace=False)
        pair = words.copy()
        pair[j] = pair[i] ^ np.uint32(other)
        before = int(_sum(pair))
        pair[[i, j]] = pair[[j, i]]
        swapped.append((before, int(_sum(pair)), other))
    assert all(a != b for a, b, other in swapped if other)
    assert whole == int(_sum(words))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8])
@pytest.mark.parametrize("shape", [(64, 24), (3, 8, 16), (256,)])
def test_by_blocks_it_is_the_same_number(shape, dtype):
    x = np.random.default_rng(2).integers(-100, 100, shape).astype(dtype)
    block = 8 if x.size % 16 else 16
    whole = int(jax.jit(module._whole)(x))
    assert int(jax.jit(module._by_blocks, static_argnums=1)(x, block)) == whole
    assert int(_sum(x)) == whole


def test_a_large_array_takes_the_blocks():
    x = jnp.zeros((512, 256), jnp.bfloat16)
    assert "while" in jax.jit(checksum).lower(x).as_text()
    assert int(_sum(x)) == int(jax.jit(module._whole)(x))


def test_nan_and_signed_zero_are_bits():
    quiet, other = (np.uint32([word]).view(np.float32) for word in (0x7FC00000, 0x7FC00001))
    assert int(_sum(quiet)) != int(_sum(other))
    assert int(_sum(np.float32([0.0]))) != int(_sum(np.float32([-0.0])))
