from __future__ import annotations

import io
import math

import numpy as np
import pytest

from probes_jax.present.first_screen import NOT_IN_EVERY_RUN, first_screen, format_value
from probes_jax.present.screen import print_screen
from probes_jax.present.state import State, since, states
from probes_jax.present.table import signals_table
from probes_jax.spec.catalog import REGISTRY
from probes_jax.spec.metric import Priority
from probes_jax.spec.plan import Guard, Plan

from .record import FakeRun


def _row(run, name):
    return next(signal for signal in first_screen(run) if signal.name == name)


def test_every_signal_has_a_row_in_the_order_of_the_registry():
    run = FakeRun({"loss/group/code/mean": [1.0], "loss/group/law/mean": [2.0], "loss/mean": [3.0]})
    shown = [signal.name for signal in first_screen(run)]
    plain = [spec.name for spec in REGISTRY if spec.priority is Priority.P0 and "{" not in spec.name]
    plain = [name for name in plain if not name.startswith(NOT_IN_EVERY_RUN)]  # no copies, no experts
    assert [name for name in shown if name in plain] == plain
    assert set(shown) - set(plain) == {"loss/group/code/mean", "loss/group/law/mean"}


def test_no_data_is_not_zero():
    row = _row(FakeRun({"loss/mean": [3.0]}), "grad/norm")
    assert (row.state, row.value, row.step, row.since) == (State.NO_DATA, None, None, None)
    absent = _row(FakeRun({"grad/norm": [None, None]}), "grad/norm")
    assert (absent.state, absent.value) == (State.NO_DATA, None)


def test_the_group_other_is_shown_once_it_has_a_token():
    quiet = {"loss/group/other/mean": [None, None], "loss/group/other/token_share": [0.0, 0.0]}
    assert not any("other" in signal.name for signal in first_screen(FakeRun(quiet)))
    used = FakeRun({"loss/group/other/mean": [None, 2.0], "loss/group/other/token_share": [0.0, 0.1]})
    assert sum("other" in signal.name for signal in first_screen(used)) == 2


def test_the_last_measured_value_and_its_step():
    row = _row(FakeRun({"act/abs_max": ([0, 100, 200], [1.0, 7.0, None])}), "act/abs_max")
    assert (row.value, row.step, row.state, row.since) == (7.0, 100, State.NEW, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["loss/mean", "grad/clip_rate", "logits/abs_max", "alert/co_spike/count"])
def test_a_value_that_is_not_finite_is_an_alert(name, bad):
    row = _row(FakeRun({name: [0.0, 0.0, bad, bad]}), name)
    assert (row.state, row.since) == (State.ALERT, 2)


@pytest.mark.parametrize(
    ("score", "state"),
    [
        (None, State.NEW),
        (2.9, State.OK),
        (3.1, State.WATCH),
        (6.0, State.WATCH),
        (6.1, State.ALERT),
        (math.inf, State.ALERT),
    ],
)
def test_the_score_of_the_detector_decides(score, state):
    for name, signal in (("loss/mean", "loss"), ("grad/norm", "grad")):
        row = _row(FakeRun({name: [1.0, 1.0], f"{signal}/spike/score": [None, score]}), name)
        assert row.state is state
        assert row.since == (0 if state is State.NEW else 1)


def test_the_scores_need_not_cover_every_step():
    run = FakeRun({"loss/mean": ([0, 5, 9], [1.0, 1.0, 1.0]), "loss/spike/score": ([5], [7.0])})
    steps, _, found = states(run, "loss/mean", Plan(min_history=2))
    assert steps.tolist() == [0, 5, 9] and found.tolist() == [State.NEW, State.ALERT, State.OK]


def test_of_a_long_run_the_last_steps_are_looked_at():
    run = FakeRun({"loss/mean": [1.0] * 5 + [math.nan] * 5 + [1.0] * 5})
    steps, values, found = states(run, "loss/mean", Plan(min_history=5), recent=6)
    assert steps.tolist() == [9, 10, 11, 12, 13, 14] and np.isnan(values[0])
    assert found.tolist() == [State.ALERT] + [State.OK] * 5, "the steps before are no part of it, but they are history"


