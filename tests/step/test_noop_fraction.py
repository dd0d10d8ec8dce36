"""How much of the requested update was lost when parameters were stored, against NumPy on the same arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import probes_jax as pj
from tests.step.small import make_batch, make_sgd, make_state, only
from tests.step.test_mesh import CASES, mesh_of

PLAN = only("update", scan_every=2)
TINY = pj.chain(("lr", optax.scale_by_learning_rate(1e-7)))  # about half of the weights stay where they are


def small_params():
    rng = np.random.default_rng(0)
    shapes = {"a": {"w": (4, 8), "b": (8,)}, "c": (3, 5)}
    return jax.tree.map(
        lambda s: jnp.asarray(rng.normal(size=s), jnp.bfloat16), shapes, is_leaf=lambda s: type(s) is tuple
    )


def expected(params, updates):
    """(elements that did not move though they should have, elements that should have moved)."""
    asked = np.asarray(updates, np.float64) != 0
    moved = np.asarray(optax.apply_updates(params, updates)) != np.asarray(params)
    return int((asked & ~moved).sum()), int(asked.sum())


def test_a_loop_that_hands_over_what_it_asked_for():
    params = small_params()
    rng = np.random.default_rng(1)
    updates = jax.tree.map(
        lambda p: jnp.asarray(rng.normal(size=p.shape) * 3e-3 * (rng.random(p.shape) < 0.8), p.dtype), params
    )
    updates["c"] = jnp.zeros_like(updates["c"])
    new, tx = optax.apply_updates(params, updates), optax.sgd(1.0)
    monitor = pj.Monitor.create(tx=tx, params=params)
    state = tx.init(params)
    _, report = monitor.measure(jnp.float32(1.0), params, params, new, state, state, updates=updates)
    found = report.scalars()
    counts = {name: expected(*leaves) for name, leaves in {
        "a/w": (params["a"]["w"], updates["a"]["w"]),
        "a/b": (params["a"]["b"], updates["a"]["b"]),
    }.items()}  # fmt: skip
    assert all(0 < part < whole for part, whole in counts.values())
    for name, (part, whole) in counts.items():
        assert found[f"update/{name}/noop_fraction"] == pytest.approx(part / whole, rel=1e-12)
    parts, wholes = zip(*counts.values())
    assert found["update/noop_fraction"] == pytest.approx(sum(parts) / sum(wholes), rel=1e-12)
    assert "update/c/noop_fraction" not in found  # nothing was asked for
    assert "update/noop_fraction" not in dict(report.coverage.missing)

    _, report = monitor.measure(jnp.float32(1.0), params, params, new, state, state)
    assert "update/noop_fraction" not in report.scalars()
    assert "updates=updates" in dict(report.coverage.missing)["update/noop_fraction"]


def run(tx, steps=1, batch=None, **kwargs):
    batch = make_batch() if batch is None else batch
    state = make_state(tx=tx, batch=batch, **{"plan": PLAN, **kwargs})
    reports = []
    for _ in range(steps):
        before = jax.tree.map(np.array, state.params)
        state, report = pj.monitored_train_step(state, batch)
        reports.append(report.scalars())
    return before, state, reports


def test_float32_weights_and_a_tiny_learning_rate():
    before, state, (found,) = run(TINY)
    kernel = before["head"]["kernel"]
    same = (kernel == np.asarray(state.params["head"]["kernel"])).mean()
    assert 0.1 < same < 1.0
    assert found["update/head/kernel/noop_fraction"] == pytest.approx(same)
    assert found["update/head/bias/noop_fraction"] == 0.0  # it was zero: everything moves it
    assert 0.0 < found["update/noop_fraction"] < same
    _, _, (found,) = run(make_sgd())
    assert found["update/noop_fraction"] < 0.01


def test_it_belongs_to_scans_and_goes_with_the_updates_of_layers():
    _, _, (full, light) = run(TINY, steps=2)
    assert "update/noop_fraction" in full
    assert not [name for name in light if name.endswith("noop_fraction")]
    _, _, (found,) = run(TINY, plan=only("update", without=("update",)))
    assert not [name for name in found if name.endswith("noop_fraction")]
    assert found["update/norm"] == pytest.approx(full["update/norm"], rel=1e-5)


def test_an_update_that_was_not_made_lost_nothing():
    plan = only("update", scan_every=1, guard=pj.Guard())
    batch = make_batch()

    def loss_fn(model, batch, rngs):
        return pj.Loss(nll=model(batch["tokens"])[..., 0] + batch["hole"])

    batch["hole"] = np.float32(np.nan)
    _, _, (found,) = run(TINY, plan=plan, batch=batch, loss_fn=loss_fn)
    assert found["alert/guard/skipped"] == 1.0
    assert not [name for name in found if name.endswith("noop_fraction")]
    batch["hole"] = np.float32(0.0)
    _, _, (found,) = run(TINY, plan=plan, batch=batch, loss_fn=loss_fn)
    assert "update/noop_fraction" in found


def test_between_two_updates_of_many_steps_nothing_is_asked_for():
    _, _, (first, second) = run(optax.MultiSteps(TINY, 2), steps=2, plan=only("update", scan_every=1))
    assert "update/noop_fraction" not in first
    assert 0.0 < second["update/noop_fraction"] < 1.0


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("case", ["data", "fsdp"])
def test_shards_are_the_whole(case, microbatches):
    axes, token_axes, rule, _ = CASES[case]
    batch = make_batch(batch=16)
    _, _, (alone,) = run(TINY, batch=batch)
    lies = NamedSharding(mesh_of(**axes), PartitionSpec(*token_axes))
    sharded = {key: jax.device_put(x, lies) for key, x in batch.items()}
    _, _, (many,) = run(TINY, batch=sharded, shardings=rule, microbatches=microbatches)
    names = [name for name in alone if name.endswith("noop_fraction")]
    assert names
    assert sorted(names) == sorted(name for name in many if name.endswith("noop_fraction"))
    for name in names:  # a last bit of a gradient may move a weight
        assert many[name] == pytest.approx(alone[name], abs=0.03), name
