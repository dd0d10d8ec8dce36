import gc
import logging
import math
import pathlib
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from probes_jax.host.read_flight import read_flight
from probes_jax.host.recorder import Recorder
from probes_jax.host.timed import timed
from probes_jax.host.verdict import RUN_AHEAD, GuardStopped
from probes_jax.host.worker import HOST_NAMES
from probes_jax.spec.catalog import REGISTRY
from probes_jax.spec.layout import Layout
from probes_jax.spec.plan import Guard, Plan
from tests.host.recorder_fakes import (
    FULL,
    GUARDED,
    LIGHT,
    P0,
    DeviceBuffer,
    FailingSink,
    FakeReport,
    HangingSink,
    ListSink,
    buffer_of,
    report,
    wait_for,
)


def _flight(path, process=0):
    return read_flight(pathlib.Path(path) / "flight" / f"process_{process}.bin")


# ---- what arrives ----


def test_five_steps_are_five_records_and_two_runs_do_not_mix(tmp_path):
    """L089."""
    first, second = ListSink(), ListSink()
    with (
        Recorder(tmp_path / "a", sinks=[first]) as a,
        Recorder(tmp_path / "b", sinks=[second]) as b,
    ):
        for step in range(5):
            a.record(report(step))
            b.record(report(step + 100))
    assert first.steps == list(range(5)) and second.steps == list(range(100, 105))
    assert [s.step for s in _flight(tmp_path / "a")] == first.steps
    assert [s.step for s in _flight(tmp_path / "b")] == second.steps
    assert first.closed == second.closed == 1


def test_values_and_wall_times_arrive_as_decoded():
    sink, now = ListSink(), [50.0]
    with Recorder(sinks=[sink], clock=lambda: now[0]) as recorder:
        recorder.record(report(3, loss__mean=float("nan"), grad__norm=None, data__tokens_total=5_000_000_000))
    (found,) = sink.readings
    scalars = found.scalars()
    assert np.isnan(scalars["loss/mean"]) and "grad/norm" not in scalars
    assert scalars["data/tokens_total"] == 5_000_000_000
    assert (found.step, found.program, found.wall_time) == (3, "light", 50.0)


def test_names_are_one_object_for_all_reports_of_a_layout():
    sink = ListSink()
    with Recorder(sinks=[sink]) as recorder:
        for step in range(6):
            recorder.record(report(step, FULL if step % 3 == 0 else LIGHT))
    assert len({id(r.names) for r in sink.readings}) == 2


def test_stacked_reports_of_a_scan_give_their_fresh_steps_in_order():
    sink = ListSink()
    rows = np.stack([buffer_of(step, fresh=step != 2) for step in range(5)])
    with Recorder(sinks=[sink]) as recorder:
        recorder.record(FakeReport(rows, LIGHT))
        recorder.record(report(5))
    assert sink.steps == [0, 1, 3, 4, 5]
    seconds = [r.scalars().get("sys/monitor/record_seconds") for r in sink.readings]
    assert [s is not None for s in seconds] == [False, False, False, True, True]


def test_a_report_without_entries_is_ignored(tmp_path):
    """PROBES_JAX=off."""
    with Recorder(tmp_path / "run") as recorder:
        recorder.record(FakeReport(None, Layout("off", ())))
    assert recorder.health.recorded == 0 and recorder.latest is None
    assert not (tmp_path / "run").exists()


def test_latest_is_there_for_a_progress_bar():
    with Recorder(sinks=[]) as recorder:
        assert recorder.latest is None
        for step in range(3):
            recorder.record(report(step))
        assert recorder.flush()
        assert recorder.latest.step == 2 and recorder.latest.scalars()["loss/mean"] == 2.0


def test_flush_writes_everything_before_it_returns(tmp_path):
    sink = ListSink()
    with Recorder(tmp_path / "run", sinks=[sink], flush_every=1000) as recorder:
        for step in range(50):
            recorder.record(report(step))
        assert recorder.flush()
        assert sink.steps == list(range(50)) and sink.flushed == 1
        assert len(_flight(tmp_path / "run")) == 50


