"""Bad updates: skipped exactly, counted, and never accepted without a word."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import probes_jax as pj
from probes_jax.signals.loss import measure_scalar_loss, name_loss
from probes_jax.signals.parameters import measure_gradients
from probes_jax.step.reduce import reduce_measured
from probes_jax.step.select import flatten
from probes_jax.step.watch import read_values
from tests.step.small import make_batch, make_tx, only
from tests.step.small import make_state as make_state_of
from tests.step.test_mesh import OneBlock


def make_state(**kwargs):
    """Of the smaller model; every step is a full one, where a plan says nothing else, and one program is compiled."""
    return make_state_of(**{"model": OneBlock(), "plan": only(scan_every=1), **kwargs})


def poisoned_loss(model, batch, rngs):
    logits = model(batch["tokens"])
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return pj.Loss(nll=nll * batch["factor"], mask=batch["mask"])


def batch_with(factor, seed=0, rows=None):
    batch = make_batch(seed)
    batch["factor"] = np.ones(batch["mask"].shape, np.float32)
    batch["factor"][slice(None) if rows is None else rows] = factor
    batch["mask"][:] = 1.0
    return batch


def run(factors, plan=None, **kwargs):
    plan = only(scan_every=1) if plan is None else plan
    state = make_state(plan=plan, loss_fn=poisoned_loss, batch=batch_with(1.0), **kwargs)
    reports = []
    for seed, factor in enumerate(factors):
        before = jax.tree.map(np.array, (state.params, state.opt_state, state.model_state))
        state, report = pj.monitored_train_step(state, batch_with(factor, seed))
        after = jax.tree.map(np.array, (state.params, state.opt_state, state.model_state))
        same = all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
        reports.append(report.scalars() | {"untouched": same})
    return state, reports


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_nonfinite_step_is_skipped_exactly(microbatches):
    plan = only(guard=pj.Guard())  # the first step is full, the others light
    state, reports = run([1, 1, np.nan, 1, np.inf], plan, microbatches=microbatches)
    assert [report["untouched"] for report in reports] == [False, False, True, False, True]
    assert [report["alert/guard/skipped"] for report in reports] == [0, 0, 1, 0, 1]
    last = reports[-1]
    assert last["alert/guard/skipped_count"] == last["alert/nonfinite_steps"] == 2
    assert last["alert/guard/consecutive"] == 1
    assert last["opt/steps_applied"] == 3  # L078: attempted and applied are two numbers
    assert int(state.step) == 5
    for skipped in (reports[2], last):
        assert not np.isfinite(skipped["loss/mean"])  # skipped, but shown
        assert skipped["loss/spike/score"] == np.inf
        assert "opt/learning_rate" not in skipped
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


def test_counters_are_separate():
    """L074: consecutive, total and accepted each mean one thing, whatever came before."""
    _, reports = run([np.nan] * 3 + [1] + [np.nan])  # no guard: non-finite updates are applied, and said to be
    assert [report["alert/nonfinite_accepted"] for report in reports][:3] == [1, 2, 3]
    assert [report["alert/nonfinite_steps"] for report in reports][:3] == [1, 2, 3]


def test_the_guard_stops_rather_than_accepts():
    plan = only(scan_every=1, guard=pj.Guard(max_consecutive=2))
    state, reports = run([1, np.nan, np.nan, np.nan, 1, 1], plan)
    assert [report["alert/guard/stopped"] for report in reports][-3:] == [1, 1, 1]
    assert [report["untouched"] for report in reports] == [False, True, True, True, True, True]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))
    assert reports[-1]["alert/nonfinite_accepted"] == 0


def test_a_skip_is_one_decision_for_all_devices():
    """L076: a NaN in one device's part skips the update everywhere."""
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("data",))
    place = NamedSharding(mesh, PartitionSpec("data"))
    good, bad = (jax.device_put(batch_with(f, rows=slice(3, 4)), place) for f in (1.0, np.nan))
    plan = only(scan_every=1, guard=pj.Guard())
    state = make_state(plan=plan, loss_fn=poisoned_loss, batch=good, shardings=lambda *_: None)
    state, _ = pj.monitored_train_step(state, good)
    state, report = pj.monitored_train_step(state, bad)
    assert report.scalars()["alert/guard/skipped"] == 1
    for leaf in jax.tree.leaves(state.params):
        shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert all(np.array_equal(shards[0], other) and np.isfinite(other).all() for other in shards)


