from __future__ import annotations

import io
import math

import numpy as np
import pytest

from probes_jax.host.run_folder import open_run
from probes_jax.host.store_sink import StoreSink
from probes_jax.present.screen import print_screen
from probes_jax.present.trouble import Unusual, format_steps
from probes_jax.present.unusual import find_unusual
from probes_jax.spec.plan import Plan
from probes_jax.spec.readings import Readings

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
            "observed points that did not report (7 of 9 reported; probes coverage names them)",
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


def _attempts(*firsts):
    return {"attempts": [{"attempt": i + 1, "first_step": first, "plan": None} for i, first in enumerate(firsts)]}


def _begin(attempt, first, **payload):
    return {"attempt": attempt, "step": first, "kind": "attempt", "payload": {"first_step": first, **payload}}


def test_events_are_named_and_a_resumed_run_is():
    events = [{"step": 9, "kind": "rollback"}, {"step": 4, "kind": "rollback"}, _begin(1, 0), _begin(2, 2)]
    found = [str(item) for item in find_unusual(FakeRun(QUIET, _attempts(0, 2, None), events))]
    assert found == ["run resumed at step 2 (attempt 2)", "rollback at steps 4, 9"]


def test_each_attempt_says_for_itself_what_it_did_again():
    """Two attempts begin with step 10: the first goes on, the second goes back."""
    events = [_begin(1, 0), _begin(2, 10), _begin(3, 10, superseded_through=14), _begin(4, 3, superseded_through=1234)]
    found = [str(item) for item in find_unusual(FakeRun(QUIET, _attempts(0, 10, 10, 3), events))]
    assert found == [
        "run resumed at step 10 (attempt 2)",
        "run started again at step 10 (attempt 3, in place of earlier steps 10-14)",
        "run started again at step 3 (attempt 4, in place of earlier steps 3-1,234)",
    ]


def test_many_attempts_are_no_long_list():
    events = [_begin(n, 5, superseded_through=5) for n in range(2, 12)]
    found = [str(item) for item in find_unusual(FakeRun(QUIET, _attempts(0, *[5] * 10), events))]
    assert found[0] == "run started again at step 5 (attempt 6, in place of earlier step 5)"
    assert found[-1] == "run started again 4 times more, before these" and len(found) == 7
    found = [str(item) for item in find_unusual(FakeRun(QUIET, _attempts(0, *range(10, 90, 10)), []))]
    assert found == [
        "run resumed at steps 10, 20, 30, 40, 50, 60 and 2 more stretches (attempts 2, 3, 4, 5, 6, 7, ...)"
    ]


def test_a_recorded_run_that_was_resumed_and_then_rolled_back(tmp_path):
    for first, end in ((0, 10), (10, 15), (10, 20)):
        sink = StoreSink(tmp_path)
        for step in range(first, end):
            sink.write(Readings(step, "light", ("loss/mean",), np.ones(1), np.ones(1, bool)))
        sink.close()
    assert [str(item) for item in find_unusual(open_run(tmp_path))] == [
        "run resumed at step 10 (attempt 2)",
        "run started again at step 10 (attempt 3, in place of earlier steps 10-14)",
    ]


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


def test_the_screen_goes_to_standard_output_by_default(capsys):
    print_screen(FakeRun(QUIET))
    assert "First screen, step 2" in capsys.readouterr().out


def _printed(manifest=None):
    from rich.console import Console

    out = io.StringIO()
    print_screen(FakeRun(QUIET, manifest), Console(file=out, width=120))
    return out.getvalue()


def test_the_title_says_when_the_last_attempt_began():
    attempts = [
        {"attempt": 1, "first_step": 0, "created": 0.0},
        {"attempt": 2, "first_step": 2, "created": 1796045155.3},
    ]
    assert _printed({"attempts": attempts}).splitlines()[0].strip() == (
        "First screen, step 2, begun 2026-11-30 13:25 UTC"
    )
    assert _printed({"attempts": [], "created": 0.0}).startswith("First screen, step 2, begun 1970-01-01 00:00 UTC")
    assert _printed().splitlines()[0].strip() == "First screen, step 2"


def test_with_monitoring_off_the_screen_says_that_it_is_an_older_run(monkeypatch):
    assert "PROBES_JAX=off" not in _printed()
    monkeypatch.setenv("PROBES_JAX", "off")
    assert _printed().startswith("Here monitoring is off (PROBES_JAX=off): nothing is recorded.")
