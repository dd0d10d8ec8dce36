"""Seeds side by side under `jax.vmap`: each is trained and measured as alone."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import probes_jax as pj
from tests.step.small import VOCAB, make_batch, make_sgd, make_state, only

pytestmark = pytest.mark.slow  # together; the second pair of Python and JAX goes without

SEEDS = 3
PLAN = only(scan_every=2, guard=pj.Guard())


class Tiny(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(VOCAB, name="head")(nn.Embed(VOCAB, 4, name="embed")(tokens))


def stack(states):
    """One state for all seeds; the step is the same number for all of them."""
    first = states[0]
    alike = [dataclasses.replace(state, step=None, settings=first.settings) for state in states]
    return dataclasses.replace(jax.tree.map(lambda *x: jnp.stack(x), *alike), step=jnp.int32(0))


def batch_of(seed, step):
    batch = make_batch(10 * seed + step)
    batch["weight"] = np.full((8,), np.nan if (seed, step) == (1, 1) else 1.0, np.float32)
    return batch


def loss_fn(model, batch, rngs):
    nll = -jax.nn.log_softmax(model(batch["tokens"]))[..., 0] * batch["weight"][:, None]
    return pj.Loss(nll=nll, mask=batch["mask"], group=batch["source"])


def test_each_seed_is_trained_and_measured_as_alone():
    """One seed meets a NaN: its guard skips, and the others learn on."""
    tx = make_sgd()
    alone = [
        make_state(model=Tiny(), tx=tx, plan=PLAN, loss_fn=loss_fn, batch=batch_of(0, 0), variables=variables(seed))
        for seed in range(SEEDS)
    ]
    states = stack(alone)
    axes = dataclasses.replace(jax.tree.map(lambda _: 0, states), step=None)
    step = jax.jit(jax.vmap(pj.monitored_train_step, in_axes=(axes, 0), out_axes=(axes, 0)))
    for number in range(2):
        batches = [batch_of(seed, number) for seed in range(SEEDS)]
        states, report = step(states, jax.tree.map(lambda *x: np.stack(x), *batches))
        assert states.step.shape == ()
        for seed in range(SEEDS):
            alone[seed], its = pj.monitored_train_step(alone[seed], batches[seed])
            mine = jax.tree.map(lambda x, seed=seed: x[seed], report)
            wanted, found = its.scalars(), mine.scalars()
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True), name
            assert found["alert/guard/skipped"] == float((seed, number) == (1, 1))
            jax.tree.map(
                lambda a, b, seed=seed: np.testing.assert_allclose(a[seed], b, rtol=1e-6, atol=1e-7),
                states.params,
                alone[seed].params,
            )


def variables(seed):
    return Tiny().init(jax.random.key(seed), make_batch()["tokens"])


def test_a_recorder_takes_one_seed(tmp_path):
    """The reports of all seeds are not the reports of so many steps."""
    state = make_state(model=Tiny(), plan=PLAN, loss_fn=loss_fn, batch=batch_of(0, 0))
    _, report = pj.monitored_train_step(state, batch_of(0, 0))
    together = jax.tree.map(lambda x: jnp.stack([x] * SEEDS), report)
    with pj.Recorder(tmp_path, PLAN) as recorder:
        recorder.record(together)
    assert (recorder.health.read, recorder.health.refused) == (1, SEEDS - 1)
    assert "replicas of pmap and vmap, take a Recorder each" in recorder.health.last_error


@pytest.mark.parametrize("transform", [jax.vmap, jax.jit])
def test_states_are_made_outside_of_transforms(transform):
    keys = jax.random.split(jax.random.key(0), SEEDS)
    keys = keys if transform is jax.vmap else keys[0]
    with pytest.raises(ValueError, match="called outside of jax.jit, vmap and shard_map; for a population"):
        transform(lambda key: make_state_of(key).params)(keys)


def make_state_of(key):
    return pj.TrainState.create(model=Tiny(), tx=make_sgd(), loss_fn=loss_fn, plan=PLAN, batch=batch_of(0, 0), rngs=key)