# ---- returns at once ----


def test_record_does_not_wait_for_the_device_nor_for_a_sink():
    sink, ready = HangingSink(), threading.Event()
    recorder = Recorder(sinks=[sink], patience=0.1)
    start = time.perf_counter()
    buffers = [DeviceBuffer(buffer_of(step), ready) for step in range(200)]
    for buffer in buffers:
        recorder.record(FakeReport(buffer, LIGHT))
    assert time.perf_counter() - start < 5
    assert [b.copies for b in buffers] == [1] * 200, "the copy to the host is started at the step itself"
    assert recorder.health.read == 0
    ready.set()
    assert wait_for(lambda: recorder.health.read == 200)
    sink.release.set()
    recorder.close()
    assert sink.steps == list(range(200))


@pytest.mark.parametrize(("platform", "copies"), [("cpu", 0), ("gpu", 1)])
def test_the_copy_is_left_out_where_the_report_lies_in_host_memory(platform, copies):
    class Device:
        pass

    class Placed(DeviceBuffer):
        def devices(self):
            return {device}

    device, sink = Device(), ListSink()
    device.platform = platform
    buffers = [Placed(buffer_of(step)) for step in range(3)]
    with Recorder(sinks=[sink]) as recorder:
        for buffer in buffers:
            recorder.record(FakeReport(buffer, LIGHT))
        recorder.record(report(3))  # a NumPy buffer in between is no device array
    assert [buffer.copies for buffer in buffers] == [copies] * 3 and sink.steps == [0, 1, 2, 3]


def test_only_the_buffer_is_kept():
    class Report:
        layout = LIGHT

        def __init__(self):
            self.buffer = DeviceBuffer(buffer_of(0), ready)
            self.state = "a large train state"

    ready, gone = threading.Event(), []
    with Recorder(sinks=[]) as recorder:
        one = Report()
        weakref.finalize(one, gone.append, True)
        recorder.record(one)
        del one
        gc.collect()
        assert gone == [True]
        ready.set()


def test_donating_the_state_does_not_touch_a_report_read_later():
    """L139."""

    @jax.jit
    def measure(state):
        return jnp.asarray(buffer_of(0)).at[1].set(state[0])

    step_fn = jax.jit(lambda state: (state + 1, measure(state)), donate_argnums=0)
    sink = ListSink()
    with Recorder(sinks=[sink]) as recorder:
        state = jnp.zeros(1000, jnp.uint32)
        for _ in range(10):
            before = state
            state, buffer = step_fn(state)
            recorder.record(FakeReport(buffer, LIGHT))
        assert before.is_deleted()
    assert sink.steps == list(range(10))


def test_recording_compiles_and_dispatches_nothing():
    buffers = [jax.device_put(buffer_of(step)) for step in range(20)]
    jax.block_until_ready(buffers)
    compiles = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiles.append(name))
    sink = ListSink()
    try:
        with Recorder(sinks=[sink]) as recorder:
            for buffer in buffers:
                recorder.record(FakeReport(buffer, LIGHT))
    finally:
        jax.monitoring.clear_event_listeners()
    assert not [name for name in compiles if "compile" in name or "trace" in name]
    assert len(sink.steps) == 20


def test_a_report_replicated_over_eight_devices():
    mesh = jax.make_mesh((8,), ("data",))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    sink = ListSink()
    with Recorder(sinks=[sink]) as recorder:
        recorder.record(FakeReport(jax.device_put(buffer_of(4), spec), LIGHT))
    assert sink.readings[0].scalars()["loss/mean"] == 4.0


class _Remote(DeviceBuffer):
    """A buffer that also lies on devices of other processes."""

    def __init__(self, array, replicated):
        super().__init__(array)
        self.is_fully_addressable, self.is_fully_replicated = False, replicated
        self._local = DeviceBuffer(array)

    def addressable_data(self, index):
        assert index == 0
        return self._local

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("spans non-addressable devices")


