"""A small language model in linen and nnx, a batch, and a plain train loop written without the library."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import probes_jax as pj
from probes_jax.spec.plan import FAMILIES, MORE

VOCAB, WIDTH, BATCH, LENGTH = 16, 8, 8, 6


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(name="norm")(x)
        y = nn.Dense(2 * WIDTH, name="up")(y)
        return x + nn.Dense(WIDTH, name="down")(nn.gelu(y))


class Model(nn.Module):
    dropout: float = 0.0

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, name="embed")(tokens)
        x = nn.Dropout(self.dropout, deterministic=self.dropout == 0.0)(x)
        for index in range(2):
            x = Block(name=f"block_{index}")(x)
        return nn.Dense(VOCAB, name="head")(x)


class Layers(nn.Module):
    """The model with its blocks scanned, or one after the other, under the names of the other."""

    scan: bool
    layers: int = 3

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, name="embed")(tokens)
        if self.scan:
            body = nn.scan(
                lambda module, x, _: (module(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.layers,
            )
            x, _ = body(Block(name="block"), x, None)
        else:
            for index in range(self.layers):
                x = Block(name=f"block_{index}")(x)
        return nn.Dense(VOCAB, name="head")(x)


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.block = nnx.List([NNXBlock(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.block:
            x = block(x)
        return self.head(x)


GROUPS = ("code", "docs")


def make_batch(seed=0, batch=BATCH, length=LENGTH, masked=True):
    rng = np.random.default_rng(seed)
    mask = np.ones((batch, length), np.float32)
    if masked:
        mask[rng.random((batch, length)) < 0.3] = 0.0
    return {
        "tokens": rng.integers(0, VOCAB, (batch, length)).astype(np.int32),
        "targets": rng.integers(0, VOCAB, (batch, length)).astype(np.int32),
        "mask": mask,
        "source": rng.integers(0, 3, (batch,)).astype(np.int32),  # id 2 is unknown: "other"
    }


def loss_fn(model, batch, rngs):
    logits = model(batch["tokens"])
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return pj.Loss(nll=nll, mask=batch["mask"], group=batch["source"])


def make_tx(lr=1e-2, clip=0.5):
    return pj.chain(
        ("clip", optax.clip_by_global_norm(clip)),
        ("adam", optax.scale_by_adam(b2=0.95)),
        ("decay", optax.add_decayed_weights(0.1)),
        ("lr", optax.scale_by_learning_rate(lr)),
    )


def make_sgd():
    """For comparing two programs over several steps: Adam turns a last bit of a tiny gradient into a whole update."""
    return pj.chain(("clip", optax.clip_by_global_norm(0.5)), ("lr", optax.scale_by_learning_rate(0.1)))


def only(*families, groups=GROUPS, without=(), **settings):
    """A plan of these families and no others: a test compiles what it is about."""
    rest = tuple(family for family in FAMILIES if family not in (*families, *MORE))
    more = tuple(family for family in families if family in MORE)
    return pj.Plan(groups=groups, more=more, without=(*rest, *without), **settings)


def make_state(model=None, tx=None, plan=None, batch=None, **kwargs):
    plan = only() if plan is None else plan
    return pj.TrainState.create(
        model=pj.wrap(Model() if model is None else model),
        tx=make_tx() if tx is None else tx,
        loss_fn=kwargs.pop("loss_fn", loss_fn),
        plan=plan,
        batch=make_batch() if batch is None else batch,
        rngs=jax.random.key(0),
        **kwargs,
    )


def plain_loss(params, batch, model=None):
    """Mean loss by the definition, and the logits, of the linen model."""
    logits = (Model() if model is None else model).apply({"params": params}, batch["tokens"])
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return (nll * batch["mask"]).sum() / batch["mask"].sum(), (nll, logits)


@functools.partial(jax.jit, static_argnames="tx")
def plain_step(params, opt_state, batch, tx):
    """One train step without the library."""
    (_, (nll, logits)), gradients = jax.value_and_grad(plain_loss, has_aux=True)(params, batch)
    updates, opt_state = tx.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, gradients, nll, logits


def norm64(*arrays):
    return float(np.sqrt(sum(np.sum(np.asarray(x, np.float64) ** 2) for x in arrays)))


def copy(tree):
    return jax.tree.map(lambda x: jnp.array(x, copy=True), tree)
