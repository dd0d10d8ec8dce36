from __future__ import annotations

import io
import math

import pytest

from probes_jax.present.screen import print_screen
from probes_jax.present.unusual import Unusual, find_unusual, format_steps
from probes_jax.spec.plan import Plan

from .record import FakeRun

QUIET = {
    "loss/mean": [2.0, 2.0, 2.0],
    "grad/norm": [1.0, 1.0, 1.0],
    "loss/spike/score": [None, 0.1, 5.9],
    "grad/spike/score": [None, -20.0, 0.0],
    "alert/co_spike": [None, 0.0, 0.0],
    "alert/nonfinite_steps": [0.0, 0.0, 0.0],
    "alert/guard/skipped_count": [0.0, 0.0, 0.0],
    "data/empty_steps": [0.0, 0.0, 0.0],
    "sys/monitor/dropped": [0.0, 0.0, 0.0],
    "sys/monitor/points_seen": [9.0],
    "sys/monitor/points_reported": [9.0],
}


def test_a_quiet_run_has_nothing_unusual():
    assert find_unusual(FakeRun(QUIET)) == []
    assert find_unusual(FakeRun({})) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"loss/spike/score": [7.0, 0.1, 12.25]},
            "spike of loss/mean at steps 0, 2 (worst score 12.25 at 2, threshold 6)",
        ),
        (
            {"update/spike/score": [None, math.inf, 7.0]},
            "spike of update/norm at steps 1-2 (worst score inf at 1, threshold 6)",
        ),
        ({"alert/co_spike": [None, 1.0, 0.0]}, "co-spike of loss and gradient norm at step 1"),
        (
            {"alert/nonfinite_steps": [0.0, 1.0, 2.0]},
            "NaN or infinite loss or gradient at steps 1-2 (2 in all)",
        ),
        ({"alert/guard/skipped_count": [1.0, 1.0, 2.0]}, "update skipped at steps 0, 2 (2 in all)"),
        ({"data/empty_steps": [0.0, 0.0, 1.0]}, "batch without a valid token at step 2 (1 in all)"),
        ({"opt/loss_scale_drops": [0.0, 1.0, 1.0]}, "loss scale lowered at step 1 (1 in all)"),
        ({"logits/abs_max": [1.0, math.nan, 1.0]}, "NaN or infinity in logits/abs_max at step 1"),
        (
            {"sys/monitor/dropped": [0.0, 3.0, 3.0]},
            "records lost in part or whole, noticed at step 1 (3 in all; the host or its disk was too slow)",
        ),
        ({"sys/monitor/failed": [0.0, 0.0, 2.0]}, "failed writes at step 2 (2 in all; the log says which and why)"),
        (
            {"sys/monitor/points_reported": [7.0]},
            "observed points that did not report (7 of 9 reported; report.coverage names them)",
        ),
        ({"loss/mean": ([0, 1, 5], [2.0, 2.0, 2.0])}, "no record at steps 2-4"),
    ],
)
def test_each_kind_of_trouble_is_found_and_nothing_else(change, text):
    assert [str(item) for item in find_unusual(FakeRun(QUIET | change))] == [text]


def test_the_layer_of_a_nan_is_named():
    run = FakeRun(
        QUIET | {"act/abs_max": ([0, 100], [1.0, math.inf])}, which={"act/abs_max": ([0, 100], ["act/a", "act/b"])}
    )
    assert [str(item) for item in find_unusual(run)] == ["NaN or infinity in act/abs_max at step 100 (first in act/b)"]


def test_thresholds_are_those_of_the_run_or_given():
    manifest = {"attempts": [{"first_step": 0, "plan": repr(Plan(theta=5.0))}]}
    assert [item.steps for item in find_unusual(FakeRun(QUIET, manifest))] == [(2,)]
    assert find_unusual(FakeRun(QUIET, manifest), Plan(theta=10.0)) == []


def test_later_attempts_and_events_are_named():
    manifest = {"attempts": [{"first_step": 0, "plan": None}, {"first_step": 2, "plan": None}]}
    events = [{"step": 9, "kind": "rollback"}, {"step": 4, "kind": "rollback"}, {"step": 0, "kind": "attempt"}]
    found = [str(item) for item in find_unusual(FakeRun(QUIET, manifest, events))]
    assert found == ["run resumed or rolled back at step 2", "rollback at steps 4, 9"]
    events = [{"step": 2, "kind": "attempt", "payload": {"first_step": 2, "superseded_through": 1234}}]
    (found,) = find_unusual(FakeRun(QUIET, manifest, events))
    assert str(found) == "run resumed or rolled back at step 2 (done again: steps 2-1,234)"


def test_a_count_that_begins_again_after_a_resume_is_added_up():
    (found,) = find_unusual(FakeRun(QUIET | {"data/empty_steps": [0.0, 2.0, 2.0, 0.0, 1.0]}))
    assert str(found) == "batch without a valid token at steps 1, 4 (3 in all)"


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([5], "step 5"),
        ([1, 2], "steps 1-2"),
        ([1, 3, 4, 5, 1000], "steps 1, 3-5, 1,000"),
        (list(range(0, 20, 2)), "steps 0, 2, 4, 6, 8, 10 and 4 more stretches"),
    ],
)
def test_format_steps(steps, text):
    assert format_steps(steps) == text


def test_text_of_a_trouble_without_a_place():
    assert str(Unusual("writes that failed", (), "2")) == "writes that failed (2)"


def test_the_screen_prints_both_parts():
    from rich.console import Console

    for series, said in (
        (QUIET, "What was unusual: nothing"),
        (QUIET | {"alert/co_spike": [1.0, 0.0, 0.0]}, "  - co-spike"),
    ):
        out = io.StringIO()
        print_screen(FakeRun(series), Console(file=out, width=120))
        assert "First screen, step 2" in out.getvalue()
        assert said in out.getvalue()
