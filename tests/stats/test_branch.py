"""Residual branches against float64, and models of which the answer is known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from probes_jax.stats.branch import COLUMNS, measure_branch
from probes_jax.stats.per_token import NOTHING


def reference(stream, branch):
    """Each column of each token by its definition, in float64."""
    s, b = (np.asarray(x).astype(np.float64) for x in (stream, branch))
    a = s + b
    norm = lambda x: np.sqrt((x**2).sum(axis=-1))  # noqa: E731
    cos = np.clip((s * a).sum(axis=-1) / (norm(s) * norm(a)), -1, 1)
    summed = (np.asarray(stream).astype(np.float32) + np.asarray(branch).astype(np.float32)).astype(ml_dtypes.bfloat16)
    lost = (b != 0) & (summed == np.asarray(stream).astype(np.float32).astype(ml_dtypes.bfloat16))
    return {
        "stream_norm": norm(s),
        "branch_norm": norm(b),
        "ratio": norm(b) / norm(s),
        "importance": 1 - cos,
        "angle": np.arccos(cos) / np.pi,
        "noop": lost.mean(axis=-1),
        "nonzero": (b != 0).mean(axis=-1),
    }


def measured(stream, branch):
    found = jax.jit(measure_branch)(jnp.asarray(stream), jnp.asarray(branch))
    assert found.positions == np.ndim(stream) - 1
    return {name: np.asarray(found.values[..., index]) for index, name in enumerate(COLUMNS)}


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("scale", [1e-3, 0.3, 30.0])
def test_every_column_is_its_definition(dtype, scale):
    rng = np.random.default_rng(0)
    s = rng.normal(size=(3, 5, 64)).astype(dtype)
    b = (scale * rng.normal(size=s.shape)).astype(dtype)
    b[rng.random(b.shape) < 0.2] = 0
    found = measured(s, b)
    for name, want in reference(s, b).items():
        tolerance = 1e-4 if name in ("importance", "angle") else 2e-6  # arccos loses half its digits, the test's too
        np.testing.assert_allclose(found[name], want, rtol=tolerance, atol=1e-7, err_msg=name)


def test_a_branch_of_nothing():
    s = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    found = measured(s, np.zeros_like(s))
    for name in ("branch_norm", "ratio", "importance", "angle", "noop", "nonzero"):
        np.testing.assert_array_equal(found[name], 0.0, err_msg=name)


def test_opposite_and_equal_directions():
    s = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    opposite, same = measured(s, -3 * s), measured(s, 2 * s)
    np.testing.assert_allclose(opposite["angle"], 1.0, rtol=1e-6)
    np.testing.assert_allclose(opposite["importance"], 2.0, rtol=1e-6)
    np.testing.assert_allclose(same["angle"], 0.0, atol=1e-6)
    np.testing.assert_allclose(same["ratio"], 2.0, rtol=1e-6)


def test_a_small_turn_is_not_lost_in_rounding():
    """1 - cos of float32 has no digit left below an angle of 3e-4."""
    s = np.zeros((1, 4), np.float32)
    b = np.zeros((1, 4), np.float32)
    s[0, 0], b[0, 1] = 1.0, 1e-5
    found = measured(s, b)
    assert found["angle"][0] == pytest.approx(1e-5 / np.pi, rel=1e-4)
    assert found["importance"][0] == pytest.approx(0.5e-10, rel=1e-4)


def test_a_zero_stream_has_no_ratio_and_a_nan_shows():
    s, b = np.zeros((2, 4), np.float32), np.ones((2, 4), np.float32)
    s[1], s[1, 0] = 1.0, np.nan
    found = measured(s, b)
    assert [found[name][0] for name in ("ratio", "importance", "angle")] == [NOTHING] * 3
    assert found["branch_norm"][0] == 2.0
    assert all(np.isnan(found[name][1]) for name in ("stream_norm", "ratio", "importance", "angle"))


def test_what_bfloat16_loses():
    """256 + 0.5 is 256 in bfloat16; 256 + 2 is 258."""
    found = measured(np.full((1, 4), 256.0, np.float32), np.asarray([[0.5, 2.0, 0.0, 0.5]], np.float32))
    assert (found["noop"][0], found["nonzero"][0]) == (0.5, 0.75)


def test_a_norm_that_overflows_has_no_direction():
    stream, branch = jnp.asarray([[1e20, 2e20]]), jnp.asarray([[-2e20, 1e20]])
    found = dict(zip(COLUMNS, measure_branch(stream, branch).values[0]))
    assert np.isinf(found["stream_norm"]) and np.isnan(found["importance"]) and np.isnan(found["angle"])
