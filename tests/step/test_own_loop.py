"""The parts of a step in somebody else's loop."""

from __future__ import annotations

import difflib
import functools
import pathlib
import runpy
import sys

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import probes_jax as pj
from tests.step.small import GROUPS, Model, NNXModel, copy, loss_fn, make_batch, make_state, make_tx, plain_loss
from tests.step.test_coverage import Hiding

pytestmark = pytest.mark.slow  # together; the second pair of Python and JAX goes without

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
PLAN = pj.Plan(groups=GROUPS, scan_every=2)


TX = make_tx()


@pytest.fixture(scope="module")
def expected():
    """Parameters at the start, and what the monitored step says of three steps."""
    state = make_state(plan=PLAN, tx=TX)
    start, found = copy(state.params), []
    for seed in range(3):
        state, report = pj.monitored_train_step(state, make_batch(seed))
        found.append(report.scalars())
    return start, found


def test_a_scalar_loss_gives_the_values_of_the_monitored_step(expected):
    tx = TX
    params, found = expected

    @jax.jit
    def train_step(params, opt_state, monitor, batch):
        (loss, _), gradients = jax.value_and_grad(plain_loss, has_aux=True)(params, batch)
        updates, new_opt_state = tx.update(gradients, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        monitor, report = monitor.measure(
            loss, gradients, params, new_params, opt_state, new_opt_state, updates=updates
        )
        return new_params, new_opt_state, monitor, report

    opt_state, monitor = tx.init(params), pj.Monitor.create(tx=tx, params=params, plan=PLAN)
    for seed in range(3):
        params, opt_state, monitor, report = train_step(params, opt_state, monitor, make_batch(seed))
        scalars = report.scalars()
        assert report.readings()[0].step == seed
        families = ("grad/", "param/", "update/", "opt/", "loss/mean", "loss/spike", "alert/")
        wanted = {name: value for name, value in found[seed].items() if name.startswith(families)}
        assert {name for name in scalars if name.startswith(families)} == set(wanted)
        for name, value in wanted.items():
            assert scalars[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    told = str(report.coverage).splitlines()
    assert told[0] == "no activations are observed", "and no step of this loop will"
    for name in ("act", "grad_act", "logits", "loss/shard"):
        assert "one number" in dict(report.coverage.missing)[name]


@pytest.mark.parametrize(("there_and_back", "microbatches"), [(True, 1), (False, 1), (True, 4)])
def test_an_observed_model_gives_everything(there_and_back, microbatches, expected):
    tx = TX
    params, found = expected
    monitor = pj.Monitor.create(tx=tx, params=params, plan=PLAN, model=Model(), loss_fn=loss_fn, batch=make_batch())

    @jax.jit
    def step(params, opt_state, monitor, batch, key):
        differentiate = (
            functools.partial(monitor.value_and_grad, microbatches=microbatches)
            if there_and_back
            else jax.value_and_grad(monitor.loss, has_aux=True)
        )
        (loss, seen), gradients = differentiate(params, batch, key, scan=True)
        updates, new_opt_state = tx.update(gradients, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        return loss, monitor.measure(seen, gradients, params, new_params, opt_state, new_opt_state, updates=updates)[1]

    loss, report = step(params, tx.init(params), monitor, make_batch(0), jax.random.key(0))
    scalars = report.scalars()
    assert scalars["loss/mean"] == pytest.approx(float(loss), rel=1e-6)
    wanted = {name: x for name, x in found[0].items() if there_and_back or not name.startswith("grad_act")}
    assert scalars.keys() == wanted.keys()
    assert ("grad_act" in dict(report.coverage.missing)) == (not there_and_back)
    rel, abs_ = (1e-4, 1e-6) if microbatches == 1 else (3e-4, 1e-5)
    for name, value in wanted.items():
        assert scalars[name] == pytest.approx(value, rel=rel, abs=abs_), name


@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_is_hidden_is_as_missing_as_in_the_monitored_step(microbatches):
    plan, model, batch = pj.Plan(groups=GROUPS, scan_every=1), Hiding(), make_batch()
    state = make_state(model, plan=plan, microbatches=microbatches)
    wanted = jax.eval_shape(lambda batch: pj.monitored_train_step(state, batch)[1], batch).coverage
    tx, params = make_tx(), state.params
    monitor = pj.Monitor.create(tx=tx, params=params, plan=plan, model=model, loss_fn=loss_fn, batch=batch)

    def step(params, opt_state, monitor, batch):
        differentiate = functools.partial(monitor.value_and_grad, microbatches=microbatches, scan=True)
        (_, seen), gradients = differentiate(params, batch, jax.random.key(0))
        return monitor.measure(seen, gradients, params, params, opt_state, opt_state, updates=params)[1]

    coverage = jax.eval_shape(step, params, tx.init(params), monitor, batch).coverage
    assert "head#1" in dict(coverage.missing) and coverage == wanted


def test_parameters_in_lists_and_in_an_nnx_state_have_names():
    listed = {"layers": [{"w": np.ones(2)}, {"w": np.full(2, 2.0)}]}
    state = nnx.state(NNXModel(nnx.Rngs(0)), nnx.Param)
    tx = optax.sgd(0.1)
    for params, name in ((listed, "param/layers[1]/w/norm"), (state, "param/block[1]/up/kernel/norm")):
        monitor, opt_state = pj.Monitor.create(tx=tx, params=params), tx.init(params)
        _, report = monitor.measure(np.float32(1.0), params, params, params, opt_state, opt_state)
        kernel = params["layers"][1]["w"] if params is listed else params["block"][1]["up"]["kernel"][...]
        assert report.scalars()[name] == pytest.approx(np.linalg.norm(np.asarray(kernel)))


def test_an_nnx_model_with_its_own_state_as_parameters():
    model, batch, tx = NNXModel(nnx.Rngs(0)), make_batch(), make_tx()
    params = nnx.state(model, nnx.Param)
    monitor = pj.Monitor.create(tx=tx, params=params, plan=PLAN, model=model, loss_fn=loss_fn, batch=batch)
    (loss, _), gradients = jax.jit(monitor.value_and_grad)(params, batch, jax.random.key(0))
    assert jax.tree.structure(gradients) == jax.tree.structure(params)
    nll = optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["targets"])
    assert float(loss) == pytest.approx(float((nll * batch["mask"]).sum() / batch["mask"].sum()), rel=1e-5)


def test_ten_changed_lines():
    plain, own = ((EXAMPLES / name).read_text().splitlines() for name in ("plain_loop.py", "own_loop.py"))
    docstring = 1
    added = [line for line in difflib.ndiff(plain, own) if line.startswith("+ ") and line[2:].strip()]
    assert len(added) - docstring <= 10
    guide = (EXAMPLES.parent / "docs" / "own_loop.md").read_text()
    for line in added[docstring:]:
        assert f"+{line[2:]}" in guide


def test_the_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["own_loop.py", "3"])
    runpy.run_path(str(EXAMPLES / "own_loop.py"), run_name="__main__")
    assert pj.open_run(tmp_path / "runs" / "own_loop").series("loss/mean")[0].tolist() == [0, 1, 2]


def test_a_monitor_does_not_claim_to_skip():
    with pytest.raises(ValueError, match="Monitor only measures"):
        pj.Monitor.create(tx=make_tx(), params={"w": jax.numpy.ones(2)}, plan=pj.Plan(guard=pj.Guard()))


def test_model_loss_fn_and_batch_belong_together():
    tx = make_tx()
    with pytest.raises(ValueError, match="together"):
        pj.Monitor.create(tx=tx, params={"w": jax.numpy.ones(2)}, model=Model())
    with pytest.raises(ValueError, match="needs a model"):
        monitor = pj.Monitor.create(tx=tx, params={"w": jax.numpy.ones(2)})
        monitor.loss({"w": jax.numpy.ones(2)}, make_batch(), jax.random.key(0))


def test_off_measures_nothing(monkeypatch):
    """PROBES_JAX=off: the loss and its gradient are the same, the report is empty, the monitor as it was."""
    monkeypatch.setenv("PROBES_JAX", "off")
    tx, batch = make_tx(), make_batch()
    params = make_state(donate=False).params
    plan = pj.Plan(groups=GROUPS)
    monitor = pj.Monitor.create(tx=tx, params=params, plan=plan, model=Model(), loss_fn=loss_fn, batch=batch)

    @jax.jit
    def step(params, opt_state, monitor):
        (loss, part), gradients = jax.value_and_grad(monitor.loss, has_aux=True)(
            params, batch, jax.random.key(0), scan=True
        )
        updates, new_opt_state = tx.update(gradients, opt_state, params)
        new = optax.apply_updates(params, updates)
        monitor, report = monitor.measure(part, gradients, params, new, opt_state, new_opt_state)
        return loss, monitor, report

    loss, after, report = step(params, tx.init(params), monitor)
    assert loss == pytest.approx(float(plain_loss(params, batch)[0]), rel=1e-6)
    assert report.scalars() == {}
    jax.tree.map(np.testing.assert_array_equal, after.state, monitor.state)
