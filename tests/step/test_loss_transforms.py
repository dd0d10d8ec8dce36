"""A loss function that calls the model inside JAX transforms: the reports and the training are those of one call."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import nnx

import probes_jax as pj
from tests.step.small import GROUPS, NNXModel, copy, make_batch, make_sgd, make_state, only
from tests.step.test_mesh import OneBlock, count_collectives, mesh_of, replicated, shard

pytestmark = pytest.mark.slow  # together; the second pair of Python and JAX goes without

PLAN = pj.Plan(groups=GROUPS, scan_every=2)


def nll_of(model, tokens, targets):
    nll = optax.softmax_cross_entropy_with_integer_labels(model(tokens), targets)
    return pj.observe("nll", nll)


def whole(model, tokens, targets):
    return nll_of(model, tokens, targets)


def per_example(model, tokens, targets):
    return jax.vmap(lambda x, y: nll_of(model, x, y))(tokens, targets)


def chunks(model, tokens, targets):
    """Two tokens of every sequence at a time, each rematerialized."""

    @jax.checkpoint
    def body(carry, chunk):
        return carry, nll_of(model, *chunk)

    cut = [x.reshape(len(x), -1, 2).swapaxes(0, 1) for x in (tokens, targets)]
    return jax.lax.scan(body, 0, cut)[1].swapaxes(0, 1).reshape(tokens.shape)


def loss_of(nll):
    def loss_fn(model, batch, rngs):
        return pj.Loss(nll(model, batch["tokens"], batch["targets"]), mask=batch["mask"], group=batch["source"])

    return loss_fn


BATCHES = [make_batch(seed, batch=16) for seed in range(2)]
MODELS = {"linen": OneBlock, "nnx": lambda: NNXModel(nnx.Rngs(0))}


def state_of(nll, model="linen", batch=BATCHES[0], plan=PLAN, **options):
    made = MODELS[model]()
    variables = made.init(jax.random.key(0), batch["tokens"]) if isinstance(made, nn.Module) else None
    return make_state(
        made, make_sgd(), plan, batch, loss_fn=loss_of(nll), variables=variables and copy(variables), **options
    )


def run(nll, batches=BATCHES, **options):
    state, found = state_of(nll, batch=batches[0], donate=False, **options), []
    for batch in batches:
        state, report = pj.monitored_train_step(state, batch)
        found.append(report)
    return state, found


@functools.cache
def run_whole(plan=PLAN):
    return run(whole, plan=plan)[1]


@pytest.mark.parametrize(("nll", "microbatches", "more"), [(per_example, 1, 3), (chunks, 2, 2)])
def test_every_metric_is_that_of_one_call_on_one_device_and_the_price(nll, microbatches, more):
    """A map over a sharded batch has a row for every example: their maxima are merged in one collective more."""
    batches = [shard(batch, mesh_of(data=8), "data") for batch in BATCHES]
    expected = run_whole()
    state, found = run(nll, batches, shardings=replicated, microbatches=microbatches)
    for one, many in zip(expected, found, strict=True):
        left_out = "logits", "loss/shard", "loss/worst"  # what a call inside returns does not come out
        scalars = {name: value for name, value in one.scalars().items() if not name.startswith(left_out)}
        for name, value in scalars.items():
            assert many.scalars()[name] == pytest.approx(value, rel=3e-4, abs=1e-5), name
    coverage = found[0].coverage
    assert [name for name, _ in coverage.missing] == ["logits"]
    assert "grad_act/loss_fn/nll/rms" in found[0].scalars()
    plain = count_collectives(state, "off", batches[0])
    assert 1 <= count_collectives(state, "light", batches[0]) - plain <= 2
    assert 1 <= count_collectives(state, "full", batches[0]) - plain <= more


def test_a_map_over_the_examples_of_microbatches():
    plan = only("act", "grad_act", scan_every=2)
    batches = [shard(batch, mesh_of(data=8), "data") for batch in BATCHES]
    _, found = run(per_example, batches, plan=plan, shardings=replicated, microbatches=2)
    for one, many in zip(run_whole(plan), found, strict=True):
        for name, value in one.scalars().items():
            if not name.startswith(("loss/shard", "loss/worst")):
                assert many.scalars()[name] == pytest.approx(value, rel=3e-4, abs=1e-5), name


@pytest.mark.optimized
def test_training_does_not_differ_in_a_bit(monkeypatch):
    plan = only("act", "grad", scan_every=2)
    on, _ = run(per_example, model="linen", plan=plan)
    monkeypatch.setenv("PROBES_JAX", "off")
    off, _ = run(per_example, model="linen", plan=plan)
    jax.tree.map(np.testing.assert_array_equal, on.params, off.params)
