"""What is left out above the budget, in which order, and that it does not go back and forth."""

import inspect
import itertools
import logging
import re
import threading

import numpy as np
import pytest

import probes_jax as pj
from probes_jax.host import upkeep
from probes_jax.host.budget import Budget, Shed
from probes_jax.host.cost import HostCost
from probes_jax.host.upkeep import UPKEEP_NAMES, Upkeep
from probes_jax.present.unusual import find_unusual
from probes_jax.spec.catalog import REGISTRY
from probes_jax.spec.metric import Priority
from probes_jax.spec.online import priority_of
from probes_jax.spec.readings import Readings
from tests.contracts.source import ROOT
from tests.host.recorder_fakes import FULL, LIGHT, DeviceBuffer, FakeReport, ListSink, buffer_of, report, wait_for

NAMES = ("loss/mean", "act/abs_max", "act/x/rms", "loss/shard[0]", "grad/abs_mean", "p2/thing", "sys/monitor/shed")
LEFT = {
    Shed.NOTHING: NAMES,
    Shed.LAYERS: ("loss/mean", "act/abs_max", "grad/abs_mean", "p2/thing", "sys/monitor/shed"),
    Shed.P2: ("loss/mean", "act/abs_max", "grad/abs_mean", "sys/monitor/shed"),
    Shed.P1: ("loss/mean", "act/abs_max", "sys/monitor/shed"),
}


@pytest.fixture
def _p2(monkeypatch):
    """The registry has no P2 metric yet."""
    real = priority_of
    monkeypatch.setattr(
        "probes_jax.host.budget.priority_of", lambda name: Priority.P2 if name == "p2/thing" else real(name)
    )


def _readings(step, program="full", names=NAMES):
    return Readings(step, program, names, np.arange(float(len(names))), np.ones(len(names), bool))


def _at(shed):
    budget = Budget(0.02)
    for _ in range(shed):
        assert budget.judge(0.5)
    assert budget.shed is shed
    return budget


@pytest.mark.usefixtures("_p2")
@pytest.mark.parametrize("shed", list(Shed))
def test_each_step_leaves_out_more_and_never_a_signal(shed):
    budget = _at(shed)
    names = NAMES[:]
    assert budget.lighten(_readings(1, names=names)).names == LEFT[shed]
    light = budget.lighten(_readings(2, "light", names))
    assert light.names == (names if shed is Shed.LAYERS else LEFT[shed])
    assert dict(light.items()) == {name: float(names.index(name)) for name in light.names}


def test_with_layers_left_out_one_full_report_in_ten_is_whole():
    budget = _at(Shed.LAYERS)
    whole = [step for step in range(40) if "act/x/rms" in budget.lighten(_readings(step)).names]
    assert whole == [9, 19, 29, 39]


def test_every_signal_of_the_registry_stays():
    budget = _at(Shed.P1)
    names = tuple(re.sub(r"\{\w+\}", "x", spec.name) for spec in REGISTRY)
    left = set(budget.lighten(_readings(0, names=names)).names)
    assert left == {name for name in names if priority_of(name) is Priority.P0 or name.startswith("sys/")}


def test_one_step_a_window_down_to_the_signals():
    budget = Budget(0.02)
    assert [(budget.judge(0.03), budget.shed.name) for _ in range(5)] == [
        (True, "LAYERS"), (True, "P2"), (True, "P1"), (False, "P1"), (False, "P1"),
    ]  # fmt: skip


def test_between_half_and_the_whole_budget_nothing_changes():
    budget = _at(Shed.P2)
    assert not any(budget.judge(share) for share in [0.019, 0.01, 0.02] * 50)
    assert budget.shed is Shed.P2


def test_a_quiet_window_takes_one_step_back():
    budget = _at(Shed.P2)
    assert [(budget.judge(0.001), budget.shed.name) for _ in range(3)] == [
        (True, "LAYERS"), (True, "NOTHING"), (False, "NOTHING"),
    ]  # fmt: skip


def test_without_a_budget_nothing_is_left_out():
    budget = Budget(None)
    assert not any(budget.judge(9.0) for _ in range(9)) and budget.shed is Shed.NOTHING


