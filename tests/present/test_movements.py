"""What moved, in the order in which it moved; what moved first; and that every alert has a line."""

from __future__ import annotations

import math

import numpy as np
import pytest

from probes_jax.host.happenings import KINDS
from probes_jax.present.first_screen import first_screen
from probes_jax.present.state import DETECTORS, State
from probes_jax.present.unusual import find_unusual

from .record import FakeRun

STEPS = 60


def scores(at):
    return [7.0 if step in at else 0.0 for step in range(STEPS)]


def run_of(rate=None, loss=(41, 42), grad=(41,), update=(40, 41), **more):
    series = {
        "loss/mean": [2.0] * STEPS,
        "grad/norm": [1.0] * STEPS,
        "update/norm": [0.1] * STEPS,
        "loss/spike/score": scores(loss),
        "grad/spike/score": scores(grad),
        "update/spike/score": scores(update),
    }
    if rate is not None:
        series["opt/learning_rate"] = rate
    return FakeRun(series | {name.replace("__", "/"): values for name, values in more.items()})


def lines(run):
    return [str(item) for item in find_unusual(run)]


def test_the_order_is_that_of_the_first_step_and_what_moved_first_is_named():
    found = lines(run_of())
    assert found[0] == "update/norm moved first at step 40"
    assert [line.split(" at ")[0] for line in found[1:]] == [
        "spike of update/norm",
        "spike of loss/mean",
        "spike of grad/norm",
    ]
    assert lines(run_of(update=(43,)))[0] == "loss/mean and grad/norm moved first at step 41"


@pytest.mark.parametrize(
    "quiet",
    [
        {"loss": (), "grad": (), "update": (40,)},  # one signal alone
        {"loss": (41,), "grad": (41,), "update": ()},  # all at once
        {"loss": (5,), "grad": (50,), "update": ()},  # two troubles
    ],
)
def test_where_none_of_a_trouble_was_first_none_is_named(quiet):
    assert not [line for line in lines(run_of(**quiet)) if "moved first" in line]


def test_of_several_troubles_the_one_in_which_most_moved_is_told():
    assert lines(run_of(loss=(2, 45), grad=(45,), update=(44,)))[0] == "update/norm moved first at step 44"


@pytest.mark.parametrize(
    ("rates", "line"),
    [
        (
            [3e-3] * 40 + [3.0] * 20,
            "opt/learning_rate went from 0.003000 to 3.000 at step 40 (1,000x, as the first signal moved)",
        ),
        (
            [3e-3] * 38 + [3e-2] * 22,
            "opt/learning_rate went from 0.003000 to 0.03000 at step 38 (10x, 2 steps before the first movement)",
        ),
        (
            [3e-3] * 39 + [3e-4] * 21,
            "opt/learning_rate went from 0.003000 to 0.0003000 at step 39 (0.1x, 1 step before the first movement)",
        ),
        ([3e-3] * 29 + [3.0] * 31, None),  # long before
        ([3e-3] * 41 + [3.0] * 19, None),  # after
        ([1e-5 * (step + 1) for step in range(STEPS)], None),  # warm-up
        ([0.0] * 40 + [3e-3] * 20, None),  # from nothing is no factor
    ],
)
def test_a_learning_rate_that_changed_just_before_is_named(rates, line):
    found = [text for text in lines(run_of(rate=rates)) if "learning_rate" in text]
    assert found == ([] if line is None else [line])


def test_each_group_has_a_learning_rate_of_its_own():
    rates = {"opt__learning_rate__embed": [1e-3] * STEPS, "opt__learning_rate__rest": [1e-3] * 40 + [1.0] * 20}
    (line,) = [text for text in lines(run_of(**rates)) if "learning_rate" in text]
    assert line.startswith("opt/learning_rate/rest went from 0.001000 to 1.000")


def test_an_update_that_was_not_finite_is_told_by_what_was_behind_it():
    accepted = [0.0] * 40 + [1.0, 2.0, 3.0] + [3.0] * 17
    nonfinite = [0.0] * 41 + [1.0, 2.0] + [2.0] * 17
    found = lines(FakeRun({"alert/nonfinite_accepted": accepted, "alert/nonfinite_steps": nonfinite}))
    assert found == [
        "update applied whose norm is NaN or infinite, made from a finite loss and gradient at step 40",
        "NaN or infinite loss or gradient at steps 41-42 (2 in all)",
        "update applied that was made from a NaN or infinite loss or gradient at steps 41-42",
    ]


def test_copies_that_differ_are_told_with_the_first_tensor():
    which = {"replica/divergent_tensors": ([0, 100, 200], ["", "replica/param/a", "replica/param/a"])}
    run = FakeRun({"replica/divergent_tensors": ([0, 100, 200], [0.0, 1.0, 3.0])}, which=which)
    (line,) = lines(run)
    assert line.startswith(
        "copies of a tensor differ from device to device at steps 100, 200 (first in replica/param/a"
    )


def test_the_guard_s_stop_is_told_once():
    event = {"step": 5, "kind": KINDS["alert/guard/stopped"], "payload": {}}
    run = FakeRun({"alert/guard/stopped": [0.0] * 5 + [1.0, 1.0]}, events=[event])
    assert lines(run) == ["run stopped by the guard at step 5"]


def test_a_score_that_the_host_made_has_a_line_with_its_value():
    quiet = (4.0 + 0.01 * np.random.default_rng(0).normal(size=59)).tolist()
    (line,) = [text for text in lines(FakeRun({"logits/abs_max": [*quiet, 40.0]})) if "logits" in text]
    assert line == "spike of logits/abs_max at step 59 (40.00 at 59, 10x its median)"
    scans = FakeRun({"act/abs_max": ([0, 100, 200, 300], [8.0, 9.0, 10.0, 2.43e5])})
    assert lines(scans) == ["spike of act/abs_max at step 300 (2.430e+05 at 300, 27,000x its median)"]


_OF = {"alert/co_spike": "co-spike", "alert/nonfinite_accepted": "update applied", "alert/guard/stopped": "guard"}


@pytest.mark.parametrize("last", [math.nan, math.inf, 1e9])
def test_every_signal_in_alert_has_a_line(last):
    names = [signal.name for signal in first_screen(FakeRun({})) if signal.name not in _OF]
    names += ["loss/group/law/mean"]
    series = {name: [2.0] * 40 + [last] for name in names}
    series |= {f"{signal}/spike/score": [0.0] * 40 + [math.inf] for signal in DETECTORS.values()}
    series |= {name: [0.0] * 40 + [1.0] for name in _OF}
    run = FakeRun(series)
    alerts = [signal.name for signal in first_screen(run) if signal.state is State.ALERT]
    assert {"logits/abs_max", "loss/worst_shard", "loss/group/law/mean", "act/abs_max", *_OF} <= set(alerts)
    found = lines(run)
    for name in alerts:
        assert any(_OF.get(name, name) in line for line in found), name
