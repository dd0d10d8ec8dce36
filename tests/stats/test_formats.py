"""Thresholds against ml_dtypes, element by element, ties and subnormal numbers included."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from probes_jax.spec.summary import FORMATS, decode_count
from probes_jax.stats.fold import fold
from probes_jax.stats.formats import _DTYPES, loss_folds, range_of
from probes_jax.stats.partial import WHOLE, cut

REFERENCE = {"bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
_fold = jax.jit(lambda x: fold(cut(x, WHOLE), loss_folds()))


def edge_cases(dtype) -> np.ndarray:
    """Every value of the format, what lies halfway between neighbours, and the numbers next to each, of both signs."""
    raw = np.arange(2 ** (8 * np.dtype(dtype).itemsize), dtype=np.uint64)
    with np.errstate(invalid="ignore"):  # signalling NaN
        values = raw.astype(f"uint{8 * np.dtype(dtype).itemsize}").view(dtype).astype(np.float64)
    values = np.unique(values[np.isfinite(values) & (values >= 0)])
    last = values[-1] + (values[-1] - values[-2]) * np.array([0.5, 1.0])
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2, last])
    with np.errstate(over="ignore"):
        points = points.astype(np.float32)
    near = [points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))]
    near += [np.float32([0.0, 1e-45, 1.1754944e-38, 3.4028235e38, np.inf, np.nan])]
    both = np.concatenate(near)
    return np.concatenate([both, -both])


def lost_by_definition(x: np.ndarray, dtype) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = x.astype(dtype).astype(np.float32)
    finite = np.isfinite(x)
    return finite & (x != 0) & (narrow == 0), finite & ~np.isfinite(narrow)


@pytest.mark.parametrize("name", FORMATS)
def test_every_element_at_an_edge(name):
    x = edge_cases(REFERENCE[name])
    under, over = lost_by_definition(x, REFERENCE[name])
    assert under.any() and over.any()
    maps = {key: f.map for key, f in loss_folds().items()}
    np.testing.assert_array_equal(jax.jit(maps[f"underflow/{name}"])(x), under)
    np.testing.assert_array_equal(jax.jit(maps[f"overflow/{name}"])(x), over)


@pytest.mark.parametrize("name", FORMATS)
def test_the_thresholds_are_ties_of_the_format(name):
    kept = range_of(_DTYPES[name])
    numbers = np.uint32([kept.lost, kept.lost + 1, kept.beyond - 1, kept.beyond]).view(np.float32)
    under, over = lost_by_definition(numbers, REFERENCE[name])
    assert under.tolist() == [True, False, False, False]
    assert over.tolist() == [False, False, False, True]


@pytest.mark.parametrize("size", [100, 3_000, 70_000, 2**17])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_counts_of_a_tensor(size, dtype):
    rng = np.random.default_rng(size)
    with np.errstate(over="ignore"):
        x = (rng.normal(size=size) * 10.0 ** rng.uniform(-45, 39, size)).astype(np.float32).astype(dtype)
    x[::50], x[7], x[8] = 0.0, np.nan, -np.inf
    found = _fold(x)
    for name in FORMATS:
        under, over = lost_by_definition(x.astype(np.float32), REFERENCE[name])
        assert decode_count(np.asarray(found[f"underflow/{name}"])) == under.sum()
        assert decode_count(np.asarray(found[f"overflow/{name}"])) == over.sum()


def test_what_a_narrow_tensor_cannot_lose():
    x = np.asarray([2.0**-133, 3.3e38, 1.0], ml_dtypes.bfloat16)
    found = _fold(x)
    assert decode_count(np.asarray(found["underflow/bf16"])) == decode_count(np.asarray(found["overflow/bf16"])) == 0
    assert decode_count(np.asarray(found["underflow/e5m2"])) == decode_count(np.asarray(found["overflow/e4m3"])) == 1
    assert jnp.finfo(jnp.float8_e4m3fn).max == 448
