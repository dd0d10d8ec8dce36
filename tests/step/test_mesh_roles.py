"""Every role a mesh axis can have, on meshes of one to three axes: the values of one device, at two collectives."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import probes_jax as pj
from probes_jax.cost.hlo import parse
from probes_jax.cost.traffic import collectives, more
from probes_jax.step.train import compiled
from tests.step.small import GROUPS, make_sgd
from tests.step.test_mesh import mesh_of

BATCH, LENGTH, WIDTH, LAYERS, EXPERTS, VOCABULARY = 24, 16, 32, 4, 8, 64


def lay(x, mesh, *spec):
    """As users say how an activation lies; axes that the mesh does not have are dropped."""
    if mesh is None:
        return x
    known = [tuple(a for a in group if a in mesh.shape) or None for group in spec]
    fits = [
        group if group and size % np.prod([mesh.shape[a] for a in group]) == 0 else None
        for group, size in zip(known, x.shape)
    ]
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*fits)))


ROWS, COLUMNS = ("data", "fsdp"), ("seq",)


class Experts(nn.Module):
    """Every expert sees every token; a router weighs them. The experts' outputs are a point, one axis of it experts."""

    mesh: Mesh | None

    @nn.compact
    def __call__(self, x_BxTxD):
        init = nn.initializers.lecun_normal()
        up = self.param("up", init, (EXPERTS, WIDTH, 2 * WIDTH))
        down = self.param("down", init, (EXPERTS, 2 * WIDTH, WIDTH))
        weight_BxTxE = nn.softmax(lay(nn.Dense(EXPERTS, name="router")(x_BxTxD), self.mesh, ROWS, COLUMNS, ()))
        h_ExBxTxF = jnp.tanh(jnp.einsum("btd,edf->ebtf", x_BxTxD, up))
        h_ExBxTxF = lay(h_ExBxTxF, self.mesh, ("expert",), ROWS, COLUMNS, ("model",))
        out_ExBxTxD = jnp.einsum("ebtf,efd->ebtd", h_ExBxTxF, down)
        out_ExBxTxD = pj.observe("each", lay(out_ExBxTxD, self.mesh, ("expert",), ROWS, COLUMNS, ()))
        return lay(jnp.einsum("ebtd,bte->btd", out_ExBxTxD, weight_BxTxE), self.mesh, ROWS, COLUMNS, ())


class Block(nn.Module):
    mesh: Mesh | None

    @nn.compact
    def __call__(self, x_BxTxD, _):
        h = lay(nn.RMSNorm(name="norm")(x_BxTxD), self.mesh, ROWS, COLUMNS, ())
        h = lay(nn.Dense(4 * WIDTH, name="up")(h), self.mesh, ROWS, COLUMNS, ("model",))
        h = lay(nn.Dense(WIDTH, name="down")(nn.gelu(h)), self.mesh, ROWS, COLUMNS, ())
        return lay(x_BxTxD + h + Experts(self.mesh, name="experts")(h), self.mesh, ROWS, COLUMNS, ()), None


class Model(nn.Module):
    mesh: Mesh | None = None

    @nn.compact
    def __call__(self, tokens_BxT):
        x_BxTxD = lay(nn.Embed(VOCABULARY, WIDTH, name="embed")(tokens_BxT), self.mesh, ROWS, COLUMNS, ())
        stack = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        x_BxTxD, _ = stack(self.mesh, name="blocks")(x_BxTxD, None)
        logits = nn.Dense(VOCABULARY, use_bias=False, name="head")(x_BxTxD)
        return lay(logits, self.mesh, ROWS, COLUMNS, ("model",))


def loss_fn(model, batch, rngs):
    logits = model(batch["tokens"])
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1)[..., 0]
    return pj.Loss(nll=nll, mask=batch["mask"], group=batch["source"])


def make_batch(seed=0):
    rng = np.random.default_rng(seed)
    mask = rng.choice([0.0, 1.0], (BATCH, LENGTH), p=[0.3, 0.7]).astype(np.float32)
    mask[:3] = 0.0  # of eight token shards one is empty
    return {
        "tokens": rng.integers(0, VOCABULARY, (BATCH, LENGTH)).astype(np.int32),
        "targets": rng.integers(0, VOCABULARY, (BATCH, LENGTH)).astype(np.int32),
        "mask": mask,
        "source": rng.integers(0, len(GROUPS), BATCH).astype(np.int32),
    }


