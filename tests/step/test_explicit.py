"""Meshes with explicit axes, the default of `jax.make_mesh`: the same values, the same price, the types respected."""

from __future__ import annotations

import contextlib
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import probes_jax as pj
from probes_jax.spec.plan import MORE
from tests.step.small import GROUPS, LENGTH, VOCAB, WIDTH, make_batch, make_sgd, make_state, make_tx, only
from tests.step.test_mesh import count_collectives

P = PartitionSpec
PLANS = {
    "every family": pj.Plan(more=MORE, groups=GROUPS, scan_every=2),
    "few families": only("act", "grad_act", "grad", scan_every=2),
    "gradients": only("grad", "update", scan_every=2),
}


class Block(nn.Module):
    """Up by column, down by row; the sum over features must say where it lies."""

    lies: PartitionSpec | None

    @nn.compact
    def __call__(self, x, _=None):
        up = self.param("up", nn.initializers.normal(0.1), (WIDTH, 2 * WIDTH))
        down = self.param("down", nn.initializers.normal(0.1), (2 * WIDTH, WIDTH))
        y = jnp.einsum("blf,fw->blw", nn.gelu(nn.LayerNorm(name="norm")(x) @ up), down, out_sharding=self.lies)
        return x + y, None


class Model(nn.Module):
    lies: PartitionSpec | None = None
    scan: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Dense(WIDTH, use_bias=False, name="embed")(jax.nn.one_hot(tokens, VOCAB))
        if self.scan:
            layers = nn.scan(
                nn.remat(Block),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
                in_axes=nn.broadcast,
            )
            x, _ = layers(self.lies, name="block")(x, None)
        else:
            x, _ = Block(self.lies, name="block_0")(x)
        return nn.Dense(VOCAB, name="head")(x)


class NNXModel(nnx.Module):
    def __init__(self, lies, rngs):
        self.embed = nnx.Linear(VOCAB, WIDTH, use_bias=False, rngs=rngs)
        self.up = nnx.Param(0.1 * jax.random.normal(rngs.params(), (WIDTH, 2 * WIDTH)))
        self.down = nnx.Param(0.1 * jax.random.normal(rngs.params(), (2 * WIDTH, WIDTH)))
        self.lies = lies

    def __call__(self, tokens):
        x = self.embed(jax.nn.one_hot(tokens, VOCAB))
        y = jnp.einsum("blf,fw->blw", x @ self.up[...], self.down[...], out_sharding=self.lies)
        return (x + y) @ self.embed.kernel[...].T


def loss_fn(model, batch, rngs):
    logits = model(batch["tokens"])
    nll = optax.softmax_cross_entropy(logits, jax.nn.one_hot(batch["targets"], VOCAB))
    return pj.Loss(nll=nll, mask=batch["mask"], group=batch["source"])


def data_parallel(path, shape):
    return P()


def tensor_parallel(path, shape):
    lead = (None,) * (len(shape) - 2)
    return {"up": P(*lead, None, "model"), "down": P(*lead, "model", None)}.get(path[-1], P())


MODELS = {
    "linen": lambda lies: Model(lies),
    "linen scanned and rematerialized": lambda lies: Model(lies, scan=True),
    "nnx": lambda lies: NNXModel(lies, nnx.Rngs(0)),
}
MESHES = {
    "data": ((8,), ("data",), data_parallel, P("data")),
    "tensor": ((2, 4), ("data", "model"), tensor_parallel, P("data")),
    "context": ((4, 2), ("data", "seq"), data_parallel, P("data", "seq")),
}


def place(batch, mesh, spec):
    return {key: jax.device_put(x, NamedSharding(mesh, P(*spec[: x.ndim]))) for key, x in batch.items()}


def make(model, batch, plan="few families", **kwargs):
    return make_state(model, kwargs.pop("tx", make_sgd()), PLANS[plan], batch, loss_fn=loss_fn, **kwargs)


def run(model, batches, **kwargs):
    state, found = make(model, batches[0], **kwargs), []
    for batch in batches:
        state, report = pj.monitored_train_step(state, batch)
        found.append(report.scalars())
    return state, found


BATCHES = [make_batch(seed, batch=16) for seed in range(2)]  # a full step, and a light one


@functools.cache
def alone(model="linen", plan="few families"):
    return run(MODELS[model](None), BATCHES, plan=plan)[1]


def assert_same(alone, found):
    for one, many in zip(alone, found, strict=True):
        kept = {name for name in one if not name.startswith(("loss/shard", "loss/worst"))}
        assert kept <= many.keys()
        for name in kept:
            assert many[name] == pytest.approx(one[name], rel=3e-4, abs=1e-5), name


CASES = [
    ("linen scanned and rematerialized", "tensor", 1, "every family"),
    ("linen scanned and rematerialized", "context", 2, "every family"),
    ("nnx", "data", 2, "few families"),
    ("nnx", "tensor", 1, "few families"),
]


@pytest.mark.parametrize(("model", "where", "microbatches", "plan"), CASES)
def test_values_are_those_of_one_device_for_two_more_collectives(model, where, microbatches, plan):
    shape, names, rule, spec = MESHES[where]
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Explicit,) * len(names))
    with jax.set_mesh(mesh):
        placed = [place(batch, mesh, spec) for batch in BATCHES]
        given = dict(shardings=rule, microbatches=microbatches, plan=plan, donate=False)
        state, found = run(MODELS[model](spec), placed, **given)
        plain = count_collectives(state, "off", placed[0])
        assert plain > 0
        for program in ("light", "full"):  # those that gave the values
            assert 1 <= count_collectives(state, program, placed[0]) - plain <= 2, program
    assert_same(alone(model, plan), found)
    shards = [name for name in found[0] if name.startswith("loss/shard")]
    assert len(shards) == (8 if where != "tensor" else 2)
    assert all(x.sharding.mesh == mesh for x in jax.tree.leaves(state.core))


