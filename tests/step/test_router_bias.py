"""Bias terms of routers, for each expert: of parameters, of what the model carries, of what it hands over."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import probes_jax as pj
from probes_jax.spec.readings import decoder_of
from probes_jax.stats.partial import Split
from probes_jax.stats.per_token import NOTHING
from probes_jax.stats.routing import summarize_bias
from probes_jax.step.program import step_program
from tests.step.small import GROUPS, VOCAB, WIDTH, loss_fn, make_batch, make_state, make_tx

pytestmark = pytest.mark.slow  # together; the second pair of Python and JAX goes without

EXPERTS, LAYERS, TOP_K = 4, 2, 2
PLAN = pj.Plan(groups=GROUPS, top_k=TOP_K, backward=False)


class Router(nn.Module):
    """Scores, a trained bias, and one that balances without a gradient."""

    @nn.compact
    def __call__(self, x):
        scores = nn.sigmoid(nn.Dense(EXPERTS, use_bias=False, name="weights")(x))
        trained = self.param("bias", nn.initializers.normal(1.0), (EXPERTS,))
        own = self.variable("balance", "e_score_correction_bias", lambda: jnp.linspace(-1.0, 1.0, EXPERTS))
        out = scores + trained + own.value
        if self.is_mutable_collection("balance") and not self.is_initializing():
            own.value = own.value + 1.0
        return out


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        chosen = jax.lax.top_k(Router(name="router")(x), TOP_K)[1]
        gain = self.param("gain", nn.initializers.normal(1.0), (EXPERTS,))
        pj.observe_routing("handed", chosen, experts=EXPERTS, bias=2.0 * gain)
        pj.observe_routing("plain", chosen, experts=EXPERTS)
        return x + (jax.nn.one_hot(chosen, EXPERTS) * gain).sum((-1, -2))[..., None] * x, None


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0, "balance": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        x, _ = layers(name="block")(nn.Embed(VOCAB, WIDTH, name="embed")(tokens), None)
        return nn.Dense(VOCAB, name="head")(x)


def sharded():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "expert"))
    batch = {key: jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))) for key, x in make_batch().items()}

    def rule(path, shape):
        return PartitionSpec(None, "expert") if path[-1] == "bias" and "router" in path else PartitionSpec()

    return make_state(model=Model(), plan=PLAN, batch=batch, shardings=rule, microbatches=2, donate=False), batch


def test_every_term_is_the_array_that_the_step_used():
    """Scanned and checkpointed layers, a bias that the mesh cuts, two microbatches."""
    state, batch = sharded()
    _, report = pj.monitored_train_step(state, batch)
    found, params = report.scalars(), jax.device_get(state.params)["block"]
    carried = jax.device_get(state.model_state)["balance"]["block"]["router"]["e_score_correction_bias"]
    expected = {
        "router/bias/bias": params["router"]["bias"],
        "router/e_score_correction_bias/bias": carried,
        "handed/bias": 2.0 * np.asarray(params["gain"], np.float64),
    }
    for name, values in expected.items():
        for layer in range(LAYERS):
            of = [found[f"router/block[{layer}]/{name}/expert[{e}]"] for e in range(EXPERTS)]
            np.testing.assert_allclose(of, np.asarray(values, np.float64)[layer], rtol=1e-6)
    assert not [name for name in found if name.startswith("router/block[0]/plain/bias")]
    assert "pj.observe_routing(" in dict(report.coverage.missing)["router/block[1]/plain/bias"]
    assert "router/block[0]/router/bias" not in dict(report.coverage.missing)


@pytest.mark.parametrize("dims", [(), ((), ("a",)), (("b",), ("a",)), ((), ("a", "b")), (("a",), ("b",), ())])
def test_rows_of_a_cut_array_add_up_to_it(dims):
    rng = np.random.default_rng(0)
    bias = rng.normal(size=(4, 6, 8))
    bias[0, 0, 0], bias[1, 1, 1] = np.nan, NOTHING
    split = Split(dims, (("a", 2), ("b", 3 if dims[-1:] == (("b",),) else 2)))
    rows = summarize_bias(jnp.asarray(bias), split)
    assert rows.stack_shape() == bias.shape
    sums = np.asarray(rows.sums, np.float64).sum(axis=tuple(range(3, 3 + len(rows.axes))))
    total, weight = sums[..., 0], sums[..., 1]
    np.testing.assert_array_equal(weight, bias != NOTHING)
    np.testing.assert_allclose(total, np.where(bias == NOTHING, 0.0, bias), rtol=1e-6)


class Carried(nnx.Variable):
    """What an optimizer does not train."""


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.head = nnx.Embed(VOCAB, WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
        self.expert_bias = Carried(jnp.zeros(EXPERTS))
        self.up_bias = nnx.Param(jnp.zeros((EXPERTS, WIDTH)))

    def __call__(self, tokens):
        x = self.embed(tokens)
        chosen = jax.lax.top_k(self.router(x) + self.expert_bias[...], TOP_K)[1]
        return self.head(x + (jax.nn.one_hot(chosen, EXPERTS) @ self.up_bias[...]).sum(-2))


def test_beside_the_router_and_in_steps_that_scan_only():
    model, batch = NNXModel(nnx.Rngs(0)), make_batch()
    state = pj.TrainState.create(model=model, tx=make_tx(), loss_fn=loss_fn, plan=PLAN, batch=batch, abstract=True)
    found = {}
    for program in ("light", "full"):
        run = functools.partial(step_program, state.settings, program, np.int32(0))
        layout = jax.eval_shape(run, state.core, batch)[1].layout
        found[program] = [name for name in decoder_of(layout).names if name.startswith("router/") and "/bias/" in name]
    assert found == {"light": [], "full": [f"router/router/bias/expert[{e}]" for e in range(EXPERTS)]}


def test_a_bias_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"bias must have the shape \[4\], got \[3\]"):
        pj.observe_routing("a", jnp.zeros((2, 1), jnp.int32), experts=4, bias=jnp.zeros(3))


def test_two_arrays_of_one_name_in_a_router_and_beside_it():
    class Balanced(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(VOCAB, WIDTH, name="embed")(tokens)
            beside = self.variable("balance", "bias", jnp.zeros, (EXPERTS,)).value
            return nn.Dense(VOCAB, name="head")(
                x + (nn.Dense(EXPERTS, name="router")(x) + beside).sum(-1, keepdims=True)
            )

    batch = make_batch()
    state = make_state(model=Balanced(), plan=PLAN, batch=batch)
    run = functools.partial(step_program, state.settings, "full", np.int32(0))
    names = decoder_of(jax.eval_shape(run, state.core, batch)[1].layout).names
    assert {f"router/router/{own}/bias/expert[0]" for own in ("router/bias", "bias")} < set(names)
