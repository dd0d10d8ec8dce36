"""The share of a gate that is shut, by its definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from probes_jax.spec.catalog.residual import THETAS
from probes_jax.stats.gate import COLUMNS, measure_gate


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_it_is_the_share_of_channels_below(dtype, temperature):
    gate = np.random.default_rng(0).normal(size=(3, 5, 64), scale=3.0).astype(dtype)
    found = jax.jit(measure_gate, static_argnums=1)(gate, temperature)
    assert found.positions == 2 and found.names == COLUMNS
    beta = 1 / (1 + np.exp(-gate.astype(np.float64) / temperature))
    for column, theta in enumerate(THETAS):
        np.testing.assert_allclose(found.values[..., column], (beta < theta).mean(axis=-1), rtol=1e-6)


def test_open_shut_and_not_a_number():
    gate = jnp.array([[50.0] * 4, [-50.0] * 4, [-jnp.inf] * 4, [jnp.nan] * 4, [-50.0, 0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(measure_gate(gate).values[:, 0], [0.0, 1.0, 1.0, 0.0, 0.25])
