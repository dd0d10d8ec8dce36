"""Points that a model or a loss function names itself."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import probes_jax as pj
from tests.observe.evaluate import backward_rows, evaluate, slow_statistics, start
from tests.observe.test_linen_scan import X

pytestmark = pytest.mark.slow  # together; the second pair of Python and JAX goes without

Q = {"q": 2.0, "k": 3.0}


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        y = nn.Dense(4, name="dense")(x)
        y = self._twice(pj.observe("attn/q_norm", y))
        return x + y, None

    def _twice(self, y):
        return pj.observe("twice", 2.0 * y)


class Linen(nn.Module):
    scan: bool = False

    @nn.compact
    def __call__(self, x):
        if self.scan:
            layers = nn.scan(nn.remat(Inner), {"params": 0}, split_rngs={"params": True}, length=2)
            return layers(name="layer")(x, None)[0]
        for index in range(2):
            x, _ = Inner(name=f"layer_{index}")(x)
        return x


class NNXInner(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        y = pj.observe("attn/q_norm", self.dense(x))
        return x + pj.observe("twice", 2.0 * y)


class NNX(nnx.Module):
    def __init__(self, rngs, run=lambda layer, x: layer(x)):
        self.layer = nnx.List([NNXInner(rngs) for _ in range(2)])
        self.run = run

    def __call__(self, x):
        for layer in self.layer:
            x = self.run(layer, x)
        return x


def loss_of(model, batch, rngs):
    return jnp.sum(jnp.square(model(batch)))


MODELS = {
    "linen": lambda: Linen(),
    "linen scanned and rematerialized": lambda: Linen(scan=True),
    "nnx": lambda: NNX(nnx.Rngs(0)),
    "nnx rematerialized": lambda: NNX(nnx.Rngs(0), nnx.remat(lambda layer, x: layer(x))),
}


@pytest.mark.parametrize("model", MODELS)
def test_a_named_value_is_a_point_below_its_module(model):
    binding, parts = start(MODELS[model](), loss_of, X)
    observed = evaluate(binding, loss_of, X, parts)
    _, _, backward = backward_rows(binding, loss_of, X, parts)
    for layer in range(2):
        dense = observed.rows[f"layer[{layer}]/dense"]
        named = observed.rows[f"layer[{layer}]/attn/q_norm"]
        assert named == pytest.approx(dense)
        twice = observed.rows[f"layer[{layer}]/twice"]
        assert twice["abs_max"] == pytest.approx(2 * named["abs_max"])
        gradient = {name: backward[f"layer[{layer}]/{name}"]["abs_max"] for name in ("dense", "attn/q_norm", "twice")}
        assert gradient["dense"] == pytest.approx(gradient["attn/q_norm"])
        assert gradient["dense"] == pytest.approx(2 * gradient["twice"])
    assert backward.keys() == observed.rows.keys()


def test_a_value_named_twice_and_a_tree_of_values():
    class Root(nn.Module):
        @nn.compact
        def __call__(self, x):
            for value in (x, 2.0 * x):
                value = pj.observe("x", value)
            heads = pj.observe("heads", {"q": 2.0 * x, "k": 3.0 * x, "ids": jnp.arange(3)})
            return nn.Dense(2, name="dense")(heads["q"] + heads["k"] + value)

    binding, parts = start(Root(), loss_of, X)
    rows = evaluate(binding, loss_of, X, parts).rows
    for name, factor in (("x", 1.0), ("x#1", 2.0), ("heads:q", Q["q"]), ("heads:k", Q["k"])):
        assert rows[name] == pytest.approx(slow_statistics(factor * X), rel=1e-5)


def test_outside_of_a_monitored_step_it_is_the_value_itself():
    x = jnp.ones(3)
    assert pj.observe("x", x) is x
    variables = Linen().init(jax.random.key(0), X)
    assert list(variables) == ["params"]
    jaxpr = str(jax.make_jaxpr(lambda v: Linen().apply(v, X))(variables))
    assert "custom_vjp" not in jaxpr


@pytest.mark.parametrize("name", ["", "/", "a//b", 3, None])
def test_a_name_without_words_is_refused(name):
    with pytest.raises(ValueError, match="observe name must be words"):
        pj.observe(name, 1.0)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_in_the_loss_function(microbatches):
    from tests.step.small import make_batch, make_state

    def loss_fn(model, batch, rngs):
        z = pj.observe("z", model(batch["tokens"])[..., 0])
        z = jax.checkpoint(lambda z: pj.observe("inside", z))(z)
        jax.jit(lambda z: pj.observe("hidden", z))(z)
        return pj.Loss(nll=z**2)

    state = make_state(loss_fn=loss_fn, plan=pj.Plan(scan_every=2), microbatches=microbatches, donate=False)
    after, report = pj.monitored_train_step(state, make_batch())
    found = report.scalars()
    assert found["act/loss_fn/z/mean_square"] == pytest.approx(found["loss/mean"], rel=1e-5)
    # d mean(z^2) / dz = 2 z / n
    n = make_batch()["tokens"].size
    assert found["grad_act/loss_fn/z/rms"] == pytest.approx(2 * found["act/loss_fn/z/rms"] / n, rel=1e-5)
    for statistic in ("act/{}/mean_square", "grad_act/{}/rms"):
        z, inside = (found[statistic.format(f"loss_fn/{name}")] for name in ("z", "inside"))
        assert inside == pytest.approx(z, rel=1e-6)
    assert dict(report.coverage.missing)["loss_fn/hidden"].startswith("inside jax.jit in loss_fn")
    _, light = pj.monitored_train_step(after, make_batch())
    assert not [name for name in light.scalars() if name.startswith("act/")]
    assert np.isfinite(light.scalars()["loss/mean"])
