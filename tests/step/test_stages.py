"""What each stage of the optimizer makes of the gradient, against the stages run one by one."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

import probes_jax as pj
from tests.step.small import WIDTH, copy, make_batch, make_state, make_tx, only, plain_step

pytestmark = pytest.mark.slow  # together; the second pair of Python and JAX goes without

PLAN = only(scan_every=2, stages=True)


def flat(tree):
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


def values(updates, gradients):
    u, g = flat(updates), flat(gradients)
    cosine = (u * g).sum() / np.sqrt((u**2).sum() * (g**2).sum())
    return {"norm": np.sqrt((u**2).sum()), "abs_max": np.abs(u).max(), "cosine": cosine}


def stages_of(scalars):
    found: dict[str, dict[str, float]] = {}
    for name, value in scalars.items():
        if name.startswith("opt/stage/"):
            stage, stat = name.removeprefix("opt/stage/").rsplit("/", 1)
            found.setdefault(stage, {})[stat] = value
    return found


def close(found, wanted, rel=1e-4):
    assert set(found) == set(wanted)
    for name, stats in wanted.items():
        assert found[name] == {stat: pytest.approx(value, rel=rel, abs=1e-7) for stat, value in stats.items()}, name


def run(tx, steps=1, batch=None, **kwargs):
    batch = make_batch() if batch is None else batch
    state = make_state(tx=tx, batch=batch, **{"plan": PLAN, **kwargs})
    for _ in range(steps):
        state, report = pj.monitored_train_step(state, batch)
    return state, report


def test_every_stage_and_what_was_applied():
    tx, batch = make_tx(), make_batch()
    state = make_state(tx=tx, plan=only(scan_every=1, stages=True))
    params, opt_state = copy(state.params), copy(state.opt_state)
    for _ in range(2):
        new, new_opt, gradients, _, _ = plain_step(params, opt_state, batch, tx)
        updates, wanted = gradients, {}
        for stage, inner in zip(tx.stages, opt_state.stages, strict=True):
            updates, _ = stage.update(updates, inner, params)
            wanted[stage.name] = values(updates, gradients)
        wanted["applied"] = values(jax.tree.map(lambda a, b: np.asarray(b) - np.asarray(a), params, new), gradients)
        state, report = pj.monitored_train_step(state, batch)
        found = stages_of(report.scalars())
        close(found, wanted)
        assert found["clip"]["cosine"] == pytest.approx(1.0)
        assert found["lr"]["cosine"] < 0 < found["adam"]["cosine"]
        params, opt_state = new, new_opt


def test_only_where_the_plan_asks_for_it_and_only_in_scans():
    state, light = run(make_tx(), steps=2)
    assert not stages_of(light.scalars())
    plain, report = run(make_tx(), steps=2, plan=only(scan_every=1))
    assert not stages_of(report.scalars())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.params, plain.params)
    with pytest.raises(ValueError, match="Plan stages must be True or False"):
        pj.Plan(stages="adam")  # pyright: ignore[reportArgumentType]


def test_what_cannot_be_seen_is_named():
    _, report = run(optax.adam(1e-2))
    assert set(stages_of(report.scalars())) == {"applied"}
    assert "pj.chain" in dict(report.coverage.missing)["opt/stage"]
    _, report = run(optax.MultiSteps(make_tx(), 1))
    assert set(stages_of(report.scalars())) == {"applied"}
    missing = dict(report.coverage.missing)
    assert {f"opt/stage/{name}" for name in ("clip", "adam", "decay", "lr")} <= set(missing)
    assert "jax.lax.cond" in missing["opt/stage/adam"]


def test_wrappers_and_chains_in_chains():
    def labels(params):
        return {name: "b" if name == "embed" else "a" for name in params}

    groups = {
        "a": pj.chain(("adam", optax.scale_by_adam()), ("lr", optax.scale_by_learning_rate(0.1))),
        "b": pj.chain(("sign", optax.scale_by_sign()), ("lr", optax.scale_by_learning_rate(0.01))),
    }
    tx = pj.chain(("clip", optax.clip_by_global_norm(0.5)), ("groups", optax.partition(groups, labels)))
    batch = make_batch()
    _, report = run(tx, batch=batch)
    found = stages_of(report.scalars())
    assert set(found) == {"clip", "groups", "groups.adam", "groups.sign", "groups.lr", "applied"}
    used = np.unique(batch["tokens"][batch["mask"] > 0]).size * WIDTH  # others have no gradient, and no sign
    assert found["groups.sign"]["norm"] == pytest.approx(np.sqrt(used))
    assert found["groups.lr"] == pytest.approx(found["groups"])
    wrapped = optax.inject_hyperparams(lambda rate: pj.chain(("lr", optax.scale_by_learning_rate(rate))))(0.1)
    _, report = run(wrapped)
    assert set(stages_of(report.scalars())) == {"lr", "applied"}


def test_a_chain_that_scales_inside_a_stage_is_asked_for_its_rate_unseen():
    tx = pj.chain(("sgd", pj.chain(("lr", optax.scale_by_learning_rate(0.1)))))
    _, report = run(tx)
    found = stages_of(report.scalars())
    assert found["sgd.lr"]["norm"] == pytest.approx(0.1 * report.scalars()["grad/norm"], rel=1e-5)
    assert report.scalars()["opt/learning_rate"] == pytest.approx(0.1)


def test_frozen_parameters_do_not_count():
    tx = pj.chain(
        ("lr", optax.scale_by_learning_rate(0.1)),
        ("freeze", optax.masked(optax.set_to_zero(), lambda params: {name: name == "embed" for name in params})),
    )
    _, report = run(tx)
    found = stages_of(report.scalars())
    assert found["lr"] == pytest.approx(found["freeze"])
    assert found["lr"]["cosine"] == pytest.approx(-1.0)