def test_the_local_replica_is_read_and_a_split_buffer_refused(caplog, monkeypatch):
    """L094: never a partial value."""
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    sink = ListSink()
    with caplog.at_level(logging.WARNING), Recorder(sinks=[sink]) as recorder:
        recorder.record(FakeReport(_Remote(buffer_of(0), replicated=True), LIGHT))
        recorder.record(FakeReport(_Remote(buffer_of(1), replicated=False), LIGHT))
        recorder.record(report(2))
    assert sink.steps == [0, 2]
    assert recorder.health.refused == 1 and "split over several processes" in caplog.text


# ---- mistakes at the call ----


def test_what_is_no_report_is_refused_at_the_call():
    with Recorder(sinks=[]) as recorder:
        with pytest.raises(TypeError, match="monitored_train_step"):
            recorder.record({"loss": 1.0})
        with pytest.raises(ValueError, match="uint32"):
            recorder.record(FakeReport(np.zeros(LIGHT.size), LIGHT))
        with pytest.raises(ValueError, match=rf"\[{LIGHT.size}\]"):
            recorder.record(FakeReport(buffer_of(0, FULL), LIGHT))
        with pytest.raises(TypeError, match="only a tracer"):
            jax.jit(lambda buffer: recorder.record(FakeReport(buffer, LIGHT)))(buffer_of(0))
    with pytest.raises(ValueError, match="after close"):
        recorder.record(report(0))


def test_a_wrong_buffer_is_refused_after_right_ones_too():
    """What was checked of the last report is not asked again; what differs from it is."""
    sink = ListSink()
    with Recorder(sinks=[sink]) as recorder:
        for step in range(3):
            recorder.record(FakeReport(jax.device_put(buffer_of(step)), LIGHT))
        with pytest.raises(TypeError, match="only a tracer"):
            jax.jit(lambda buffer: recorder.record(FakeReport(buffer, LIGHT)))(jax.device_put(buffer_of(3)))
        with pytest.raises(ValueError, match=rf"\[{LIGHT.size}\]"):
            recorder.record(FakeReport(jax.device_put(buffer_of(3, FULL)), LIGHT))
        with pytest.raises(ValueError, match=rf"\[{FULL.size}\]"):
            recorder.record(FakeReport(jax.device_put(buffer_of(3)), FULL))
        recorder.record(FakeReport(jax.device_put(buffer_of(3)), LIGHT))
    assert sink.steps == [0, 1, 2, 3]


def test_settings_are_checked_when_built(tmp_path):
    """L085: a folder that cannot be written fails at set-up."""
    with pytest.raises(ValueError, match="nowhere to write"):
        Recorder()
    with pytest.raises(TypeError, match="writer="):
        Recorder(tmp_path, ListSink())
    with pytest.raises(TypeError, match="first argument is the run folder.*plan="):
        Recorder(Plan())
    with pytest.raises(TypeError, match="write, flush and close"):
        Recorder(sinks=[object()])
    with pytest.raises(TypeError, match="MetricWriter"):
        Recorder(writer=object())
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="Recorder path"):
        Recorder(tmp_path / "file" / "run", sinks=[])


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"path": ""}, "path must be a folder such as \"runs/demo\", or None, got ''"),
        ({"path": 3}, "path must be a folder .*, got 3"),
        ({"path": b"runs"}, "path must be a folder"),
        ({"queue_size": 0}, "queue_size must be an integer of at least 1, got 0"),
        ({"queue_size": 2.5}, "queue_size must be an integer .* got 2.5"),
        ({"queue_size": True}, "queue_size"),
        ({"flush_every": 0}, "flush_every, in seconds, must be a positive number, got 0"),
        ({"flush_every": "a"}, "flush_every, .* got 'a'"),
        ({"flush_every": math.nan}, "flush_every, .* got nan"),
        ({"flush_every": None}, "flush_every"),
        ({"patience": -1}, "patience, in seconds, must be a number of at least 0, got -1"),
        ({"patience": math.nan}, "patience"),
        ({"process_index": -1}, "process_index must be an integer of at least 0, got -1"),
        ({"process_index": 0.0}, "process_index"),
        ({"clock": 3.0}, "clock must be a function that gives seconds, got 3.0"),
        ({"sinks": ListSink()}, r"sinks must be a list of sinks, .*write sinks=\[...\]"),
        ({"sinks": "events"}, "sinks must be a list"),
        ({"plan": {"theta": 6}}, "plan must be a probes_jax.Plan, got dict"),
    ],
)
def test_each_setting_says_what_came_and_what_it_takes(settings, match):
    with pytest.raises((ValueError, TypeError), match=match):
        Recorder(**{"sinks": [], **settings})


