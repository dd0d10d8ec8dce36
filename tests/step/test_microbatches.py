"""Many microbatches equal one batch."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest

import probes_jax as pj
from tests.step.small import GROUPS, make_batch, make_sgd, make_state, only

pytestmark = pytest.mark.slow  # together; the second pair of Python and JAX goes without

PLAN = pj.Plan(groups=GROUPS, scan_every=2)


def is_noise(name):
    """What only several microbatches tell."""
    return name.startswith(("grad/noise", "grad/microbatch"))


@functools.cache
def run(microbatches, steps=3):
    state = make_state(plan=PLAN, microbatches=microbatches, tx=make_sgd())
    reports = []
    for seed in range(steps):
        state, report = pj.monitored_train_step(state, make_batch(seed))
        reports.append(report.scalars())
    return state, reports


@pytest.mark.parametrize("microbatches", [4, 8])
def test_values_do_not_depend_on_the_split(microbatches):
    """L039, L041: ragged masks; the sum of losses is divided once by the sum of tokens."""
    one_state, one = run(1)
    many_state, many = run(microbatches)
    for a, b in zip(one, many, strict=True):
        assert a.keys() == {name for name in b if not is_noise(name)}
        for name in a:
            assert b[name] == pytest.approx(a[name], rel=2e-4, abs=1e-5), name
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one_state.params, many_state.params)


def test_unequal_parts():
    """L039: loss sum 2 over 1 token and 12 over 8 tokens is 14/9, not 1.75."""
    nll = np.zeros((2, 8), np.float32)
    nll[0, 0], nll[1] = 2.0, 1.5
    mask = np.zeros((2, 8), np.float32)
    mask[0, 0], mask[1] = 1.0, 1.0

    def loss_fn(model, batch, rngs):
        value = model(batch["tokens"]).mean() * 0.0
        return pj.Loss(nll=batch["nll"] + value, mask=batch["mask"])

    batch = {"tokens": np.zeros((2, 8), np.int32), "nll": nll, "mask": mask}
    for microbatches in (1, 2):
        state = make_state(loss_fn=loss_fn, plan=only(groups=()), batch=batch, microbatches=microbatches)
        _, report = pj.monitored_train_step(state, batch)
        assert report.scalars()["loss/mean"] == pytest.approx(14 / 9, rel=1e-6)


def test_an_empty_microbatch_counts_for_nothing():
    """L047: an all-padding part changes neither the loss nor the gradient."""
    batch = make_batch()
    batch["mask"][4:] = 0.0
    half = {key: value[:4] for key, value in batch.items()}
    _, whole = pj.monitored_train_step(make_state(microbatches=2), batch)
    _, part = pj.monitored_train_step(make_state(batch=half), half)
    for name in ("loss/mean", "grad/norm", "data/tokens", "update/norm"):
        assert whole.scalars()[name] == pytest.approx(part.scalars()[name], rel=1e-5)


def test_extra_losses_are_averaged_over_microbatches():
    """L054: four microbatches with an auxiliary loss of 0.01 each report 0.01."""

    def loss_fn(model, batch, rngs):
        logits = model(batch["tokens"])
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return pj.Loss(nll=nll, extra={"router": 0.01 + 0.0 * logits.sum()}, aux={"first": logits[0, 0, 0]})

    for microbatches in (1, 4):
        state = make_state(loss_fn=loss_fn, plan=only(groups=()), microbatches=microbatches)
        _, report = pj.monitored_train_step(state, make_batch())
        assert report.scalars()["loss/extra/router"] == pytest.approx(0.01, rel=1e-5)
        assert report.scalars()["loss/extra/router/reach"] == 0  # L058: 0.0 times the logits trains nothing
        assert "loss/extra/router trains nothing" in str(report.coverage)
        assert np.shape(report.aux["first"]) == ((4,) if microbatches == 4 else ())


def test_a_scalar_loss_is_averaged_over_microbatches():
    def loss_fn(model, batch, rngs):
        logits = model(batch["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    found = []
    for microbatches in (1, 4):
        state = make_state(loss_fn=loss_fn, plan=only(groups=()), microbatches=microbatches)
        _, report = pj.monitored_train_step(state, make_batch())
        found.append(report.scalars())
    assert found[1]["loss/mean"] == pytest.approx(found[0]["loss/mean"], rel=1e-5)
    assert found[1]["grad/norm"] == pytest.approx(found[0]["grad/norm"], rel=1e-4)
    assert "loss/shard[0]" not in found[0]
    assert "data/tokens" not in found[0]


def test_one_record_per_step():
    """L102: accumulation gives one value per metric and step, not one per microbatch."""
    _, reports = run(4)
    assert len(reports) == 3
    assert all(isinstance(value, float) for report in reports for value in report.values())


def test_batch_that_does_not_divide():
    with pytest.raises(ValueError, match=r"batch of 8 examples.*microbatches=3"):
        make_state(microbatches=3)