def test_co_spike():
    plan = only(scan_every=1, window=8, min_history=4)
    _, reports = run([1.0] * 8 + [1000.0], plan, tx=make_tx(lr=1e-4))
    quiet, loud = reports[-2], reports[-1]
    assert quiet["alert/co_spike"] == 0
    assert loud["alert/co_spike"] == 1
    assert loud["alert/co_spike/count"] == 1
    smaller = min(loud["loss/spike/score"], loud["grad/spike/score"])
    assert loud["alert/co_spike/magnitude"] == pytest.approx(smaller)
    assert "loss/spike/score" not in reports[3]  # L082: no score before the minimum history


def test_co_spike_guard_skips_the_update():
    plan = only(scan_every=1, window=8, min_history=4, guard=pj.Guard(nonfinite=False, co_spike=True))
    _, reports = run([1.0] * 8 + [1000.0, 1.0], plan, tx=make_tx(lr=1e-4))
    assert [report["untouched"] for report in reports[-3:]] == [False, True, False]


def test_spike_score_against_the_definition():
    plan = only(scan_every=1, window=6, min_history=3)
    rng = np.random.default_rng(0)
    _, reports = run(list(rng.uniform(0.5, 2.0, 12)), plan)
    for signal, name in (("loss", "loss/mean"), ("grad", "grad/norm"), ("update", "update/norm")):
        history = []
        for report in reports:
            u = np.log(report[name])
            if len(history) >= 3:
                window = np.array(history[-6:])
                q = np.median(window)
                deviation = np.median(np.abs(window - q))
                z = 0.6745 * (u - q) / max(deviation, 3e-3)
                assert report[f"{signal}/spike/score"] == pytest.approx(z, rel=1e-3, abs=1e-3)
                assert report[f"{signal}/spike/median"] == pytest.approx(q, rel=1e-5, abs=1e-6)
            else:
                assert f"{signal}/spike/score" not in report
            history.append(u)


def test_loss_scale_is_divided_out():
    """L032: the norm is that of the true gradient; the scale is a value of its own."""
    _, plain = run([1.0, 1.0])
    _, scaled = run([1.0, 1.0], loss_scale=128.0)
    for name in ("grad/norm", "grad/abs_max", "update/norm", "loss/mean"):
        assert scaled[1][name] == pytest.approx(plain[1][name], rel=1e-4)
    assert scaled[1]["opt/loss_scale"] == 128.0
    assert "opt/loss_scale" not in plain[1]


def test_dynamic_loss_scale_skips_and_drops():
    _, reports = run([1.0, np.inf, 1.0], loss_scale=pj.LossScale(initial=2.0**10))
    assert [report["opt/loss_scale"] for report in reports] == [1024, 1024, 512]
    assert [report["untouched"] for report in reports] == [False, True, False]
    assert reports[-1]["opt/loss_scale_drops"] == 1


def test_frozen_leaves_are_shown_apart():
    """L034: what the optimizer never moves does not drive the norm."""

    tx = frozen_head()
    _, reports = run([1.0], plan=only("grad", "update"), tx=tx)
    state = make_state(tx=optax.sgd(0.1), loss_fn=poisoned_loss, batch=batch_with(1.0))
    _, report = pj.monitored_train_step(state, batch_with(1.0))
    everything = report.scalars()["grad/norm"]
    found = reports[0]
    assert found["grad/norm"] ** 2 + found["grad_frozen/norm"] ** 2 == pytest.approx(everything**2, rel=1e-5)
    assert found["grad_frozen/norm"] > 0
    assert found["update/head/kernel/norm"] == 0
    assert "grad/head/kernel/norm" not in found


def frozen_head():
    return optax.multi_transform(
        {"train": optax.sgd(0.1), "freeze": optax.set_to_zero()},
        lambda params: jax.tree_util.tree_map_with_path(
            lambda path, _: "freeze" if path[0].key == "head" else "train", params
        ),
    )


def test_a_nan_in_a_frozen_gradient_is_caught():
    """A global clip would spread it to every parameter."""

    plan = only(guard=pj.Guard())
    state = make_state(plan=plan, tx=frozen_head())
    gradients = jax.tree.map(jax.numpy.ones_like, state.params)
    gradients["head"]["bias"] = gradients["head"]["bias"].at[0].set(np.nan)
    items = measure_gradients(flatten(gradients), state.settings.infos, layers=False)
    items += name_loss(measure_scalar_loss(jax.numpy.float32(1.0)), ())
    values = read_values(reduce_measured(items, "light", None, maxima=False))
    assert not values.finite
    assert not values.finite_gradient
    assert np.isfinite(values.gradient_norm)


