"""The same model in linen and in nnx: the same names, the same values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import probes_jax as pj
from tests.step.small import GROUPS, NNXModel, copy, make_batch, make_sgd, make_state

PLAN = pj.Plan(groups=GROUPS, scan_every=2)


def linen_variables(model):
    """The nnx model's weights in linen's structure."""
    pure = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    blocks = pure.pop("block")
    return {"params": copy(pure | {f"block_{index}": blocks[index] for index in blocks})}


def run(steps=3, **kwargs):
    state = make_state(plan=PLAN, tx=make_sgd(), **kwargs)
    found = []
    for seed in range(steps):
        state, report = pj.monitored_train_step(state, make_batch(seed))
        found.append(report.scalars())
    return state, found


def test_linen_equals_nnx():
    model = NNXModel(nnx.Rngs(0))
    _, linen = run(variables=linen_variables(model))
    state, found = run(model=model)
    for a, b in zip(linen, found, strict=True):
        shared = a.keys() & b.keys() - {"sys/monitor/points_seen", "sys/monitor/points_reported"}
        points = ("act/", "grad_act/")  # a linen model without dropout still has the module
        assert {n for n in a if not n.startswith(points)} == {n for n in b if not n.startswith(points)}
        for name in shared:
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-6), name
        for point in ("embed", "block[0]/norm", "block[1]/up", "block[1]", "head"):
            if "act/abs_max" in a:
                assert f"act/{point}/rms" in b
    assert int(state.step) == 3


def test_the_users_module_stays_alive_and_the_trained_one_comes_back():
    model = NNXModel(nnx.Rngs(0))
    before = np.array(model.head.kernel[...])
    state, _ = run(model=model)
    np.testing.assert_array_equal(before, model.head.kernel[...])
    trained = state.module()
    assert isinstance(trained, NNXModel)
    assert not np.array_equal(before, trained.head.kernel[...])
    tokens = jnp.asarray(make_batch()["tokens"])
    assert trained(tokens).shape == model(tokens).shape
    pj.monitored_train_step(state, make_batch())  # the module does not hold the state's buffers
    trained(tokens)


class Dropping(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(8, 16, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.dropout(self.norm(self.embed(tokens))))


def test_model_state_is_carried_and_rngs_follow_the_step():
    whole, found = run(4, model=Dropping(nnx.Rngs(0)))
    statistics = jax.tree.leaves(whole.model_state)
    fresh = make_state(model=Dropping(nnx.Rngs(0)), plan=PLAN)
    assert jax.tree.structure(fresh.model_state) == jax.tree.structure(whole.model_state)
    assert any(not np.array_equal(a, b) for a, b in zip(statistics, jax.tree.leaves(fresh.model_state), strict=True))
    again, same = run(4, model=Dropping(nnx.Rngs(0)))
    assert found == same
    jax.tree.map(np.testing.assert_array_equal, whole.params, again.params)


def test_microbatches():
    _, one = run(model=NNXModel(nnx.Rngs(0)))
    _, four = run(model=NNXModel(nnx.Rngs(0)), microbatches=4)
    for a, b in zip(one, four, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert b[name] == pytest.approx(a[name], rel=3e-4, abs=1e-5), name
