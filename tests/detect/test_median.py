import jax
import jax.numpy as jnp
import numpy as np
import pytest

from probes_jax.detect.median import masked_median

WIDTH = 9
_median = jax.jit(masked_median)


def _first(number: int) -> np.ndarray:
    return np.arange(WIDTH) < number


@pytest.mark.parametrize("number", range(1, WIDTH + 1))
def test_equals_numpy_for_every_fill_level(number):
    rng = np.random.default_rng(number)
    rows = np.stack(
        [
            rng.normal(size=WIDTH),
            rng.integers(0, 3, size=WIDTH),  # many duplicates
            np.full(WIDTH, -7.5),
            np.sort(rng.normal(size=WIDTH)),
            -np.sort(rng.normal(size=WIDTH)),
            np.where(rng.random(WIDTH) < 0.5, 0.0, -0.0),
        ]
    ).astype(np.float32)
    valid = np.broadcast_to(_first(number), rows.shape)
    np.testing.assert_array_equal(_median(rows, valid), np.median(rows[:, :number], axis=1))


def test_valid_values_may_lie_anywhere():
    rng = np.random.default_rng(0)
    rows = rng.integers(-4, 4, size=(64, WIDTH)).astype(np.float32)
    valid = rng.random((64, WIDTH)) < 0.5
    valid[:, 0] |= ~valid.any(axis=1)
    want = [np.median(row[mask]) for row, mask in zip(rows, valid, strict=True)]
    np.testing.assert_array_equal(_median(rows, valid), want)


def test_what_is_not_valid_has_no_say_even_when_it_is_not_finite():
    rows = np.asarray([[np.nan, 1.0, np.inf, 3.0, -np.inf]], np.float32)
    valid = np.isfinite(rows)
    assert float(masked_median(jnp.asarray(rows), jnp.asarray(valid))[0]) == 2.0


def test_nothing_valid_gives_zero():
    assert float(_median(np.ones((1, WIDTH), np.float32), np.zeros((1, WIDTH), bool))[0]) == 0.0


def test_a_whole_window_in_the_order_of_the_plan():
    values = np.random.default_rng(1).normal(size=(3, 128)).astype(np.float32)
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
        got = masked_median(jnp.asarray(values), jnp.ones(values.shape, bool))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, np.median(values, axis=1))
