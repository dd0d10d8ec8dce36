"""`report.scalars()`: a dict, and an error that helps with a name."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import jax
import numpy as np
import optax
import pytest

import probes_jax as pj
from probes_jax.spec.coverage import Coverage
from probes_jax.step.report import Scalars
from tests.step.small import make_batch, make_state, only


@pytest.fixture(scope="module")
def report():
    params, tx = {"w": np.ones(2)}, optax.sgd(0.1)
    monitor, state = pj.Monitor.create(tx=tx, params=params), tx.init(params)
    return monitor.measure(np.float32(1.0), params, params, params, state, state)[1]


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("loss", "'loss/mean'"),
        ("grad/nrom", "'grad/norm'"),
        ("updat", "'update"),
    ],
)
def test_a_name_that_it_does_not_have_gives_those_that_come_close(report, wrong, meant):
    with pytest.raises(KeyError, match=f"nothing was measured as '{wrong}' on this step; did you mean .*{meant}"):
        report.scalars()[wrong]
    assert report.scalars().get(wrong) is None and wrong not in report.scalars()


def test_where_nothing_comes_close_it_says_where_the_names_are(report):
    with pytest.raises(KeyError, match=r"'zzz' on this step; list\(report.scalars\(\)\) has what was"):
        report.scalars()["zzz"]


def test_a_light_step_says_that_layers_are_measured_by_scans(monkeypatch):
    state = make_state(plan=only("act", scan_every=2))
    state, full = pj.monitored_train_step(state, make_batch())
    _, light = pj.monitored_train_step(state, make_batch())
    assert full.scalars()["act/head/rms"] > 0
    for name in ("act/head/rms", "act/abs_max"):
        with pytest.raises(KeyError, match="full program only, every Plan.scan_every steps"):
            light.scalars()[name]
    monkeypatch.setenv("PROBES_JAX", "off")
    _, off = pj.monitored_train_step(make_state(), make_batch())
    with pytest.raises(KeyError, match="PROBES_JAX=off measures nothing"):
        off.scalars()["grad/norm"]


def test_a_name_that_could_not_be_measured_gives_the_reason(report):
    missing = dataclasses.replace(report, coverage=Coverage(missing=(("logits", "the loss has none"),)))
    for one in (missing, jax.tree.map(lambda x: np.stack([x, x]), missing)):
        with pytest.raises(KeyError, match="'logits/abs_max': the loss has none"):
            one.scalars()["logits/abs_max"]


def test_of_stacked_reports_too(report):
    stacked = jax.tree.map(lambda x: np.stack([x, x]), report)
    assert stacked.scalars()["loss/mean"] == [1.0, 1.0]
    with pytest.raises(KeyError, match="'loss/mean'"):
        stacked.scalars()["loss"]


def test_it_is_a_dict_everywhere_else(report):
    found = report.scalars()
    plain = dict(found)
    assert found == plain and json.loads(json.dumps(found)) == plain
    assert type(pickle.loads(pickle.dumps(found))) is dict and pickle.loads(pickle.dumps(found)) == plain
    assert type(copy.deepcopy(found)) is dict and copy.deepcopy(found) == plain
    doubled = jax.tree.map(lambda x: 2 * x, found)
    assert doubled == {name: 2 * value for name, value in plain.items()}
    assert jax.tree.leaves(found) == jax.tree.leaves(plain)
    paths = jax.tree_util.tree_flatten_with_path
    assert [path for path, _ in paths(found)[0]] == [path for path, _ in paths(plain)[0]]
    assert Scalars() == {}
