"""What optax's own wrappers do with a gradient, read from their states."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from probes_jax.observe.chain import chain
from probes_jax.observe.held_back import held_back

SGD = optax.sgd(0.1)


def follow(tx, gradients, jump=0.0):
    """(applied, dropped) of each step."""
    params = jnp.ones(2)
    state, found = tx.init(params), []
    for value in gradients:
        updates, after = tx.update(jnp.full(2, value), state, params)
        outcome = held_back(state, after, jnp.sqrt(jnp.sum(updates**2)))
        found.append((bool(outcome.applied), bool(outcome.dropped)))
        state = after
    return found


def test_every_update_of_a_plain_optimizer_is_applied():
    assert follow(optax.adam(0.0), [1.0, np.nan, 0.0]) == [(True, False)] * 3


def test_microsteps_only_gather():
    assert follow(optax.MultiSteps(SGD, 3), [1.0] * 4) == [
        (False, False),
        (False, False),
        (True, False),
        (False, False),
    ]


def test_a_skipped_microstep_is_dropped():
    tx = optax.MultiSteps(SGD, 2, should_skip_update_fn=optax.skip_not_finite)
    assert follow(tx, [1.0, np.nan, 1.0]) == [(False, False), (False, True), (True, False)]


def test_apply_if_finite_drops_until_it_gives_in():
    tx = optax.apply_if_finite(SGD, max_consecutive_errors=1)
    assert follow(tx, [1.0, np.nan, np.nan, 1.0]) == [(True, False), (False, True), (True, False), (True, False)]


@pytest.mark.parametrize("wrap", [lambda tx: chain(("sgd", tx)), lambda tx: optax.MultiSteps(tx, 1)])
def test_wrappers_are_found_at_any_depth(wrap):
    tx = wrap(optax.apply_if_finite(SGD, max_consecutive_errors=5))
    assert follow(tx, [1.0, np.nan])[1][1]