def test_numpy_numbers_and_infinite_waits_are_settings_too():
    with Recorder(
        sinks=[sink := ListSink()], queue_size=np.int64(8), flush_every=math.inf, patience=math.inf
    ) as recorder:
        recorder.record(report(0))
        assert wait_for(lambda: sink.steps == [0])
        time.sleep(0.05)  # the sink's thread now waits for the next reading, without end
        assert recorder.flush(10.0)
    assert recorder.health.ok


# ---- steps ----


def test_repeated_and_lower_steps_are_refused_counted_and_logged(tmp_path, caplog):
    sink = ListSink()
    with caplog.at_level(logging.WARNING), Recorder(tmp_path / "run", sinks=[sink]) as recorder:
        for step in (5, 6, 6, 3, 7):
            recorder.record(report(step))
    assert sink.steps == [5, 6, 7] == [s.step for s in _flight(tmp_path / "run")]
    assert recorder.health.refused == 2 and not recorder.health.ok
    assert "step 6 came after step 6" in caplog.text


def test_a_resumed_run_is_a_new_recorder_on_the_same_folder(tmp_path):
    for first in (0, 3):
        with Recorder(tmp_path / "run", sinks=[ListSink()]) as recorder:
            for step in range(first, first + 5):
                recorder.record(report(step))
        assert recorder.health.ok
    found = [(s.attempt, s.step) for s in _flight(tmp_path / "run")]
    assert found == [(0, s) for s in range(5)] + [(1, s) for s in range(3, 8)]


# ---- trouble ----


def test_a_failing_sink_degrades_alone(tmp_path, caplog):
    good, bad = ListSink(), FailingSink()
    with caplog.at_level(logging.WARNING), Recorder(tmp_path / "run", sinks=[good, bad]) as recorder:
        for step in range(30):
            recorder.record(report(step))
            if step == 10:
                assert wait_for(lambda: recorder.health.sinks["FailingSink"].failed > 0)
    health = recorder.health
    assert good.steps == list(range(30)) == [s.step for s in _flight(tmp_path / "run")]
    assert health.sinks["FailingSink"].dropped == 30 and "No space left" in health.sinks["FailingSink"].last_error
    assert health.sinks["ListSink"].written == 30 and not health.ok
    failures = [r for r in caplog.records if "FailingSink" in r.message]
    assert len(failures) == 1, "one log line, not thirty"
    # The trouble is a metric of later steps, too.
    assert good.readings[0].scalars()["sys/monitor/failed"] == 0
    assert good.readings[-1].scalars()["sys/monitor/failed"] > 0


def test_a_hanging_sink_holds_up_nothing_else(tmp_path):
    good, bad = ListSink(), HangingSink()
    recorder = Recorder(tmp_path / "run", sinks=[bad, good], patience=0.2)
    for step in range(300):
        recorder.record(report(step))
    assert wait_for(lambda: len(good.steps) == 300)
    assert wait_for(lambda: len(_flight(tmp_path / "run")) == 300)
    start = time.monotonic()
    assert not recorder.flush(limit=0.1), "and says that not everything is written"
    recorder.close()
    assert time.monotonic() - start < 10
    bad.release.set()