@pytest.mark.optimized
def test_a_dynamic_loss_scale_skips_the_same_with_monitoring_off(monkeypatch):
    """An infinite loss with finite gradients is no overflow: both apply the update."""

    def loss_fn(model, batch, rngs):
        logits = model(batch["tokens"])
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return pj.Loss(nll=nll.at[0, 0].set(np.inf), mask=batch["mask"])

    def train():
        batch = batch_with(1.0)
        plan = only(groups=(), scan_every=1)  # taps may move the last bits
        state = make_state(plan=plan, loss_fn=loss_fn, batch=batch, loss_scale="dynamic")
        for _ in range(2):
            state, _ = pj.monitored_train_step(state, batch)
        return jax.tree.map(np.array, (state.params, state.monitor.loss_scale))

    on = train()
    monkeypatch.setenv("PROBES_JAX", "off")
    jax.tree.map(np.testing.assert_array_equal, on, train())


def test_wrt_trains_a_part():
    state = make_state(wrt=r"^head/")
    trunk = jax.tree.map(np.array, state.frozen)
    assert set(state.params) == {"head"}
    state, report = pj.monitored_train_step(state, make_batch())
    jax.tree.map(np.testing.assert_array_equal, trunk, state.frozen)
    assert [name for name in report.scalars() if name.startswith("grad/embed")] == []
    assert set(state.module()["params"]) == {"embed", "block_0", "head"}
    with pytest.raises(ValueError, match="selects no floating-point parameter"):
        make_state(wrt="nothing")


@pytest.mark.parametrize("gives_in", [False, True])
def test_an_optimizer_that_drops_bad_gradients_itself_accepts_none(gives_in):
    """`alert/nonfinite_accepted` pages: it counts what reached the optimizer's state or the parameters, no more."""
    tx = optax.apply_if_finite(make_tx(), max_consecutive_errors=0 if gives_in else 5)
    good, bad = make_batch(), make_batch()
    bad["mask"][0, 0] = np.inf
    state, found = make_state(tx=tx, batch=good), []
    for batch in (good, bad):
        state, report = pj.monitored_train_step(state, batch)
        found.append(report.scalars())
    assert [s["alert/nonfinite_steps"] for s in found] == [0, 1]
    assert found[1]["alert/nonfinite_accepted"] == int(gives_in)
    assert found[1]["opt/steps_applied"] == (2 if gives_in else 1)
    assert np.isfinite(np.asarray(state.params["head"]["kernel"])).all() != gives_in


def test_l078_microsteps_of_the_optimizer_are_not_updates():
    state, found = make_state(tx=optax.MultiSteps(make_tx(), 3)), []
    for _ in range(7):
        state, report = pj.monitored_train_step(state, make_batch())
        found.append(report.scalars()["opt/steps_applied"])
    assert found == [0, 0, 1, 1, 1, 2, 2]


def test_a_constant_extra_term_that_is_not_finite_counts_as_a_bad_step():
    """Its gradient is zero, so only the term itself tells."""

    def loss_fn(model, batch, rngs):
        nll = model(batch["tokens"])[..., 0] ** 2
        return pj.Loss(nll=nll, extra={"router": jnp.float32(np.nan)})

    for guard in (None, pj.Guard()):
        state = make_state(loss_fn=loss_fn, plan=only(groups=(), guard=guard))
        _, report = pj.monitored_train_step(state, make_batch())
        found = report.scalars()
        assert found["alert/nonfinite_steps"] == 1
        assert found["alert/guard/skipped"] == (guard is not None)


def test_an_empty_step_left_out_is_no_skip_of_the_guard():
    batch = make_batch()
    batch["mask"][:] = 0.0
    state = make_state(plan=only(skip_empty=True), batch=batch)
    _, report = pj.monitored_train_step(state, batch)
    found = report.scalars()
    assert (found["alert/guard/skipped"], found["alert/guard/skipped_count"], found["data/empty_steps"]) == (0, 0, 1)
    assert found["opt/steps_applied"] == 0
