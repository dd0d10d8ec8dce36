"""An nnx model with a transform of each kind, in the whole step: the same values on eight devices in microbatches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import probes_jax as pj
from tests.step.small import GROUPS, VOCAB, WIDTH, make_batch, make_sgd, make_state
from tests.step.test_mesh import count_collectives, mesh_of, replicated, shard


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + nnx.tanh(self.up(x))


def call(block, x):
    return block(x)


class Transformed(nnx.Module):
    """Stacked layers over split state, a block closed over, time steps with a cell in the carry, a jitted block."""

    def __init__(self, rngs, plain=False):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.stack = nnx.vmap(Layer)(rngs.split(2))
        self.closed, self.cell, self.jitted = (Layer(rngs) for _ in range(3))
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        graphdef, state = nnx.split(self.stack)
        x = jax.lax.scan(lambda x, state: (nnx.merge(graphdef, state)(x), None), x, state)[0]
        x = jax.checkpoint(self.closed)(x)
        steps = nnx.scan(lambda c, _: ((c[0], c[0](c[1])), None), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        x = steps((self.cell, x), jnp.zeros(2))[0][1]
        return self.head(nnx.jit(call)(self.jitted, x))


def run(model, batch, **settings):
    state = make_state(
        model=model(nnx.Rngs(0)), plan=pj.Plan(groups=GROUPS), tx=make_sgd(), batch=batch, donate=False, **settings
    )
    _, report = pj.monitored_train_step(state, batch)
    assert report.coverage.missing == ()
    return state, report.scalars()


def test_eight_devices_and_microbatches_give_the_same_for_two_collectives():
    _, alone = run(Transformed, make_batch(batch=16))
    batch = shard(make_batch(batch=16), mesh_of(data=8), "data")
    state, found = run(Transformed, batch, shardings=replicated, microbatches=2)
    for layer in ("stack[0]", "stack[1]", "closed", "cell", "jitted"):
        assert {f"act/{layer}/rms", f"grad_act/{layer}/up/abs_max", f"grad/{layer}/up/kernel/norm"} <= alone.keys()
    assert alone.keys() <= found.keys()
    for name, value in alone.items():
        if not name.startswith(("loss/shard", "loss/worst")):
            assert found[name] == pytest.approx(value, rel=3e-4, abs=1e-5), name
    assert 1 <= count_collectives(state, "full", batch) - count_collectives(state, "off", batch) <= 2