def test_it_does_not_go_back_and_forth():
    """The cost falls to nothing once layers are left out, and is back as soon as they are: the worst case."""
    budget, changes = Budget(0.02), []
    for window in range(1000):
        if budget.judge(0.03 if budget.shed is Shed.NOTHING else 0.001):
            changes.append(window)
    gaps = [b - a for a, b in itertools.pairwise(changes)]
    assert gaps[:12] == [1, 1, 2, 1, 4, 1, 8, 1, 16, 1, 32, 1]
    assert set(gaps[12::2]) == {64} and len(changes) < 45


def _upkeep(notes, budget=0.02):
    now = [0.0]
    return Upkeep(budget, lambda *event: notes.append(event), lambda: now[0]), now


def test_each_change_is_an_event_and_a_line(caplog):
    notes = []
    watch, now = _upkeep(notes)
    spent, levels, shares = 0.0, [], []
    for step in range(300):  # a step of a second; 3 % for two minutes, then nothing
        values = dict(zip(UPKEEP_NAMES, watch.measure(_readings(step, "light"), None, spent, 2 * spent)))
        levels.append(values["sys/monitor/shed"])
        shares += [] if values["sys/monitor/record_share"] is None else [(step, values["sys/monitor/record_share"])]
        now[0] += 1.0
        spent += 0.01 if step < 120 else 0.0
    assert [(step, kind, event["level"]) for step, kind, event in notes] == [
        (60, "shed", 1), (120, "shed", 2), (180, "shed", 1), (240, "shed", 0),
    ]  # fmt: skip
    assert [step for step in range(1, 300) if levels[step] != levels[step - 1]] == [60, 120, 180, 240]
    assert shares == [(60, pytest.approx(0.01)), (120, pytest.approx(0.01)), (180, 0.0), (240, 0.0)]
    event = notes[0][2]
    assert (event["record_share"], event["thread_share"]) == (pytest.approx(0.01), pytest.approx(0.02))
    assert event["budget"] == 0.02 and event["what"] == Shed.LAYERS.text
    lines = [record.message for record in caplog.records]
    assert len(lines) == 4
    assert lines[0] == (
        "at step 60 the recorder takes 3 % of the host's time (1 % on the training thread), its budget is 2 %: "
        "from now on per-layer series are written of one full report in ten"
    )
    assert lines[-1].endswith("everything is written")


def _scan(watch, now, steps, full=0.15):
    found = []
    for step in range(steps):
        now[0] += full if step % 20 == 0 else 0.1
        program = "full" if step % 20 == 0 else "light"
        found.append(watch.measure(_readings(step, program), now[0], 0.0, 0.0)[2])
    return found


def test_scans_above_the_budget_are_told_once_with_the_cadence_that_meets_it(caplog):
    """The cadence is not the host's to change: all processes must run the same program at the same step."""
    notes = []
    watch, now = _upkeep(notes)
    found = _scan(watch, now, 400)
    assert {step for step, share in enumerate(found) if share is not None} == set(range(60, 400, 20))
    ((step, kind, event),) = notes
    assert (step, kind, event["scan_every"]) == (60, "scan_overhead", 25)
    assert event["share"] == pytest.approx(0.05 / 2.05) and watch.shed is Shed.NOTHING
    assert [record.message for record in caplog.records] == [
        "tensor scans add 2.4 % to the time of a step, the budget is 2 %: Plan(scan_every=25) would meet it"
    ]


@pytest.mark.parametrize(("budget", "full"), [(None, 0.3), (0.02, 0.11)])
def test_scans_within_the_budget_or_without_one_are_measured_and_not_told(budget, full, caplog):
    notes = []
    watch, now = _upkeep(notes, budget)
    assert _scan(watch, now, 200, full)[-20] == pytest.approx((full - 0.1) / (2.0 + full - 0.1))
    assert not notes and not caplog.records


