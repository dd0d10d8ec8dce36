"""A monitored step whose model or loss calls `shard_map` itself: trained as without probes, what is inside is named."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import probes_jax as pj
from tests.step.small import GROUPS, VOCAB, copy, loss_fn, make_batch, make_sgd, make_state

MESH = Mesh(np.array(jax.devices()[:4]), ("data",))
PLAN = pj.Plan(groups=GROUPS, backward=False)


def cut(f, check_vma=True):
    return jax.shard_map(f, mesh=MESH, in_specs=P("data"), out_specs=P("data"), check_vma=check_vma)


def attend(x):
    """As context-parallel attention does: every device sees all keys."""
    keys = pj.observe("keys", jax.lax.all_gather(x, "data", tiled=True))
    return x + 0.1 * jnp.einsum("bld,cld->bld", x, keys)


class Linen(nn.Module):
    kind: str

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, 4, name="embed")(tokens)
        inner = nn.Dense(4, name="inner")
        if self.kind == "function":
            x = inner(pj.observe("mixed", cut(attend)(x)))
        elif self.kind == "collective":  # under automatic sharding, with a value whose layout the model says
            x = inner(jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P("data")))) - x.mean(0)
        elif self.is_initializing() or self.kind == "plain":
            x = inner(x)
        else:
            x = cut(lambda x: x + jax.lax.pmean(inner(x), "data"), check_vma=self.kind == "module")(x)
        return nn.Dense(VOCAB, name="head")(x)


class NNX(nnx.Module):
    def __init__(self, kind, rngs):
        self.kind = kind
        self.embed = nnx.Embed(VOCAB, 4, rngs=rngs)
        self.inner = nnx.Linear(4, 4, rngs=rngs)
        self.head = nnx.Linear(4, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        if self.kind == "closure":
            return self.head(cut(lambda x: self.inner(x))(x))
        graph, state = nnx.split(self.inner)
        inside = jax.shard_map(
            lambda s, x: nnx.merge(graph, s)(x), mesh=MESH, in_specs=(P(), P("data")), out_specs=P("data")
        )
        return self.head(inside(state, x))


def whole(model, batch, rngs):
    """The whole model inside."""
    logits = cut(lambda tokens: pj.observe("z", model(tokens)))(batch["tokens"])
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return pj.Loss(nll=nll, mask=batch["mask"], group=batch["source"], logits=logits)


TRANSFORM = "inside jax.shard_map"
CASES = {
    "a function, linen": (Linen("function"), loss_fn, {"keys": "observe what jax.shard_map returns"}, "mixed"),
    "a module, linen": (Linen("module"), loss_fn, {"inner": "jax.shard_map"}, "head"),
    "a module without types, linen": (Linen("unchecked"), loss_fn, {"inner": "jax.shard_map"}, "head"),
    "a collective under automatic sharding": (Linen("collective"), loss_fn, {}, "inner"),
    "a module by closure, nnx": (NNX("closure", nnx.Rngs(0)), loss_fn, {"inner": TRANSFORM}, "head"),
    "a module split and merged, nnx": (
        NNX("split", nnx.Rngs(0)),
        loss_fn,
        {"inner": "did not come back from jax.shard_map"},
        "head",
    ),
    "the whole model": (
        Linen("plain"),
        whole,
        {"embed": "called inside jax.shard_map", "loss_fn/z": TRANSFORM},
        None,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_without_probes_and_names_what_is_inside(name, monkeypatch):
    model, loss, missing, seen = CASES[name]
    variables = None
    if loss is whole:  # the variables of a linen model cannot be made inside
        variables = model.init(jax.random.key(0), make_batch()["tokens"])
    batch = {key: jax.device_put(x, NamedSharding(MESH, P("data"))) for key, x in make_batch().items()}
    made = dict(tx=make_sgd(), plan=PLAN, batch=batch, loss_fn=loss, variables=variables and copy(variables))
    state = make_state(model=model, donate=False, **made)
    after, report = pj.monitored_train_step(state, batch)
    monkeypatch.setenv("PROBES_JAX", "off")
    plain, _ = pj.monitored_train_step(state, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), after.params, plain.params)
    found, absent = report.scalars(), dict(report.coverage.missing)
    assert {point for point in absent if point in report.coverage.seen} >= missing.keys()
    for point, words in missing.items():
        assert words in absent[point]
        assert f"act/{point}/rms" not in found
    if seen is not None:
        assert found[f"act/{seen}/rms"] > 0
    assert len([name for name in found if name.startswith("loss/shard")]) == 4