def test_a_caller_who_set_no_mesh():
    """The batch's own mesh is enough for a model that names no axis."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    _, found = run(Model(), [place(BATCHES[0], mesh, P("data"))], microbatches=2)
    assert_same(alone()[:1], found)


@pytest.mark.parametrize(
    ("types", "microbatches"), [((AxisType.Explicit, AxisType.Auto), 1), ((AxisType.Auto, AxisType.Explicit), 2)]
)
def test_a_mesh_with_explicit_and_automatic_axes(types, microbatches):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=types)
    with jax.set_mesh(mesh):
        rule = tensor_parallel if types[1] == AxisType.Auto else data_parallel
        placed = place(BATCHES[0], mesh, P("data"))
        _, found = run(Model(), [placed], shardings=rule, microbatches=microbatches)
    assert_same(alone()[:1], found)


@pytest.mark.parametrize("context", [True, False])
def test_an_outer_scan(context):
    """Both programs under one cond, and the state's types unchanged by a step."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh) if context else contextlib.nullcontext():
        state = make(Model(), place(BATCHES[0], mesh, P("data")), plan="gradients")
        stacked = {key: np.stack([batch[key] for batch in BATCHES]) for key in BATCHES[0]}
        stacked = {key: jax.device_put(x, NamedSharding(mesh, P(None, "data"))) for key, x in stacked.items()}
        _, reports = jax.jit(lambda s, b: jax.lax.scan(pj.monitored_train_step, s, b))(state, stacked)
    found = reports.scalars()
    for name in ("loss/mean", "grad/norm", "update/norm"):
        assert found[name] == pytest.approx([one[name] for one in alone(plan="gradients")], rel=1e-4), name


def test_a_guard_skips_exactly():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        batch = make_batch(batch=16)
        batch["mask"][3, 2] = np.inf
        batch = place(batch, mesh, P("data"))
        state = make_state(
            model=Model(),
            loss_fn=loss_fn,
            tx=make_tx(),
            batch=batch,
            plan=only(guard=pj.Guard()),
        )
        before = jax.tree.map(np.array, (state.params, state.opt_state))
        state, report = pj.monitored_train_step(state, batch)
    assert report.scalars()["alert/guard/skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, before, (state.params, state.opt_state))


def test_microbatches_smaller_than_the_mesh():
    """16 examples in 4 parts leave 4 on 8 devices: the parts cannot be cut along the mesh."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        placed = place(BATCHES[0], mesh, P("data"))
        state = make(Model(), placed, microbatches=4)
        _, report = pj.monitored_train_step(state, placed)
    assert_same(alone()[:1], [report.scalars()])
    assert "do not divide over the mesh axes ['data']" in dict(report.coverage.missing)["loss/shard"]


def test_training_is_unchanged(monkeypatch):
    shape, names, rule, spec = MESHES["tensor"]
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Explicit,) * len(names))
    found = []
    with jax.set_mesh(mesh):
        batches = [place(batch, mesh, spec) for batch in BATCHES]
        for switch in ("on", "off"):
            monkeypatch.setenv("PROBES_JAX", switch)
            state = make(Model(spec), batches[0], shardings=rule, tx=make_tx())
            for batch in batches:
                state, _ = pj.monitored_train_step(state, batch)
            found.append(jax.tree.map(np.array, state.params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), *found)


def test_a_loop_of_ones_own():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    host = BATCHES[0]
    tx, plan = make_sgd(), PLANS["few families"]
    with jax.set_mesh(mesh):
        batch = place(host, mesh, P("data"))
        params = jax.device_put(Model().init(jax.random.key(0), host["tokens"])["params"], NamedSharding(mesh, P()))
        monitor = pj.Monitor.create(tx=tx, params=params, plan=plan, model=Model(), loss_fn=loss_fn, batch=batch)

        @jax.jit
        def step(params, opt_state, monitor, batch):
            (_, part), gradients = monitor.value_and_grad(params, batch, jax.random.key(0), scan=True)
            updates, new_opt_state = tx.update(gradients, opt_state, params)
            new = optax.apply_updates(params, updates)
            monitor, report = monitor.measure(part, gradients, params, new, opt_state, new_opt_state)
            return new, new_opt_state, monitor, report

        *_, report = step(params, tx.init(params), monitor, batch)
        found = report.scalars()
        state = make(Model(), batch, variables={"params": params}, donate=False)
        _, expected = pj.monitored_train_step(state, batch)
    for name, value in expected.scalars().items():
        if name.startswith(("loss", "act", "grad")):
            assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


assert LENGTH % 2 == 0  # the context mesh cuts the length in two


class Dropped(nn.Module):
    """`nn.Dropout` makes its mask without a type: refused under `jax.set_mesh`."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Dense(WIDTH, name="embed")(jax.nn.one_hot(tokens, VOCAB))
        return nn.Dense(VOCAB, name="head")(nn.Dropout(0.5, deterministic=False)(x))


def test_a_layer_that_is_not_made_for_explicit_axes_says_what_to_do():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh), pytest.raises(Exception, match="select `which`") as caught:
        make(Dropped(), place(make_batch(batch=16), mesh, P("data")))
    assert any("AxisType.Auto" in note for note in caught.value.__notes__)