def test_memory_is_flat_under_100000_records_with_dead_sinks(tmp_path, monkeypatch):
    """L091."""
    monkeypatch.setattr("probes_jax.host.recorder._CAPACITY_BYTES", 4 << 20)
    failing, hanging = FailingSink(), HangingSink()
    recorder = Recorder(tmp_path / "run", sinks=[failing, hanging], patience=0.5, queue_size=256)
    buffer, peaks = buffer_of(0), []
    tracemalloc.start()
    try:
        for step in range(100_000):
            mine = buffer.copy()
            mine[1] = step
            recorder.record(FakeReport(mine, LIGHT))
            if step % 20_000 == 19_999:
                peaks.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    hanging.release.set()
    recorder.close()
    health = recorder.health
    assert peaks[-1] < 40e6 and peaks[-1] < 3 * peaks[0] + 4e6, peaks
    assert health.recorded == 100_000 == health.read + health.lost
    assert len(_flight(tmp_path / "run")) + health.sinks["flight"].dropped == health.read
    assert health.sinks["FailingSink"].failed > 0
    hung = health.sinks["HangingSink"]
    assert hung.written + hung.dropped == health.read


def test_of_a_long_backlog_the_sinks_get_p0_values(tmp_path):
    """At a quarter of the queue those of full reports, at half of it those of all."""
    ready, sink = threading.Event(), ListSink()
    recorder = Recorder(tmp_path / "run", sinks=[sink], queue_size=100)
    recorder.record(FakeReport(DeviceBuffer(buffer_of(0), ready), LIGHT))
    assert wait_for(lambda: recorder._worker.computing)  # the backlog is empty; now it grows
    for step in range(1, 101):
        layout = FULL if step % 10 == 0 else LIGHT
        recorder.record(FakeReport(DeviceBuffer(buffer_of(step, layout), ready), layout))
    ready.set()
    assert wait_for(lambda: recorder.health.read == 101)
    recorder.close()
    assert [s.step for s in _flight(tmp_path / "run")] == list(range(101))
    assert sink.steps == list(range(101))
    fewer = [r.step for r in sink.readings if "sys/monitor/records" not in r.names]
    assert fewer == [*range(1, 50), 50, 60, 70], "while more than half, or a quarter, of the queue is behind them"
    assert all("loss/mean" in r.names for r in sink.readings)
    assert recorder.health.passed_over == 49 + 3 and recorder.health.thinned == 0


def test_a_lead_of_the_training_thread_over_the_device_is_no_delay_of_the_host(tmp_path):
    class OneByOne(DeviceBuffer):
        """Ready only while it is read: the host always waits for the device."""

        def is_ready(self):
            return False

    sink = ListSink()
    with Recorder(tmp_path / "run", sinks=[sink], queue_size=100) as recorder:
        for step in range(100):
            recorder.record(FakeReport(OneByOne(buffer_of(step)), LIGHT))
    assert sink.steps == list(range(100)) and recorder.health.ok


def test_a_report_that_cannot_be_read_is_counted():
    class Broken(DeviceBuffer):
        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("INTERNAL: the computation failed")

    sink = ListSink()
    with Recorder(sinks=[sink]) as recorder:
        recorder.record(FakeReport(Broken(buffer_of(0)), LIGHT))
        recorder.record(report(1))
    assert sink.steps == [1] and recorder.health.failed == 1
    assert "the computation failed" in recorder.health.last_error


def test_a_folder_that_becomes_unwritable_degrades(tmp_path):
    good = ListSink()
    recorder = Recorder(tmp_path / "run", sinks=[good])
    (tmp_path / "run").write_text("in the way")
    for step in range(20):
        recorder.record(report(step))
    recorder.close()
    assert good.steps == list(range(20))
    assert recorder.health.sinks["flight"].dropped == 20 and recorder.health.sinks["flight"].last_error


# ---- the monitor of the monitor ----


