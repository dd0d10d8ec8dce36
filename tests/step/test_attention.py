"""Attention of Flax's own layers, unedited, linen and nnx."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import probes_jax as pj
from tests.stats.test_attention import reference
from tests.step.small import VOCAB, make_batch, make_state, only

WIDTH, HEADS = 8, 2
PLAN = only("attention")


class Model(nn.Module):
    scan: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, name="embed")(tokens)
        mask = nn.make_causal_mask(tokens)
        attend = nn.MultiHeadDotProductAttention
        if self.scan:
            body = nn.scan(
                nn.remat(lambda module, x, _: (module(x, mask=mask), None), prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
            )
            x, _ = body(attend(HEADS, name="attend"), x, None)
        else:
            for index in range(2):
                x = attend(HEADS, name=f"attend_{index}")(x, mask=mask)
        return nn.Dense(VOCAB, name="head")(x)


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.attend = nnx.List([nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x, mask = self.embed(tokens), nnx.make_causal_mask(tokens)
        for attend in self.attend:
            x = attend(x, mask=mask)
        return self.head(x)


def project(own, x):
    return np.einsum("btd,dhe->bthe", x, np.asarray(own["kernel"], np.float64)) + np.asarray(own["bias"])


def check(scalars, projected, mask):
    """Largest logit and mean entropy over valid queries, of each layer."""
    for index, (query, key) in enumerate(projected):
        logit, entropy = reference(query, key, causal=True)
        get = lambda name, i=index: scalars[f"attention/attend[{i}]/{name}"]  # noqa: E731
        assert get("logit/max") == pytest.approx(logit[mask > 0].max(), rel=1e-4)
        assert get("entropy/mean") == pytest.approx(entropy[mask > 0].mean(), rel=1e-4)
        assert get("entropy/max") == pytest.approx(entropy[mask > 0].max(), rel=1e-4)
    assert scalars["attention/logit"] == max(scalars[f"attention/attend[{index}]/logit/max"] for index in range(2))


@pytest.mark.parametrize("scan", [False, True])
def test_linen(scan):
    batch = make_batch()
    state = make_state(model=Model(scan), plan=PLAN)
    params = jax.tree.map(jnp.copy, state.params)
    _, report = pj.monitored_train_step(state, batch)
    x, projected = np.asarray(params["embed"]["embedding"])[batch["tokens"]], []
    mask = nn.make_causal_mask(batch["tokens"])
    for index in range(2):
        own = jax.tree.map(lambda p, i=index: p[i], params["attend"]) if scan else params[f"attend_{index}"]
        projected.append((project(own["query"], x), project(own["key"], x)))
        x = nn.MultiHeadDotProductAttention(HEADS).apply({"params": own}, x, mask=mask)
    check(report.scalars(), projected, batch["mask"])


def test_nnx():
    batch, model = make_batch(), NNXModel(nnx.Rngs(0))
    _, report = pj.monitored_train_step(make_state(model=model, plan=PLAN, microbatches=2), batch)
    x, projected = model.embed(batch["tokens"]), []
    for attend in model.attend:
        projected.append((np.asarray(attend.query(x)), np.asarray(attend.key(x))))
        x = attend(x, mask=nnx.make_causal_mask(batch["tokens"]))
    check(report.scalars(), projected, batch["mask"])


@pytest.mark.optimized
def test_jax_own_function_in_a_model_and_training_unchanged():
    class Own(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(VOCAB, WIDTH, name="embed")(tokens)
            q, k, v = (nn.DenseGeneral((HEADS, 4), name=name)(x) for name in ("query", "key", "value"))
            x = jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=0.2)
            return nn.DenseGeneral(VOCAB, axis=(-2, -1), name="head")(x)

    batch, found = make_batch(), []
    for without in ((), ("attention",)):
        plan = only("attention", without=without, backward=False)
        state = make_state(model=Own(), plan=plan)
        params = jax.tree.map(jnp.copy, state.params)
        state, report = pj.monitored_train_step(state, batch)
        scalars = report.scalars()
        assert ("attention/logit" in scalars) == (without == ())
        found.append(state.params)
        if not without:
            x = np.asarray(params["embed"]["embedding"])[batch["tokens"]]
            logit, _ = reference(project(params["query"], x), project(params["key"], x), scale=0.2, causal=True)
            assert scalars["attention/logit"] == pytest.approx(logit[batch["mask"] > 0].max(), rel=1e-4)
    jax.tree.map(np.testing.assert_array_equal, *found)
