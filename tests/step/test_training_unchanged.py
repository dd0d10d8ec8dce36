"""Monitoring must not change training."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import probes_jax as pj
from tests.step.small import GROUPS, Model, copy, make_batch, make_state, make_tx, plain_step


def train(state, steps, start=0):
    for seed in range(start, start + steps):
        state, _ = pj.monitored_train_step(state, make_batch(seed))
    return state


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.optimized
def test_twenty_steps_bitwise_equal_with_probes_on_and_off(monkeypatch):
    plan = pj.Plan(groups=GROUPS, scan_every=3, backward=False)
    on = train(make_state(plan=plan, model=Model(dropout=0.1)), 20)
    monkeypatch.setenv("PROBES_JAX", "off")
    off = train(make_state(plan=plan, model=Model(dropout=0.1)), 20)
    assert_equal(on.params, off.params)
    assert_equal(on.opt_state, off.opt_state)


@pytest.mark.optimized
def test_twenty_steps_with_taps_differ_in_last_bits_only_from_a_loop_without_the_library(monkeypatch):
    """A gradient that is measured is one that the compiler keeps: what it fused before it rounds otherwise."""
    tx = make_tx()
    state = make_state(tx=tx, plan=pj.Plan(groups=GROUPS, scan_every=3))
    params, opt_state = copy(state.params), copy(state.opt_state)
    for seed in range(20):
        params, opt_state, *_ = plain_step(params, opt_state, make_batch(seed), tx)
    on = train(state, 20).params
    monkeypatch.setenv("PROBES_JAX", "off")
    off = train(make_state(tx=tx), 20).params
    for other in (params, off):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6), on, other)


def test_off_is_a_plain_step(monkeypatch):
    monkeypatch.setenv("PROBES_JAX", "off")
    state = make_state()
    assert int(state.step) == 0
    state, report = pj.monitored_train_step(state, make_batch())
    assert int(state.step) == 1
    assert report.scalars() == {}
    assert report.layout.entries == ()


def test_donated_state_is_gone_and_reports_stay():
    """L139: a report is a fresh output; reading it five steps later works."""
    state = make_state()
    first, report = pj.monitored_train_step(state, make_batch())
    reports = [report]
    for _ in range(5):
        first, report = pj.monitored_train_step(first, make_batch())
        reports.append(report)
    with pytest.raises(RuntimeError, match=r"deleted|donated"):
        np.asarray(jax.tree.leaves(state.params)[0])
    assert all(np.isfinite(report.scalars()["loss/mean"]) for report in reports)
    with pytest.raises(ValueError, match="use the state that the step returned"):
        pj.monitored_train_step(state, make_batch())


def test_a_snapshot_survives_donation():
    """L141: a copied state is not an alias of the live one."""
    state = make_state()
    snapshot = copy(state.params)
    before = jax.tree.map(np.array, snapshot)
    train(state, 2)
    assert_equal(snapshot, before)


def test_donation_can_be_turned_off():
    state = make_state(donate=False)
    pj.monitored_train_step(state, make_batch())
    pj.monitored_train_step(state, make_batch())  # the old state is still there


def test_the_users_own_variables_are_not_donated():
    tokens = make_batch()["tokens"]
    variables = Model().init(jax.random.key(1), tokens)
    state = make_state(variables=variables)
    train(state, 2)
    Model().apply(variables, tokens)


def test_rngs_follow_step_and_microbatch():
    """L111: five steps, save, five steps equals ten steps, dropout included."""
    state = make_state(model=Model(dropout=0.3), donate=False)
    whole, half = train(state, 10), train(state, 5)
    leaves, structure = jax.tree.flatten(half)
    resumed = jax.tree.unflatten(structure, [np.array(x) for x in leaves])
    assert_equal(train(resumed, 5, start=5).params, whole.params)


@pytest.mark.optimized
def test_how_often_is_measured_changes_nothing():
    """L161: scanning on every step or on every tenth gives the same parameters bit by bit, and the same loss."""
    found = []
    for scan_every in (1, 10):
        plan = pj.Plan(groups=GROUPS, scan_every=scan_every, backward=False)
        state, losses = make_state(plan=plan), []
        for seed in range(12):
            state, report = pj.monitored_train_step(state, make_batch(seed))
            losses.append(report.scalars()["loss/mean"])
        found.append((state.params, losses))
    assert_equal(found[0][0], found[1][0])
    # The light and the full program are two programs: a sum may be ordered otherwise, to a last bit of float32.
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=3e-7)