def test_host_values_are_merged_into_the_readings():
    sink, clock = ListSink(), [0.0]

    def batches():
        for _ in range(3):
            clock[0] += 0.25
            yield None

    with Recorder(sinks=[sink]) as recorder:
        for step, _ in enumerate(timed(batches(), clock=lambda: clock[0])):
            recorder.record(report(step))
        recorder.record(report(3))
    found = [r.scalars() for r in sink.readings]
    assert [s["sys/monitor/records"] for s in found] == [1, 2, 3, 4]
    assert [s.get("sys/data_wait") for s in found] == [0.25, 0.25, 0.25, None], "absent without timed"
    assert all(0 < s["sys/monitor/record_seconds"] < 1 for s in found)
    assert found[0]["sys/monitor/dropped"] == found[0]["sys/monitor/failed"] == 0
    assert recorder.health.record_seconds == pytest.approx(sum(s["sys/monitor/record_seconds"] for s in found))


def test_host_values_have_entries_in_the_registry():
    assert [name for name in HOST_NAMES if REGISTRY.find(name) is None] == []


# ---- processes ----


def test_only_process_0_writes_to_the_sinks_and_each_keeps_a_flight_record(tmp_path):
    """L098."""
    for process in range(4):
        sink = ListSink()
        with Recorder(tmp_path / "run", sinks=[sink], process_index=process) as recorder:
            recorder.record(report(0))
        assert sink.steps == ([0] if process == 0 else [])
    files = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert files == [f"run/flight/process_{process}.bin" for process in range(4)]


def test_other_processes_create_no_file_but_their_flight_record(tmp_path):
    """L098, with the default sinks."""
    with Recorder(tmp_path / "run", process_index=2) as recorder:
        recorder.record(report(0))
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["process_2.bin"]


def test_no_signal_handler_under_jax_distributed(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    with Recorder(sinks=[]) as alone:
        alone.record(report(0))
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with Recorder(sinks=[]) as one_of_many:
        one_of_many.record(report(0))
        assert signal.getsignal(signal.SIGTERM) is before


def test_a_recorder_starts_no_backend_and_needs_no_jax(tmp_path):
    script = """
import sys
from probes_jax.host.recorder import Recorder
from tests.host.recorder_fakes import ListSink, report
sink = ListSink()
with Recorder(sys.argv[1], sinks=[sink]) as recorder:
    recorder.record(report(0))
assert "jax" not in sys.modules, "jax was imported"
import jax
with Recorder(sys.argv[1], sinks=[sink]) as recorder:
    recorder.record(report(1))
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "a backend was started"
assert sink.steps == [0, 1]
"""
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "run")], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


# ---- the guard ----


@pytest.mark.parametrize("slow", [False, True])
def test_guard_stop_is_raised_at_the_same_report_however_fast_the_worker_is(slow):
    class Slow(DeviceBuffer):
        def __array__(self, dtype=None, copy=None):
            if slow:
                time.sleep(0.003)
            return self._array

    def stopped_from_20(step):
        return FakeReport(Slow(buffer_of(step, GUARDED, {"alert/guard/stopped": float(step >= 20)})), GUARDED)

    sink = ListSink()
    with Recorder(plan=Plan(guard=Guard()), sinks=[sink]) as recorder:
        for step in range(20 + RUN_AHEAD):
            recorder.record(stopped_from_20(step))
        with pytest.raises(GuardStopped, match="at step 20"):
            recorder.record(stopped_from_20(20 + RUN_AHEAD))
    assert sink.steps == list(range(20 + RUN_AHEAD + 1)), "the record that raises is kept"


def _stopped(step, at):
    return report(step, GUARDED, alert__guard__stopped=float(step >= at))


def test_a_loop_that_ends_soon_after_the_guard_gave_up_is_told_at_the_end():
    sink = ListSink()
    with pytest.raises(GuardStopped, match="at step 20"), Recorder(plan=Plan(guard=Guard()), sinks=[sink]) as recorder:
        for step in range(25):
            recorder.record(_stopped(step, 20))
    assert sink.steps == list(range(25)) and sink.closed == 1, "everything is written before it is raised"
    with Recorder(plan=Plan(guard=Guard()), sinks=[]) as recorder:
        for step in range(25):
            recorder.record(_stopped(step, 25))


def test_a_recorder_that_was_given_no_plan_tells_it_too():
    with pytest.raises(GuardStopped), Recorder(sinks=[]) as recorder:
        recorder.record(_stopped(0, 0))


