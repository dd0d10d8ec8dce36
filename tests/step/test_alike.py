"""What decides the program, compared over processes; the comparison by two real ones is in test_peers.py."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import probes_jax as pj
from probes_jax.step.alike import check_alike, differences, setting_facts, shape_facts


def test_alike_is_nothing():
    assert differences({p: {"step": "7", "PROBES_JAX": "'on'"} for p in range(4)}) == []


def test_the_minority_is_named():
    facts = {p: {"step": "7"} for p in range(5)} | {0: {"step": "0"}, 3: {}}
    assert differences(facts) == [
        "process 0 has step: 0 (process 1: 7)",
        "process 3 has step: none (process 1: 7)",
    ]


def test_a_long_list_is_cut():
    one, other = ({f"f{i}": str(value) for i in range(9)} for value in (1, 2))
    (line,) = differences({0: one, 1: other})
    assert line.count("process 0:") == 3 and line.endswith(", and 6 more differences")


def test_every_setting_of_the_plan_is_a_fact():
    plans = {0: pj.Plan(), 1: pj.Plan(guard=pj.Guard()), 2: pj.Plan()}
    (line,) = differences({process: setting_facts(plan) for process, plan in plans.items()})
    assert line.startswith("process 1 has Plan guard: Guard(nonfinite=True") and line.endswith("(process 0: None)")


def test_the_environment_is_a_fact(monkeypatch):
    assert setting_facts(pj.Plan())["PROBES_JAX"] == "'on'"
    monkeypatch.setenv("PROBES_JAX", "off")
    assert setting_facts(pj.Plan())["PROBES_JAX"] == "'off'"


def test_shapes_are_those_of_arrays():
    tree = {"a": np.zeros((2, 3), np.float16), "b": jax.ShapeDtypeStruct((4,), np.int32), "c": 1.5}
    assert shape_facts("batch", tree) == {"batch['a']": "float16[2, 3]", "batch['b']": "int32[4]"}


def test_a_mesh_in_one_process_is_compared_with_nobody(monkeypatch):
    """Also in a job of several processes: each may train a model of its own."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr("probes_jax.step.alike._gather", lambda *_: pytest.fail("a collective"))
    check_alike(Mesh(np.array(jax.devices()), ("data",)), {"step": "7"})
    check_alike(None, {"step": "7"})
