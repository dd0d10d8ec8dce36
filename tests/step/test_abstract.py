"""States of shapes: filled from a checkpoint, and refused by name where arrays are needed."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import probes_jax as pj
from tests.step.small import make_batch, make_state

pytestmark = pytest.mark.slow  # together; the second pair of Python and JAX goes without


def shapes_of(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)


MAKE = {
    "created": lambda **settings: make_state(abstract=True, **settings),
    "mapped": lambda **settings: shapes_of(make_state(**settings)),
    "monitor only": lambda **settings: dataclasses.replace(
        state := make_state(**settings), monitor=shapes_of(state).monitor
    ),
}


def sharded(batch):
    mesh = Mesh(np.array(jax.devices()), ("data",))
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))


def rule(path, shape):
    return PartitionSpec("data") if shape[0] % 8 == 0 else PartitionSpec()


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("on_a_mesh", [False, True])
def test_a_checkpoint_fills_it_as_it_fills_any_state(make, on_a_mesh):
    batches = [sharded(make_batch(seed)) if on_a_mesh else make_batch(seed) for seed in range(2)]
    settings = {"batch": batches[0], "loss_scale": "dynamic", "shardings": rule if on_a_mesh else None}
    trained, _ = pj.monitored_train_step(make_state(**settings), batches[0])
    tree = dataclasses.replace(trained, monitor=trained.monitor._replace(window=None, loss_scale=None))
    filled, expected = (pj.restore_state(each, tree) for each in (MAKE[make](**settings), make_state(**settings)))
    for one, other in zip(jax.tree.leaves(filled), jax.tree.leaves(expected), strict=True):
        assert type(one) is type(other) and getattr(one, "sharding", None) == getattr(other, "sharding", None)
        np.testing.assert_array_equal(one, other)
    assert int(filled.step) == 1 and float(filled.monitor.loss_scale.scale) > 1
    reports = [pj.monitored_train_step(state, batches[1])[1].scalars() for state in (filled, expected)]
    assert reports[0] == reports[1]


def test_a_missing_parameter_is_still_an_error():
    tree = dataclasses.replace(make_state(), params={})
    with pytest.raises(ValueError, match="checkpoint holds nothing for params/"):
        pj.restore_state(make_state(abstract=True), tree)


def test_devices_that_are_not_here_cannot_be_filled(monkeypatch):
    state = make_state(abstract=True, batch=sharded(make_batch()))
    monkeypatch.setattr("jax.devices", lambda platform: [])
    with pytest.raises(ValueError, match="is not here, only its compiler is: restore on the devices that are to train"):
        pj.restore_state(state, {})


@pytest.mark.parametrize("how", ["step", "jit"])
@pytest.mark.parametrize(
    ("make", "first"), [("created", "params/"), ("mapped", "step, params/"), ("monitor only", "monitor/version, ")]
)
def test_a_step_says_what_is_only_a_shape(make, first, how):
    state = MAKE[make]()
    step = pj.monitored_train_step if how == "step" else jax.jit(lambda _, batch: pj.monitored_train_step(state, batch))
    match = rf"^state holds a shape instead of an array in {first}.* and \d+ more, .*abstract=True.*pj\.restore_state"
    with pytest.raises(ValueError, match=match):
        step(state if how == "step" else 0, make_batch())
    assert not state.settings.programs, "the next step is still the first"


def test_a_later_step_says_so_too():
    state, _ = pj.monitored_train_step(make_state(), make_batch())
    state = dataclasses.replace(state, monitor=shapes_of(state).monitor)
    with pytest.raises(ValueError, match="^state holds a shape instead of an array in monitor/version, "):
        pj.monitored_train_step(state, make_batch())


@pytest.mark.parametrize("make", ["created", "mapped"])
def test_a_state_of_shapes_has_no_module(make):
    with pytest.raises(ValueError, match=r"shape instead of an array in params/.*pj\.restore_state"):
        MAKE[make]().module()


def test_what_needs_shapes_only_goes_on():
    state = MAKE["monitor only"]()
    jax.tree.map(np.testing.assert_array_equal, state.module()["params"], state.params)
    after, report = jax.eval_shape(pj.monitored_train_step, MAKE["mapped"](), make_batch())
    assert after.params.keys() == state.params.keys() and report.layout.entries
    assert jax.eval_shape(lambda state: state.module(), MAKE["created"]())["params"].keys() == state.params.keys()
