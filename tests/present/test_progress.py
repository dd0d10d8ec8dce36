from __future__ import annotations

import io
import math
import re

import numpy as np
import pytest
from rich.console import Console

from probes_jax.present.progress import LatestSignals, LiveSignals
from probes_jax.present.state import State
from probes_jax.spec.plan import Plan
from probes_jax.spec.readings import Readings

LIGHT = ("loss/mean", "grad/norm", "loss/spike/score", "grad/abs_mean", "alert/co_spike")
FULL = (*LIGHT, "act/abs_max")
ALL = (*FULL, "grad/clip_rate", "alert/co_spike/count")


def _readings(step, values, names=LIGHT):
    filled = [math.nan if value is None else value for value in values]
    return Readings(step, "light", names, np.array(filled), np.array([value is not None for value in values]))


class _Recorder:
    latest: Readings | None = None
    late: Readings | None = None  # what comes only when one waits for it

    def flush(self, limit=60.0):
        self.latest = self.late or self.latest
        return True


class _Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_only_signals_are_shown():
    latest = LatestSignals(Plan())
    latest.see(_readings(0, [2.0, 1.0, None, 0.1, 0.0]))
    assert latest.texts() == [
        ("loss/mean", "2.000", State.NEW),
        ("grad/norm", "1.000", State.NEW),
        ("alert/co_spike", "0", State.OK),
    ]


def test_nothing_and_the_same_step_are_ignored():
    latest = LatestSignals(Plan())
    latest.see(None)
    assert latest.step is None and latest.texts() == []
    latest.see(_readings(3, [2.0, 1.0, None, 0.1, 0.0]))
    latest.see(_readings(3, [9.0, 9.0, None, 0.1, 0.0]))
    assert latest.values["loss/mean"][0] == 2.0


def test_a_rare_signal_keeps_its_value_and_an_absent_one_does_not_become_zero():
    latest = LatestSignals(Plan())
    latest.see(_readings(0, [2.0, 1.0, None, 0.1, None, 7.0], FULL))
    latest.see(_readings(1, [None, 1.5, None, 0.1, None]))
    shown = {name: text for name, text, _ in latest.texts()}
    assert shown == {"loss/mean": "2.000", "grad/norm": "1.500", "act/abs_max": "7.000"}


@pytest.mark.parametrize(
    ("values", "name", "state"),
    [
        ([2.0, 1.0, 6.5, 0.1, 0.0], "loss/mean", State.ALERT),
        ([2.0, 1.0, 4.0, 0.1, 0.0], "loss/mean", State.WATCH),
        ([2.0, math.nan, 0.0, 0.1, 0.0], "grad/norm", State.ALERT),
        ([2.0, 1.0, 0.0, 0.1, 1.0], "alert/co_spike", State.ALERT),
        ([2.0, 1.0, 0.0, 0.1, 0.0], "loss/mean", State.OK),
        ([2.0, 1.0, None, 0.1, 0.0], "loss/mean", State.NEW),
        ([2.0, 1.0, 0.0, 0.1, 0.0], "alert/co_spike", State.OK),
        ([2.0, 1.0, 0.0, 0.1, 0.0, 7.0], "act/abs_max", None),
        ([2.0, 1.0, 0.0, 0.1, 0.0, math.inf], "act/abs_max", State.ALERT),
        ([2.0, 1.0, 0.0, 0.1, 0.0, 7.0, 0.5], "grad/clip_rate", State.OK),
        ([2.0, 1.0, 0.0, 0.1, 0.0, 7.0, 0.5, 0.0], "alert/co_spike/count", State.OK),
        ([2.0, 1.0, 0.0, 0.1, 0.0, 7.0, 0.5, 2.0], "alert/co_spike/count", State.WATCH),
    ],
)
def test_states(values, name, state):
    latest = LatestSignals(Plan())
    latest.see(_readings(0, values, ALL[: len(values)]))
    assert latest.values[name][1] is state


def test_a_signal_without_a_score_is_not_green():
    out, recorder = io.StringIO(), _Recorder()
    console = Console(file=out, width=120, force_terminal=True, color_system="standard")
    with LiveSignals(recorder, Plan(), total=8, console=console) as live:
        recorder.latest = _readings(3, [2.0, 1.0, 0.0, 0.1, 0.0, 7.0], FULL)
        live.update()
    green = re.findall(r"\x1b\[32m *([\d.]+)", out.getvalue())
    assert {"2.000", "0"} <= set(green), "the loss has a score, and no co-spike is one that is over"
    assert not {"1.000", "7.000"} & set(green)


