"""Gates that a model names: how much of them is shut, of each layer, over the valid tokens."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import probes_jax as pj
from probes_jax.spec.catalog.residual import THETAS
from tests.step.small import GROUPS, VOCAB, WIDTH, loss_fn, make_batch, make_state

pytestmark = pytest.mark.slow  # together; the second pair of Python and JAX goes without

PLAN = pj.Plan(groups=GROUPS, more=("residual",), without=("act", "grad_act", "grad", "param", "update", "logits"))
TEMPERATURE = 0.5


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        gate = nn.Dense(WIDTH, bias_init=nn.initializers.constant(-0.7), name="gate")(x)
        pj.observe_gate("valve", gate, temperature=TEMPERATURE)
        return x + nn.sigmoid(gate / TEMPERATURE) * nn.Dense(WIDTH, name="mlp")(x)


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, name="embed")(tokens)
        body = nn.scan(
            nn.remat(lambda block, x, _: (block(x), None), prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )
        x, _ = body(Block(name="block"), x, None)
        return nn.Dense(VOCAB, name="head")(x)


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.head = nnx.Embed(VOCAB, WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        self.gate, self.mlp = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        gate = self.gate(x) - 1.0
        pj.observe_gate("valve", gate)
        return self.head(x + nnx.sigmoid(gate) * self.mlp(x))


def check(scalars, path, beta, valid):
    for theta in THETAS:
        shares = (beta < theta).mean(axis=-1)[valid]
        get = lambda stat, theta=theta: scalars[f"residual/{path}/valve/saturation/{theta}/{stat}"]  # noqa: E731
        assert get("mean") == pytest.approx(shares.mean(), rel=1e-5)
        assert get("max") == pytest.approx(shares.max(), rel=1e-5)
        assert get("p50") == pytest.approx(np.sort(shares)[-(-shares.size // 2) - 1], rel=0.011, abs=2e-6)


def test_every_layer_of_a_scanned_linen_model_in_steps_that_scan():
    batch = make_batch()
    state = make_state(model=Model(), plan=PLAN)
    params = jax.tree.map(np.array, state.params)
    state, full = pj.monitored_train_step(state, batch)
    x = params["embed"]["embedding"][batch["tokens"]]
    for layer in range(2):
        own = jax.tree.map(lambda p, i=layer: p[i], params["block"])
        gate, branch = (x @ own[name]["kernel"] + own[name]["bias"] for name in ("gate", "mlp"))
        beta = 1 / (1 + np.exp(-gate / TEMPERATURE))
        assert 0.02 < (beta < 0.25).mean() < 0.98
        check(full.scalars(), f"block[{layer}]", beta, batch["mask"] > 0)
        x = x + beta * branch
    _, light = pj.monitored_train_step(state, batch)
    assert not [name for name in light.scalars() if "saturation" in name]


def test_an_nnx_model_and_a_plan_without():
    batch, model = make_batch(), NNXModel(nnx.Rngs(0))
    _, report = pj.monitored_train_step(make_state(model=model, plan=PLAN), batch)
    gate = np.asarray(model.gate(model.embed(batch["tokens"])) - 1.0)
    assert "residual/valve/saturation/0.1/mean" in report.scalars()
    for theta in THETAS:
        shares = (1 / (1 + np.exp(-gate)) < theta).mean(axis=-1)[batch["mask"] > 0]
        assert report.scalars()[f"residual/valve/saturation/{theta}/mean"] == pytest.approx(shares.mean(), rel=1e-5)
    other = make_state(model=model, plan=pj.Plan(groups=GROUPS, without=PLAN.without))
    assert not [name for name in pj.monitored_train_step(other, batch)[1].scalars() if "saturation" in name]


@pytest.mark.parametrize("more", [("residual",), ()])
def test_what_loss_fn_names_for_a_model_is_missing_by_name(more):
    def gated(model, batch, rngs):
        pj.observe_gate("valve", jnp.zeros((2, 3)))
        pj.observe_routing("choice", jnp.zeros((2, 1), jnp.int32), experts=2)
        return loss_fn(model, batch, rngs)

    plan = dataclasses.replace(PLAN, more=more, without=PLAN.without[1:])
    _, report = pj.monitored_train_step(make_state(plan=plan, loss_fn=gated), make_batch())
    missing = dict(report.coverage.missing)
    assert "pj.observe_routing" in missing["router/loss_fn/choice"]
    assert ("pj.observe_gate" in missing.get("residual/loss_fn/valve", "")) == bool(more)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(name="", gate=jnp.zeros((2, 1))), "name"),
        (dict(name="a", gate=jnp.zeros(2)), "broadcast_to"),
        (dict(name="a", gate=jnp.zeros((2, 3), jnp.int32)), "float"),
        (dict(name="a", gate=jnp.zeros((2, 3)), temperature=0.0), "temperature"),
    ],
)
def test_a_gate_that_cannot_be_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        pj.observe_gate(**arguments)
