"""The parts of a step in somebody else's loop."""

from __future__ import annotations

import difflib
import pathlib
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

import probes_jax as pj
from tests.step.small import GROUPS, Model, copy, loss_fn, make_batch, make_state, make_tx, plain_loss

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
PLAN = pj.Plan(groups=GROUPS, scan_every=2)


def expected(tx, steps):
    state = make_state(plan=PLAN, tx=tx)
    start, found = copy(state.params), []
    for seed in range(steps):
        state, report = pj.monitored_train_step(state, make_batch(seed))
        found.append(report.scalars())
    return start, found


def test_a_scalar_loss_gives_the_values_of_the_monitored_step():
    tx = make_tx()
    params, found = expected(tx, 3)

    @jax.jit
    def train_step(params, opt_state, monitor, batch):
        (loss, _), gradients = jax.value_and_grad(plain_loss, has_aux=True)(params, batch)
        updates, new_opt_state = tx.update(gradients, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        monitor, report = monitor.measure(loss, gradients, params, new_params, opt_state, new_opt_state)
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


@pytest.mark.parametrize("there_and_back", [True, False])
def test_an_observed_model_gives_everything(there_and_back):
    tx = make_tx()
    params, found = expected(tx, 2)
    monitor = pj.Monitor.create(tx=tx, params=params, plan=PLAN, model=Model(), loss_fn=loss_fn, batch=make_batch())
    opt_state, key = tx.init(params), jax.random.key(0)
    differentiate = monitor.value_and_grad if there_and_back else jax.value_and_grad(monitor.loss, has_aux=True)
    (_, seen), gradients = differentiate(params, make_batch(0), key, scan=True)
    updates, new_opt_state = tx.update(gradients, opt_state, params)
    new_params = optax.apply_updates(params, updates)
    monitor, report = monitor.measure(seen, gradients, params, new_params, opt_state, new_opt_state)
    scalars = report.scalars()
    wanted = {name: x for name, x in found[0].items() if there_and_back or not name.startswith("grad_act")}
    assert scalars.keys() == wanted.keys()
    assert ("grad_act" in dict(report.coverage.missing)) == (not there_and_back)
    for name, value in wanted.items():
        assert scalars[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_ten_changed_lines():
    plain, own = ((EXAMPLES / name).read_text().splitlines() for name in ("plain_loop.py", "own_loop.py"))
    docstring = 1
    added = [line for line in difflib.ndiff(plain, own) if line.startswith("+ ") and line[2:].strip()]
    assert len(added) - docstring <= 10
    guide = (EXAMPLES.parent / "docs" / "own_loop.md").read_text()
    for line in added[docstring:]:
        assert f"+{line[2:]}" in guide


def test_the_example_runs(tmp_path):
    subprocess.run([sys.executable, EXAMPLES / "own_loop.py", "3"], cwd=tmp_path, check=True, timeout=240)
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


@pytest.mark.parametrize("microbatches", [2, 4])
def test_microbatches_in_a_loop_of_ones_own(microbatches):
    tx, batch = make_tx(), make_batch()
    params = make_state(donate=False).params
    monitor = pj.Monitor.create(tx=tx, params=params, plan=PLAN, model=Model(), loss_fn=loss_fn, batch=batch)
    found = []
    for parts in (1, microbatches):
        (loss, part), gradients = monitor.value_and_grad(
            params, batch, jax.random.key(0), scan=True, microbatches=parts
        )
        _, report = monitor.measure(part, gradients, params, params, tx.init(params), tx.init(params))
        assert report.scalars()["loss/mean"] == pytest.approx(float(loss), rel=1e-6)
        found.append(report.scalars())
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert found[1][name] == pytest.approx(value, rel=3e-4, abs=1e-5), name