def test_plain_lines_are_few_and_the_last_step_is_said():
    out, clock, recorder = io.StringIO(), _Clock(), _Recorder()
    console = Console(file=out, width=120, force_terminal=False)
    with LiveSignals(recorder, Plan(), total=40, console=console, every=10.0, clock=clock) as live:
        for step in range(40):
            if step >= 2:  # the device needs a while
                recorder.latest = _readings(step - 2, [2.0, 1.0, 7.0 if step == 14 else 0.0, 0.1, 0.0])
            live.update()
            clock.now += 1.0
    lines = out.getvalue().splitlines()
    assert lines == [
        "compiling the full program (step 0)",
        "compiling the light program (step 1)",
        "step 1/40  loss/mean 2.000  grad/norm 1.000",
        "step 11/40  loss/mean 2.000  grad/norm 1.000",
        "step 21/40  loss/mean 2.000  grad/norm 1.000",
        "step 31/40  loss/mean 2.000  grad/norm 1.000",
        "step 38/40  loss/mean 2.000  grad/norm 1.000",
    ]


def _ended_by(error, steps=1):
    """What is printed of a run of 9 steps whose last values come only when they are waited for."""
    out, recorder = io.StringIO(), _Recorder()
    try:
        with LiveSignals(recorder, Plan(), total=9, console=Console(file=out, force_terminal=False)) as live:
            for step in range(steps):
                recorder.latest = _readings(step, [2.0], ("loss/mean",))
                recorder.late = _readings(8, [3.0], ("loss/mean",))
                live.update()
            if error:
                raise error
    except (KeyboardInterrupt, ZeroDivisionError):
        pass
    return [line for line in out.getvalue().splitlines() if not line.startswith("compiling")]


def test_the_last_steps_are_waited_for_unless_an_error_ends_the_run():
    first, last = "step 1/9  loss/mean 2.000", "step 9/9  loss/mean 3.000"
    assert _ended_by(None) == [first, last]
    assert _ended_by(KeyboardInterrupt) == [first, "stopping, writing what is left ...", last]
    assert _ended_by(ZeroDivisionError) == [first]


def test_stopped_before_the_first_step_nothing_is_said_to_be_written():
    assert _ended_by(KeyboardInterrupt, steps=0) == ["stopping ..."]


def test_a_second_interrupt_leaves_no_bar_behind():
    class Impatient(_Recorder):
        def flush(self, limit=60.0):
            raise KeyboardInterrupt

    console = Console(file=io.StringIO(), force_terminal=True)
    with pytest.raises(KeyboardInterrupt), LiveSignals(Impatient(), Plan(), total=9, console=console) as live:
        raise KeyboardInterrupt
    assert not live._live.is_started


def test_an_alert_stands_in_the_plain_line():
    out, recorder = io.StringIO(), _Recorder()
    with LiveSignals(recorder, Plan(), total=1, console=Console(file=out, force_terminal=False)) as live:
        recorder.latest = _readings(0, [2.0, math.inf, 0.0, 0.1, 0.0])
        live.update()
    assert "ALERT grad/norm inf" in out.getvalue()


def test_in_a_terminal_the_bar_and_all_signals_are_drawn():
    out, recorder = io.StringIO(), _Recorder()
    console = Console(file=out, width=120, force_terminal=True)
    with LiveSignals(recorder, Plan(), total=8, console=console) as live:
        recorder.latest = _readings(3, [2.0, 1.0, 0.0, 0.1, 0.0, 7.0], FULL)
        live.update()
    last = out.getvalue()
    assert "4/8" in last and "act/abs_max" in last and "7.000" in last


@pytest.mark.parametrize(
    ("scan_every", "first", "total", "expected"),
    [
        (100, 0, 8, ["full program (step 0)", "light program (step 1)"]),
        (100, 98, 108, ["light program (step 98)", "full program (step 100)"]),
        (1, 0, 8, ["full program (step 0)"]),
        (100, 0, 1, ["full program (step 0)"]),
    ],
)
def test_each_program_that_is_waited_for_is_said_once(scan_every, first, total, expected):
    out = io.StringIO()
    console, plan = Console(file=out, force_terminal=False), Plan(scan_every=scan_every)
    with LiveSignals(_Recorder(), plan, total=total, first=first, console=console) as live:
        for _ in range(first, total):
            live.update()
    assert out.getvalue().splitlines() == [f"compiling the {program}" for program in expected]


def test_in_a_terminal_the_bar_says_what_is_compiled():
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True)
    with LiveSignals(_Recorder(), Plan(), total=8, console=console) as live:
        live._live.refresh()
        assert "compiling the full program (step 0)" in out.getvalue()
        live.update()
        live._live.refresh()
        assert "compiling the light program (step 1)" in out.getvalue()
        live.update()
        live._live.refresh()
        assert "training" in out.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_where_monitoring_is_off_that_is_said_and_nothing_is_compiled(monkeypatch, terminal):
    monkeypatch.setenv("PROBES_JAX", "off")
    out = io.StringIO()
    with LiveSignals(
        _Recorder(), Plan(), total=3, console=Console(file=out, force_terminal=terminal, width=100)
    ) as live:
        for _ in range(3):
            live.update()
    text = out.getvalue()
    assert "monitoring is off (PROBES_JAX=off)" in text and "compiling" not in text
    assert terminal or text.count("off") == 2, "one line"
