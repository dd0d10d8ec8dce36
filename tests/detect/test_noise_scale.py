"""The noise scale's two estimates have no bias, and their means are smoothed apart."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from probes_jax.detect.noise_scale import KEEP, estimate_noise, init_noise, noise_scale, update_noise


def test_estimates_have_no_bias_whatever_the_sizes_of_the_microbatches():
    rng = np.random.default_rng(0)
    sizes, width, trials = (3, 17, 1, 9), 5, 20_000
    mean = np.array([0.3, -0.2, 0.1, 0.0, 0.4])
    tokens = mean + rng.normal(size=(trials, sum(sizes), width)) * [1.0, 2.0, 0.5, 1.0, 1.0]
    parts = [part.mean(axis=1) for part in np.split(tokens, np.cumsum(sizes)[:-1], axis=1)]
    a = sum(b * (g**2).sum(-1) for b, g in zip(sizes, parts)) / sum(sizes)
    whole = (tokens.mean(axis=1) ** 2).sum(-1)
    trace, square, known = jax.vmap(estimate_noise, (0, 0, None, None))(
        jnp.float32(a), jnp.float32(whole), jnp.float32(sum(sizes)), jnp.float32(len(sizes))
    )
    assert known.all()
    assert np.mean(trace) == pytest.approx(1 + 4 + 0.25 + 1 + 1, rel=0.02)
    assert np.mean(square) == pytest.approx((mean**2).sum(), rel=0.02)


@pytest.mark.parametrize(
    ("parts", "whole", "tokens", "batches"), [(2.0, 1.0, 8.0, 1.0), (np.nan, 1.0, 8.0, 2.0), (2.0, np.inf, 8.0, 2.0)]
)
def test_nothing_is_known_of_one_microbatch_or_of_what_is_not_finite(parts, whole, tokens, batches):
    found = estimate_noise(*map(jnp.float32, (parts, whole, tokens, batches)))
    assert not found[-1]
    state = update_noise(init_noise(), *found)
    assert (float(state.trace), float(state.square)) == (0.0, 0.0)
    assert not noise_scale(state)[1]


def test_numerator_and_denominator_are_smoothed_apart():
    rng = np.random.default_rng(0)
    readings = rng.normal(1.0, 0.5, (20, 2))
    state, means = init_noise(), np.zeros(2)
    for trace, square in readings:
        state = update_noise(state, jnp.float32(trace), jnp.float32(square), jnp.bool_(True))
        means = float(KEEP) * means + (1 - float(KEEP)) * np.array([trace, square])
    scale, some = noise_scale(state)
    assert some
    assert float(scale) == pytest.approx(means[0] / means[1], rel=1e-5)
    again = update_noise(state, jnp.float32(9.0), jnp.float32(9.0), jnp.bool_(False))
    assert jax.tree.map(float, again) == jax.tree.map(float, state)
