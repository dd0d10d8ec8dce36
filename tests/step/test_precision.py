"""Kurtosis and what narrower formats lose: one value whatever the mesh, the scan, the microbatches, the framework."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import probes_jax as pj
from probes_jax.spec.summary import FORMATS
from tests.stats.test_formats import REFERENCE, lost_by_definition
from tests.stats.test_shape import by_definition
from tests.step.small import VOCAB, WIDTH, NNXModel, make_batch, make_sgd, make_state, only, plain_loss
from tests.step.test_mesh import OneBlock, mesh_of
from tests.step.test_shard_map import TX, Small, loss_fn, trained_step, under

pytestmark = pytest.mark.slow  # together; the second pair of Python and JAX goes without

PLAN = only("act", "grad_act", "grad", scan_every=1, precision=True)
WORDS = ("/kurtosis", "/underflow/", "/overflow/")


def whole_batch():
    """All tokens are valid: then a microbatch's loss is divided by as many as the whole one's."""
    return make_batch(batch=16, masked=False)


def precise(found):
    return {name: value for name, value in found.items() if any(word in name for word in WORDS)}


def report_of(batch, **kwargs):
    given = {"plan": PLAN, "model": OneBlock(), **kwargs}
    state = make_state(batch=batch, tx=make_sgd(), donate=False, **given)
    return state, *pj.monitored_train_step(state, batch)


def assert_close(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        # A count may move by an element whose last bit lies across a threshold.
        tolerance = dict(rel=2e-3, abs=2e-3) if name.endswith("kurtosis") else dict(abs=3e-3)
        assert found[name] == pytest.approx(value, **tolerance), name


def assert_of_tensor(found, prefix, x):
    x = np.asarray(x, np.float32)
    want = by_definition(x)
    assert found.get(f"{prefix}/kurtosis") == (None if want is None else pytest.approx(want, rel=1e-3, abs=1e-3))
    for name in FORMATS:
        under, over = lost_by_definition(x, REFERENCE[name])
        assert found[f"{prefix}/underflow/{name}"] == pytest.approx(under.mean(), abs=2e-3), (prefix, name)
        assert found[f"{prefix}/overflow/{name}"] == pytest.approx(over.mean(), abs=2e-3), (prefix, name)


@pytest.fixture(scope="module")
def trained():
    """The state before and after a step, and its report."""
    return report_of(whole_batch())


@pytest.fixture(scope="module")
def alone(trained):
    return precise(trained[2].scalars())


def test_activations_and_gradients_by_their_definition(trained, alone):
    batch, params = whole_batch(), trained[0].params
    _, inside = OneBlock().apply({"params": params}, batch["tokens"], capture_intermediates=True)
    for module, name in (("embed", "embed"), ("head", "head")):
        assert_of_tensor(alone, f"act/{name}", inside["intermediates"][module]["__call__"][0])
    up = inside["intermediates"]["block_0"]["up"]["__call__"][0]
    assert_of_tensor(alone, "act/block[0]/up", up)
    gradients, _ = jax.grad(plain_loss, has_aux=True)(params, batch, OneBlock())
    for path in (("embed", "embedding"), ("head", "bias"), ("block_0", "up", "kernel")):
        x = gradients
        for key in path:
            x = x[key]
        assert_of_tensor(alone, "grad/" + "/".join(path).replace("block_0", "block[0]"), x)
    assert {name.split("/")[0] for name in alone} == {"act", "grad_act", "grad"}
    assert any(alone[name] > 0 for name in alone if "underflow/e4m3" in name)


def test_microbatches_are_the_whole(alone):
    assert_close(precise(report_of(whole_batch(), microbatches=4)[2].scalars()), alone)


def test_a_loss_scale_shows_in_the_losses_of_gradients_of_activations_only(alone):
    """What the backward pass would lose it loses of what it computes, and that is scaled."""
    found = precise(report_of(whole_batch(), loss_scale=1024.0, microbatches=2)[2].scalars())
    scaled = {name for name in alone if name.startswith("grad_act") and "kurtosis" not in name}
    assert_close(
        {n: v for n, v in found.items() if n not in scaled}, {n: v for n, v in alone.items() if n not in scaled}
    )
    assert found["grad_act/head/underflow/e4m3"] < alone["grad_act/head/underflow/e4m3"]


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.tanh(nn.Dense(WIDTH, name="up")(x)), None


class Layers(nn.Module):
    scanned: bool

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, name="embed")(tokens)
        if self.scanned:
            x, _ = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)(name="layer")(
                x, None
            )
        else:
            for index in range(2):
                x, _ = Layer(name=f"layer_{index}")(x)
        return nn.Dense(VOCAB, name="head")(x)


def test_scanned_layers_are_the_unrolled_ones():
    batch = whole_batch()
    params = Layers(True).init(jax.random.key(0), batch["tokens"])["params"]
    unrolled = {f"layer_{i}": jax.tree.map(lambda x, i=i: x[i], params["layer"]) for i in range(2)}
    unrolled |= {name: x for name, x in params.items() if name != "layer"}
    both = [
        precise(report_of(batch, model=Layers(scanned), variables={"params": of}, microbatches=parts)[2].scalars())
        for scanned, of, parts in ((True, params, 2), (False, unrolled, 1))
    ]
    assert sum("layer[1]" in name for name in both[0]) > 20
    assert_close(*both)


def test_linen_and_nnx(trained, alone):
    params, module = trained[0].params, NNXModel(nnx.Rngs(1))
    module.block = nnx.List([module.block[0]])
    twins = [(module.embed, params["embed"]), (module.head, params["head"])]
    twins += [(getattr(module.block[0], name), params["block_0"][name]) for name in ("norm", "up", "down")]
    for layer, weights in twins:
        for name, value in weights.items():
            getattr(layer, name)[...] = value
    assert_close(precise(report_of(whole_batch(), model=module)[2].scalars()), alone)


@functools.cache
def reported_under(form, axes=()):
    model, batch = Small(), whole_batch()
    plan = only("act", "grad_act", "grad", scan_every=2, precision=True)
    params = jax.tree.map(np.array, model.init(jax.random.key(0), batch["tokens"])["params"])
    monitor = pj.Monitor.create(
        tx=TX, params=params, plan=plan, model=model, loss_fn=loss_fn, batch=batch, axis_names=axes
    )
    *_, report = under(form, 4, trained_step(scan=True), 3)((params, TX.init(params), monitor), batch)
    return {n: v for n, v in precise(report.scalars()).items() if "grad_act/place" not in n}


@pytest.mark.parametrize("form", ["shard_map", "pmap"])
def test_under_the_users_shard_map(form):
    assert_close(reported_under(form, ("data",)), reported_under("jit"))


def test_a_mean_far_from_zero_and_elements_that_are_not_finite():
    rng = np.random.default_rng(0)
    x = rng.standard_t(5, size=(16, 6, 4)).astype(np.float32)
    x[:8] += 2.0
    place = NamedSharding(mesh_of(data=8), PartitionSpec("data"))

    class Through(nn.Module):
        @nn.compact
        def __call__(self, x):
            far = pj.observe("far", x + 1e4)
            pj.observe("same", jnp.full_like(x, 0.1))
            pj.observe("hole", jnp.where(x == x.max(), jnp.nan, x))
            return nn.Dense(VOCAB, name="head")(far - 1e4)

    def loss(model, batch, rngs):
        return (model(batch["x"]) ** 2).mean()

    for batch in ({"x": x}, {"x": jax.device_put(x, place)}):
        state = pj.TrainState.create(
            model=pj.wrap(Through()),
            tx=make_sgd(),
            loss_fn=loss,
            plan=only("act", scan_every=1, precision=True),
            batch=batch,
            rngs=jax.random.key(0),
        )
        found = pj.monitored_train_step(state, batch)[1].scalars()
        assert found["act/far/kurtosis"] == pytest.approx(by_definition(x + np.float32(1e4)), rel=2e-3)
        assert "act/same/kurtosis" not in found
        assert found["act/same/underflow/e4m3"] == 0
        assert np.isnan(found["act/hole/kurtosis"])
        assert found["act/far/overflow/e4m3"] == 1
        assert found["act/far/overflow/bf16"] == 0


def test_without_it_nothing_is_measured_and_with_it_training_is_the_same(trained, alone):
    without = report_of(whole_batch(), plan=only("act", "grad_act", "grad", scan_every=1))
    assert alone and not precise(without[2].scalars())
    ends = [pj.monitored_train_step(state, whole_batch())[0].params for _, state, _ in (trained, without)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), *ends)


def test_inside_of_a_scan_over_steps_light_steps_have_none():
    batch = make_batch()
    state = make_state(OneBlock(), make_sgd(), only("act", "grad", scan_every=2, precision=True), donate=False)
    _, report = jax.jit(lambda s: jax.lax.scan(lambda s, _: pj.monitored_train_step(s, batch), s, length=2))(state)
    values = precise(report.scalars())
    assert values and all(value[0] is not None and value[1] is None for value in values.values())


def test_bfloat16_activations():
    class Narrow(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(VOCAB, WIDTH, name="embed", dtype=jnp.bfloat16)(tokens)
            return nn.Dense(VOCAB, name="head", dtype=jnp.bfloat16)(x).astype(jnp.float32)

    batch = make_batch()
    state, _, report = report_of(batch, model=Narrow(), plan=only("act", scan_every=1, precision=True))
    table = np.asarray(state.params["embed"]["embedding"]).astype(ml_dtypes.bfloat16)
    assert_of_tensor(report.scalars(), "act/embed", table[batch["tokens"]])