def test_without_enough_earlier_values_a_signal_is_new():
    for count, state in ((0, State.NEW), (31, State.NEW), (32, State.OK)):
        assert _row(FakeRun({"logits/abs_max": [1.0] * count + [1.0]}), "logits/abs_max").state is state
    assert _row(FakeRun({"logits/abs_max": [math.nan] * 40 + [1.0]}), "logits/abs_max").state is State.NEW
    assert _row(FakeRun({"loss/group/law/token_share": [0.0] * 40}), "loss/group/law/token_share").state is State.OK
    assert _row(FakeRun({"grad/clip_rate": [0.0]}), "grad/clip_rate").state is State.OK, "it never has a score"


@pytest.mark.parametrize(
    ("values", "state"),
    [
        ([9.0, 10.0], State.NEW),
        ([9.0, 10.0, 2.4e5], State.NEW),  # too few for a median
        ([9.0, 10.0, 11.0, 2.4e5], State.ALERT),
        ([9.0, 10.0, 11.0, 60.0], State.WATCH),
        ([9.0, 10.0, 11.0, 40.0], State.NEW),
        ([9.0, 10.0, 11.0, 0.001], State.NEW),
        ([0.0, 0.0, 0.0, 1.0], State.NEW),
        ([10.0] * 32 + [10.5], State.ALERT),  # there is a score now, and it is stricter
    ],
)
def test_until_a_scanned_signal_has_a_score_it_is_compared_with_its_earlier_scans(values, state):
    steps = range(0, 100 * len(values), 100)
    assert _row(FakeRun({"act/abs_max": (steps, values)}), "act/abs_max").state is state
    if len(values) < 32:  # what every step measures has to wait for its score
        assert _row(FakeRun({"logits/abs_max": values}), "logits/abs_max").state is State.NEW


def test_a_signal_without_a_detector_is_scored_against_itself():
    quiet = (2.0 + 0.01 * np.random.default_rng(0).normal(size=100)).tolist()
    for last, state in ((2.0, State.OK), (2.05, State.WATCH), (4.0, State.ALERT)):
        row = _row(FakeRun({"loss/group/law/mean": [*quiet, last]}), "loss/group/law/mean")
        assert row.state is state, last


def test_alarms_and_counts_of_troubles():
    run = FakeRun(
        {
            "alert/co_spike": [None, 0.0, 1.0, 0.0],
            "alert/co_spike/count": [0.0, 0.0, 1.0, 1.0],
            "alert/guard/stopped": [0.0, 0.0, 0.0, 1.0],
            "alert/nonfinite_accepted": [0.0, 2.0, 2.0, 2.0],
            "replica/divergent_tensors": [0.0, 0.0, 1.0, 1.0],
        }
    )
    found = {signal.name: (signal.state, signal.since) for signal in first_screen(run)}
    assert found["alert/co_spike"] == (State.OK, 3)
    assert found["alert/co_spike/count"] == (State.WATCH, 2)
    assert found["alert/guard/stopped"] == (State.ALERT, 3)
    assert found["alert/nonfinite_accepted"] == (State.ALERT, 1)
    assert found["replica/divergent_tensors"] == (State.ALERT, 2)


@pytest.mark.parametrize(
    ("guard", "stopped", "shown"),
    [(None, 0.0, False), (None, 1.0, True), (None, math.nan, True), (Guard(), 0.0, True), (Guard(), 1.0, True)],
)
def test_without_a_guard_its_quiet_alarm_is_not_shown(guard, stopped, shown):
    for plan in (repr(Plan(guard=guard)), {"guard": guard and {"nonfinite": True}}):
        run = FakeRun({"alert/guard/stopped": [stopped]}, {"attempts": [{"first_step": 0, "plan": plan}]})
        assert any(signal.name == "alert/guard/stopped" for signal in first_screen(run)) is shown


