"""Under the first screen: why a signal has no data, where the run's coverage says."""

from __future__ import annotations

import io

import pytest

from probes_jax.present.first_screen import first_screen
from probes_jax.present.reasons import find_reasons
from probes_jax.present.screen import print_screen
from probes_jax.spec.coverage import Coverage, SeenPoint
from probes_jax.spec.plan import Plan

from .record import FakeRun

POINT = SeenPoint("block", reported=True)
MISSING = (("grad/clip_rate", "name the clip"), ("logits", "say which"), ("grad_act", "use value_and_grad"))


def _entry(program, coverage):
    return {"attempt": 1, "program": program, "layout": "", "coverage": coverage}


def without_data(series, *entries):
    """The lines of the section, by signal."""
    from rich.console import Console

    out = io.StringIO()
    print_screen(FakeRun(series, coverage=[_entry(*entry) for entry in entries]), Console(file=out, width=300))
    text = out.getvalue()
    assert text.count("What was unusual") == 1
    if "Without data:" not in text:
        return {}
    lines = text.split("Without data:\n")[1].split("\n\n")[0].splitlines()
    told = dict(line.strip().removeprefix("- ").split(": ", 1) for line in lines)
    return {name: reason for names, reason in told.items() for name in names.split(", ")}


def test_what_the_coverage_knows_is_said_of_the_signal_or_of_its_family():
    found = without_data({"loss/mean": [1.0]}, ("full", Coverage((POINT,), MISSING)))
    assert found == {
        "logits/abs_max": "say which",
        "grad/clip_rate": "name the clip",
        "grad_act/abs_max": "use value_and_grad",
        "alert/co_spike": "there is one after 32 steps with a loss and a gradient (Plan.min_history)",
    }


def test_signals_that_miss_for_one_reason_share_a_line():
    why = tuple((name, "the loss is one number") for name in ("act", "grad_act", "logits", "loss/shard"))
    found = find_reasons(
        run := FakeRun({"loss/mean": [1.0]}, coverage=[_entry("full", Coverage((), why))]), first_screen(run), Plan()
    )
    assert found[0] == ("loss/worst_shard, logits/abs_max, act/abs_max, grad_act/abs_max: the loss is one number"), (
        "the worst shard by what it is the worst of, and what the run says goes before what it lacks"
    )


def test_what_has_data_needs_no_reason():
    series = {name: [1.0] for name in ("grad/clip_rate", "logits/abs_max", "grad_act/abs_max", "alert/co_spike")}
    assert without_data(series, ("full", Coverage((POINT,), MISSING))) == {}
    assert list(without_data({"loss/mean": [1.0]})) == ["alert/co_spike"]  # and the coverage of the run is unknown


@pytest.mark.parametrize(("program", "words"), [("light", "Only the light program"), ("full", "observes activations")])
def test_a_run_that_observed_no_activations(program, words):
    found = without_data({"loss/mean": [1.0]}, (program, Coverage((), ())))
    assert words in found["act/abs_max"] and found["act/abs_max"] == found["grad_act/abs_max"]
