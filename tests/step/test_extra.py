"""How much of a model each extra term of the loss trains: found when the state is made, from shapes alone."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import probes_jax as pj
from probes_jax.step.program import step_program
from tests.step.small import VOCAB, WIDTH, make_batch, make_tx

pytestmark = pytest.mark.slow  # together; the second pair of Python and JAX goes without

EXPERTS, LAYERS = 4, 3


def balance_of(gate):
    """Switch-style: share of the tokens, which has no gradient, times the mean probability."""
    share = jax.nn.one_hot(gate.argmax(-1), EXPERTS).mean((0, 1))
    return EXPERTS * (share * gate.mean((0, 1))).sum()


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        gate = jax.nn.softmax(nn.Dense(EXPERTS, use_bias=False, name="router")(x))
        up = self.param("up", nn.initializers.lecun_normal(), (EXPERTS, WIDTH, WIDTH))
        x = x + jnp.einsum("...d,edf,...e->...f", x, up, gate)
        return x, (balance_of(gate), jax.lax.stop_gradient(balance_of(gate)))


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        layers = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        x, losses = layers(name="block")(nn.Embed(VOCAB, WIDTH, name="embed")(tokens), None)
        return nn.Dense(VOCAB, name="head")(x), losses


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.head = nnx.Embed(VOCAB, WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
        self.up = nnx.Param(jnp.ones((EXPERTS, WIDTH, WIDTH)))

    def __call__(self, tokens):
        x = self.embed(tokens)
        gate = jax.nn.softmax(self.router(x))
        x = x + jnp.einsum("...d,edf,...e->...f", x, self.up[...], gate)
        return self.head(x), (balance_of(gate), jax.lax.stop_gradient(balance_of(gate)))


def loss_fn(model, batch, rngs):
    logits, (balance, logged) = model(batch["tokens"])
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    extra = {"balance": balance.sum(), "logged": logged.sum(), "z": (logits**2).mean()}
    return pj.Loss(nll=nll, mask=batch["mask"], extra=extra)


def make(model=None, batch=None, **kwargs):
    model = Model() if model is None else model
    batch = make_batch() if batch is None else batch
    return pj.TrainState.create(model=model, tx=make_tx(), loss_fn=loss_fn, batch=batch, abstract=True, **kwargs)


@functools.cache
def linen():
    return make()


def share_without(state, *names):
    """Share of the elements that lie in none of these."""
    sizes = {jax.tree_util.keystr(path): x.size for path, x in jax.tree_util.tree_leaves_with_path(state.params)}
    reached = sum(size for path, size in sizes.items() if not any(f"'{name}'" in path for name in names))
    return reached / sum(sizes.values())


@pytest.mark.parametrize(("kind", "untouched"), [("linen", ("head",)), ("nnx", ("head", "up"))])
def test_a_logged_term_that_trains_nothing_is_named(kind, untouched):
    """L058: the auxiliary loss is computed and logged, and detached: it reaches 0 of the routers and of all."""
    state = linen() if kind == "linen" else make(NNXModel(nnx.Rngs(0)))  # one layer: nothing routes what `up` made
    reach = state.settings.reach
    assert reach["loss/extra/logged/reach"] == 0 and reach["loss/extra/logged/router_reach"] == 0
    assert reach["loss/extra/balance/router_reach"] == 1
    assert reach["loss/extra/balance/reach"] == pytest.approx(share_without(state, *untouched))
    assert reach["loss/extra/z/reach"] == 1 and reach["loss/extra/z/router_reach"] == 1
    (line,) = state.settings.warnings
    assert line.startswith("loss/extra/logged trains nothing") and "pj.Loss(aux=...)" in line


def test_both_programs_report_it_from_the_first_step():
    state = linen()
    for program in ("light", "full"):
        run = functools.partial(step_program, state.settings, program, np.int32(0))
        report = jax.eval_shape(run, state.core, make_batch())[1]
        names = {entry.key for entry in report.layout.entries}
        assert names >= state.settings.reach.keys()
        assert report.coverage.warnings == state.settings.warnings


def test_it_does_not_depend_on_devices_microbatches_or_what_is_frozen():
    """L058: the same on eight devices; of frozen parameters nothing is trained, so they do not count."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    sharded = {
        key: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec("data")))
        for key, x in make_batch().items()
    }
    many = make(batch=sharded, microbatches=2)
    assert many.settings.reach == linen().settings.reach
    head = make(wrt="^head")
    assert head.settings.reach["loss/extra/balance/reach"] == 0 and head.settings.reach["loss/extra/z/reach"] == 1
    assert "loss/extra/balance/router_reach" not in head.settings.reach  # no router is trained
    assert len(head.settings.warnings) == 2