def test_a_rising_clip_rate_is_no_spike():
    rates = [0.001] * 60 + [0.5]
    assert _row(FakeRun({"grad/clip_rate": rates}), "grad/clip_rate").state is State.OK


def test_thresholds_are_those_of_the_run():
    manifest = {"attempts": [{"first_step": 0, "plan": repr(Plan(theta=2.0))}]}
    run = FakeRun({"loss/mean": [1.0], "loss/spike/score": [2.5]}, manifest)
    assert _row(run, "loss/mean").state is State.ALERT


def test_the_layer_behind_a_worst_of_signal():
    run = FakeRun({"act/abs_max": ([0, 100], [1.0, 2.0])}, which={"act/abs_max": ([0, 100], ["act/a", "act/b"])})
    assert _row(run, "act/abs_max").where == "act/b"


@pytest.mark.parametrize(("history", "start"), [([0, 0, 0], 10), ([0, 2, 2], 11), ([2, 0, 2], 12), ([1], 10)])
def test_since(history, start):
    assert since(np.arange(10, 10 + len(history)), np.array(history)) == start


def test_since_of_nothing():
    assert since(np.zeros(0, int), np.zeros(0, int)) is None


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "1", "-"),
        (math.nan, "count", "NaN"),
        (-math.inf, "1", "-inf"),
        (0.0, "1", "0"),
        (3.14159, "1", "3.142"),
        (0.0123456, "1", "0.01235"),
        (12345.6, "1", "12346"),
        (123456.0, "1", "1.235e+05"),
        (0.00001234, "1", "1.234e-05"),
        (-2.5, "nat", "-2.500"),
        (16777217.0, "count", "16,777,217"),
    ],
)
def test_format_value(value, unit, text):
    assert format_value(value, unit) == text


def test_the_table_shows_every_cell():
    from rich.console import Console

    run = FakeRun({"loss/mean": [2.0, math.nan], "grad/norm": [0.5, None], "act/abs_max": ([1], [3.0])})
    out = io.StringIO()
    Console(file=out, width=120).print(signals_table(first_screen(run), title="Now"))
    lines = {line.split()[0]: line.split() for line in out.getvalue().splitlines() if line.strip()}
    assert lines["loss/mean"] == ["loss/mean", "NaN", "nat/token", "alert", "1"]
    assert lines["grad/norm"] == ["grad/norm", "0.5000", "new", "0", "at", "step", "0"], "measured before the last step"
    assert lines["act/abs_max"] == ["act/abs_max", "3.000", "new", "1"]
    assert lines["logits/abs_max"] == ["logits/abs_max", "-", "no", "data", "-"]


def test_at_80_columns_only_where_is_folded():
    from rich.console import Console

    layer = "act/decoder/blocks_11/attention/out_projection"
    series = {"loss/group/code/token_share": [0.25], "act/abs_max": ([123456], [12345.678])}
    run = FakeRun({**series, "loss/mean": [2.0]}, which={"act/abs_max": ([123456], [layer])})
    out = io.StringIO()
    Console(file=out, width=80).print(signals_table(first_screen(run)))
    lines = out.getvalue().splitlines()
    firsts = {line.split()[0] for line in lines if line.strip()}
    assert {signal.name for signal in first_screen(run)} <= firsts
    assert max(map(len, lines)) <= 80 and "…" not in out.getvalue()
    heading = next(line for line in lines if "where" in line)
    assert layer in "".join(line[heading.index("where") :].strip() for line in lines)


@pytest.mark.parametrize(("flight", "said"), [(None, False), (1, False), (2, True)])
def test_a_flight_record_that_goes_on_is_named(flight, said):
    from rich.console import Console

    out = io.StringIO()
    print_screen(FakeRun({"loss/mean": [3.0, 2.0]}, flight=flight), Console(file=out, width=80), "runs/a")
    line = 'The flight record goes on to step 2: read it with probes_jax.open_run("runs/a").flight()'
    assert (line in out.getvalue().splitlines()) is said