# What each axis shards, by name: of a parameter [.., layer, expert, in, out], or of the batch.
MESHES = [
    {"data": 8},
    {"model": 8},
    {"expert": 8},
    {"seq": 8},
    {"fsdp": 4, "seq": 2},
    {"data": 2, "seq": 2, "model": 2},
    {"fsdp": 2, "expert": 2, "model": 2},
    {"data": 2, "pipe": 2, "model": 2},
]
# Those of three axes have every role; the others are run once, not with each pair of Python and JAX.
CASES = [pytest.param(mesh, id="x".join(mesh), marks=() if len(mesh) == 3 else pytest.mark.slow) for mesh in MESHES]


def rule_of(mesh):
    """Where the axes of this mesh cut a parameter."""

    def known(axis):
        return axis if axis in mesh else None

    def rule(path, shape):
        spec: list[str | None] = [None] * len(shape)
        if "blocks" in path:
            spec[0] = known("pipe")
        if "experts" in path and path[-1] in ("up", "down"):
            spec[1] = known("expert")
        if len(shape) - ("blocks" in path) > 1:
            first, last = ("model", "fsdp") if "down" in path else ("fsdp", "model")
            spec[-2], spec[-1] = known(first), known(last)
        return PartitionSpec(*(axis if axis and size % mesh[axis] == 0 else None for axis, size in zip(spec, shape)))

    return rule


def placed(batch, mesh):
    rows = tuple(axis for axis in ("data", "fsdp") if axis in mesh.shape) or None
    columns = "seq" if "seq" in mesh.shape else None
    spec = {1: PartitionSpec(rows), 2: PartitionSpec(rows, columns)}
    return {key: jax.device_put(x, NamedSharding(mesh, spec[x.ndim])) for key, x in batch.items()}


def make_state(batch, mesh=None, **kwargs):
    return pj.TrainState.create(
        model=Model(mesh),
        tx=make_sgd(),
        loss_fn=loss_fn,
        plan=pj.Plan(groups=GROUPS, scan_every=1),
        batch=batch,
        **kwargs,
    )


@pytest.fixture(scope="module")
def alone():
    return report_of(make_state(make_batch()), make_batch())


def exchanges_of(state, batch, program):
    """Those of the very program that the next step runs: it is traced and compiled once."""
    lowered = compiled(state.settings, program).lower(np.int32(0), state.core, batch)
    return tuple(collectives(parse(lowered.compile().as_text())))


def report_of(state, batch):
    return pj.monitored_train_step(state, batch)[1].scalars()


@pytest.mark.parametrize("axes", CASES)
def test_values_are_those_of_one_device_at_two_collectives_outside_of_loops(axes, alone):
    mesh = mesh_of(**axes)
    batch = placed(make_batch(), mesh)
    state = make_state(batch, mesh, shardings=rule_of(axes), donate=False)
    plain = exchanges_of(state, batch, "off")
    for program in ("light", "full") if len(axes) == 3 else ("full",):
        found = exchanges_of(state, batch, program)
        assert sum(x.times for x in found) - sum(x.times for x in plain) == 2, more(found, plain)
        assert sum(x.looped for x in found) == sum(x.looped for x in plain), more(found, plain)
    found = report_of(state, batch)
    shards = int(np.prod([size for axis, size in axes.items() if axis in ("data", "fsdp", "seq")]))
    own = ("loss/shard", "loss/worst", "replica/")  # one device has no others
    names = {name for name in alone if not name.startswith(own)}
    assert names == {name for name in found if not name.startswith(own)}
    for name in names:
        assert found[name] == pytest.approx(alone[name], rel=1e-3, abs=1e-5), name
    seen = {name for name in found if name.startswith("loss/shard")}
    every = {f"loss/shard[{index}]" for index in range(shards)}
    assert seen <= every
    assert every - seen == ({"loss/shard[0]"} if shards == 8 and "seq" not in axes else set())  # it has no valid token
