"""Every name that a step reports has an entry in the registry."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import probes_jax as pj
from probes_jax.spec.catalog import REGISTRY
from probes_jax.spec.plan import MORE
from probes_jax.spec.readings import decoder_of
from probes_jax.step.program import step_program
from tests.step import test_modality
from tests.step.small import GROUPS, Model, make_batch, make_state
from tests.step.test_experts import Moe
from tests.step.test_mesh import mesh_of, replicated, shard

HOST_MADE = ("sys/",)


def reported_names() -> set[str]:
    """All names of both programs of a run that uses everything, measured or absent."""

    def loss_fn(model, batch, rngs):
        logits = model(batch["tokens"])
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return pj.Loss(nll=nll, mask=batch["mask"], group=batch["source"], extra={"z": (logits**2).mean()})

    def labels(params):
        return {name: "a" if name == "head" else "b" for name in params}

    plan = pj.Plan(more=MORE, groups=GROUPS, guard=pj.Guard(), precision=True, stages=True)
    tx = pj.chain(
        ("clip", optax.clip_by_global_norm(1.0)),
        ("sgd", optax.masked(optax.set_to_zero(), lambda params: {k: k == "head" for k in params})),
        ("lr", optax.partition({name: pj.chain(("lr", optax.scale_by_learning_rate(0.1))) for name in "ab"}, labels)),
    )
    state = make_state(plan=plan, tx=tx, loss_fn=loss_fn, loss_scale="dynamic")
    rates = {
        label: pj.chain(("adam", optax.scale_by_adam()), ("lr", optax.scale_by_learning_rate(rate)))
        for label, rate in (("top", 0.1), ("rest", 0.01))
    }
    groups = optax.multi_transform(rates, lambda params: {k: "top" if k == "head" else "rest" for k in params})
    names = names_of(state, "full", make_batch()) | names_of(state, "light", make_batch())
    names |= names_of(make_state(tx=groups, plan=plan, microbatches=2), "full", make_batch())
    names |= names_of_modalities()
    names |= names_of_full(WithExperts(), pj.Plan(more=MORE, top_k=2, expert_shards=2, precision=True), make_batch())
    batch = shard(make_batch(), mesh_of(data=2), "data")
    return names | names_of_full(Model(), pj.Plan(more=MORE), batch, shardings=replicated)


def names_of(state, program, batch) -> set[str]:
    """All names of a program, without compiling it."""
    run = functools.partial(step_program, state.settings, program, np.int32(0))
    return set(decoder_of(jax.eval_shape(run, state.core, batch)[1].layout).names)


class WithExperts(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(16, 8)(tokens)
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        pj.observe_gate("gate", x)
        pj.observe_routing("first", jnp.zeros((*tokens.shape, 1), int), experts=4, bias=jnp.zeros(4))
        return Moe(name="moe")(x)


def names_of_modalities() -> set[str]:
    batch = test_modality.make_batch()
    options = dict(plan=test_modality.PLAN, batch=batch, loss_fn=test_modality.loss_fn)
    return names_of(make_state(model=test_modality.Model(), **options), "full", batch)


def names_of_full(model, plan, batch, **kwargs) -> set[str]:
    def loss_fn(model, batch, rngs):
        out = model(batch["tokens"])
        return pj.Loss(nll=out.mean(-1), extra={"z": (out**2).mean()})

    return names_of(make_state(model=model, plan=plan, loss_fn=loss_fn, batch=batch, **kwargs), "full", batch)


def test_every_reported_name_is_registered_and_every_entry_is_reported():
    names = reported_names()
    assert [name for name in names if REGISTRY.find(name) is None] == []
    used = {REGISTRY[name].name for name in names}
    unused = [spec.name for spec in REGISTRY if spec.name not in used and not spec.name.startswith(HOST_MADE)]
    assert unused == []