def test_a_guard_that_gave_up_is_only_logged_beside_another_exception_and_on_close(caplog):
    guarded = Recorder(plan=Plan(guard=Guard()), sinks=[])
    with caplog.at_level(logging.ERROR), pytest.raises(ZeroDivisionError), guarded as recorder:
        recorder.record(_stopped(3, 3))
        raise ZeroDivisionError
    assert caplog.text.count("the guard gave up at step 3") == 1
    recorder = Recorder(plan=Plan(guard=Guard()), sinks=[])
    recorder.record(_stopped(4, 4))
    recorder.close()
    recorder.close()
    assert caplog.text.count("the guard gave up at step 4") == 1


def test_what_record_has_raised_is_not_said_again(caplog):
    with Recorder(plan=Plan(guard=Guard()), sinks=[]) as recorder:
        for step in range(RUN_AHEAD):
            recorder.record(_stopped(step, 0))
        with pytest.raises(GuardStopped):
            recorder.record(_stopped(RUN_AHEAD, 0))
    assert "gave up" not in caplog.text


def test_with_a_guard_the_loop_is_at_most_16_reports_ahead():
    ready, ahead = threading.Event(), []

    def train():
        for step in range(40):
            buffer = buffer_of(step, GUARDED, {"alert/guard/stopped": 0.0})
            recorder.record(FakeReport(DeviceBuffer(buffer, ready), GUARDED))
            ahead.append(step)

    recorder = Recorder(plan=Plan(guard=Guard()), sinks=[])
    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    assert wait_for(lambda: len(ahead) == RUN_AHEAD)
    time.sleep(0.1)
    assert len(ahead) == RUN_AHEAD
    ready.set()
    assert wait_for(lambda: len(ahead) == 40)
    recorder.close()


def test_without_a_guard_nobody_waits():
    ready = threading.Event()
    with Recorder(plan=Plan(), sinks=[]) as recorder:
        for step in range(100):
            buffer = buffer_of(step, GUARDED, {"alert/guard/stopped": 0.0})
            recorder.record(FakeReport(DeviceBuffer(buffer, ready), GUARDED))
        ready.set()
    assert recorder.health.read == 100


# ---- the end ----


def test_close_twice_and_close_without_a_record():
    recorder = Recorder(sinks=[ListSink()])
    recorder.close()
    recorder = Recorder(sinks=[sink := ListSink()])
    recorder.record(report(0))
    recorder.close()
    recorder.close()
    assert sink.closed == 1 and recorder.flush()


def test_a_forgotten_recorder_writes_what_it_has(tmp_path):
    sink = ListSink()
    recorder = Recorder(tmp_path / "run", sinks=[sink])
    for step in range(5):
        recorder.record(report(step))
    del recorder
    gc.collect()
    assert wait_for(lambda: sink.closed == 1)
    assert sink.steps == list(range(5))


def test_an_exception_passes_through():
    sink = ListSink()
    with pytest.raises(ZeroDivisionError), Recorder(sinks=[sink]) as recorder:
        recorder.record(report(0))
        raise ZeroDivisionError
    assert sink.steps == [0] and sink.closed == 1


def test_no_thread_is_left():
    before = set(threading.enumerate())
    for _ in range(3):
        with Recorder(sinks=[ListSink(), ListSink()]) as recorder:
            recorder.record(report(0))
    assert wait_for(lambda: set(threading.enumerate()) <= before)


def test_a_borrowed_writer_is_flushed_and_left_open():
    class Writer:
        rows, flushed, closed = [], 0, 0

        def write_scalars(self, step, scalars):
            self.rows.append((step, scalars["loss/mean"]))

        def flush(self):
            self.flushed += 1

        def close(self):
            self.closed += 1

    writer = Writer()
    with Recorder(writer=writer) as recorder:
        for step in range(3):
            recorder.record(report(step))
    assert writer.rows == [(0, 0.0), (1, 1.0), (2, 2.0)] and writer.flushed >= 1 and writer.closed == 0
    assert set(P0) <= set(recorder.latest.names)