class Clock:
    """A clock that a step moves by a second."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def _slow_run(recorder, steps):
    """One step a second by the worker's clock, with the worker's CPU at 5 % of it."""
    clock = Clock()
    recorder.record(report(0, FULL))
    worker = recorder._worker
    assert recorder.flush()
    worker._upkeep._monotonic, worker._cpu = clock, lambda: 0.05 * clock.now
    worker._upkeep._host = HostCost()
    for step in range(1, steps):
        clock.now = float(step)
        recorder.record(report(step, FULL))
        assert recorder.flush()


def test_a_recorder_above_its_budget_writes_less_and_the_run_says_so(tmp_path, caplog):
    with caplog.at_level(logging.WARNING), pj.Recorder(tmp_path, pj.Plan(), budget=0.02) as recorder:
        _slow_run(recorder, 250)
    run = pj.open_run(tmp_path)
    assert run.series("loss/mean")[0].tolist() == list(range(250)), "P0 of every step"
    events = [event for event in run.events() if event["kind"] == upkeep.SHED]
    assert [event["payload"]["level"] for event in events] == [1, 2, 3]
    first = events[0]["step"]
    layers = run.series("act/block[0]/mlp/rms")
    kept = layers[0][layers[2]]
    assert set(range(first)) <= set(kept.tolist())
    later = kept[kept >= first]
    assert 3 <= later.size <= 7 and later.max() < events[1]["step"], "one in ten, then none"
    steps, values, _ = run.series("sys/monitor/shed")
    assert values[-1] == 3 and steps[np.flatnonzero(values)[0]] == first
    assert recorder.health.shed == 250 - first - later.size and not recorder.health.ok
    assert recorder.health.sinks["store"].dropped == 0
    _, dropped, _ = run.series("sys/monitor/dropped")
    assert dropped[-1] == 0, "left out on purpose is not lost"
    assert sum("from now on" in record.message for record in caplog.records) == 3
    (item,) = [item for item in find_unusual(run) if "budget" in item.what]
    assert item.steps == tuple(event["step"] for event in events)


@pytest.mark.parametrize("options", [{"budget": None}, {"budget": 0.5}, {"process_index": 1}])
def test_nothing_is_left_out_without_need(tmp_path, options):
    sink = ListSink()
    with pj.Recorder(tmp_path, sinks=[sink], **options) as recorder:
        _slow_run(recorder, 100)
        latest = recorder.latest
    assert recorder.health.shed == 0 and recorder.health.ok
    assert latest.scalars()["sys/monitor/shed"] == 0 and latest.scalars()["sys/monitor/bytes"] == 100 * 4 * FULL.size
    assert all("act/block[0]/mlp/rms" in readings.names for readings in sink.readings)


def test_only_a_report_that_the_worker_waited_for_has_a_time_of_arrival():
    with pj.Recorder(sinks=[]) as recorder:
        recorder.record(report(0))
        worker, seen = recorder._worker, []
        assert recorder.flush()
        measure = worker._upkeep.measure
        worker._upkeep.measure = lambda readings, at, *rest: seen.append(at) or measure(readings, at, *rest)
        recorder.record(report(1))  # in host memory
        assert recorder.flush()
        ready = threading.Event()
        recorder.record(FakeReport(DeviceBuffer(buffer_of(2), ready), LIGHT))
        assert wait_for(lambda: worker.computing)
        ready.set()
        assert recorder.flush()
        recorder.record(FakeReport(DeviceBuffer(buffer_of(3), ready), LIGHT))  # was there first
        stacked = threading.Event()
        recorder.record(FakeReport(DeviceBuffer(np.stack([buffer_of(step) for step in (4, 5)]), stacked), LIGHT))
        assert wait_for(lambda: worker.computing)
        stacked.set()
        assert recorder.flush()
    assert [at is not None for at in seen] == [False, True, False, False]


def test_the_documented_default_is_the_real_one():
    default = inspect.signature(pj.Recorder).parameters["budget"].default
    for page in ("guide.md", "run_folder.md"):
        assert f"budget={default})" in (ROOT / "docs" / page).read_text("utf-8")


def test_wrong_budgets_are_refused():
    for budget in (0.0, -1, "2 %", True, float("nan")):
        with pytest.raises(ValueError, match="Recorder budget, a share of the time, must be a positive number"):
            pj.Recorder(sinks=[], budget=budget)
    with pytest.raises(ValueError, match="must be below 1, got 2; write 0.02 for 2 %"):
        pj.Recorder(sinks=[], budget=2)
