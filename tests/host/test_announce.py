"""What is said once, when a program reports for the first time."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from probes_jax.host.recorder import Recorder
from probes_jax.spec.plan import Plan
from tests.host.recorder_fakes import FULL, LIGHT, buffer_of


@dataclasses.dataclass
class Coverage:
    seen: tuple = ("embed", "layer", "head")
    missing: tuple = ()
    warnings: tuple = ()


@dataclasses.dataclass
class Report:
    buffer: object
    layout: object
    coverage: Coverage
    plan: str = ""


def record(reports, plan=None):
    with Recorder(sinks=[], plan=plan, process_index=0) as recorder:
        for report in reports:
            recorder.record(report)


def report(step, layout=LIGHT, missing=(), plan=""):
    return Report(buffer_of(step, layout), layout, Coverage(missing=missing), plan)


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, "probes_jax")
    return lambda: [record.getMessage() for record in caplog.records]


def test_what_cannot_be_seen_is_said_once_with_the_line_that_mends_it(said):
    missing = (("layer", "inside a JAX transform; use nn.remat"), ("opt/learning_rate", "build it with pj.chain"))
    record([report(step, FULL, missing) for step in range(3)])
    (line,) = said()
    assert "layer: inside a JAX transform; use nn.remat" in line
    assert "opt/learning_rate: build it with pj.chain" in line


def test_a_loop_without_a_model_says_it_too_and_says_it_once(said):
    missing = (("act", "no model"), ("grad/clip_rate", "build it with pj.chain"))
    none = Coverage(seen=(), missing=missing)
    record(
        [dataclasses.replace(report(step, layout), coverage=none) for step, layout in enumerate((LIGHT, FULL, LIGHT))]
    )
    (line,) = said()
    assert "grad/clip_rate: build it with pj.chain" in line


def test_a_long_list_is_cut_and_counted(said):
    record([report(0, FULL, tuple((f"layer{i}", f"lost {i}") for i in range(20)))])
    assert "and for 12 more reasons, in report.coverage.missing" in said()[0]


def test_layers_that_are_missing_for_one_reason_share_a_line(said):
    record([report(0, FULL, tuple((f"layer[{i}]/mlp", "lost") for i in range(20)))])
    assert said()[0].splitlines()[1:] == ["  missing layer[0..19]/mlp: lost"]


def test_nothing_missing_says_nothing(said):
    record([report(0, FULL), report(1, LIGHT, plan=Plan().fingerprint)], plan=Plan())
    assert said() == []


def test_another_plan_than_the_recorder_s_is_said(said):
    other = Plan(scan_every=7).fingerprint
    record([report(0, LIGHT, plan=other), report(1, LIGHT, plan=other)], plan=Plan())
    (line,) = said()
    assert "another plan than the recorder's" in line
    record([report(0, LIGHT, plan=other)])  # a recorder without a plan compares nothing
    assert len(said()) == 1


def test_what_is_not_as_it_should_be_is_said_once(said):
    found = dataclasses.replace(report(0, FULL), coverage=Coverage(warnings=("a full report is 2,000,000 bytes",)))
    again = dataclasses.replace(found, buffer=buffer_of(1, FULL))
    light = dataclasses.replace(found, buffer=buffer_of(2, LIGHT), layout=LIGHT)
    record([found, again, light])
    assert said() == ["a full report is 2,000,000 bytes"]
