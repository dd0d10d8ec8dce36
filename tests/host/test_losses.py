"""What is lost at the stated caps is counted, logged, and stands in the metrics of later steps: P0 values too."""

import dataclasses
import inspect
import logging
import threading

import pytest

from probes_jax.host import outlets, recorder
from probes_jax.host.backlog import ITEM_BYTES
from probes_jax.host.flight import FlightRecord
from probes_jax.host.health import Health, SinkHealth
from probes_jax.host.read_flight import read_flight
from probes_jax.host.recorder import Recorder
from probes_jax.host.run_folder import open_run
from probes_jax.host.worker import HOST_NAMES
from probes_jax.present.unusual import find_unusual
from probes_jax.spec.plan import Plan
from tests.contracts.source import ROOT
from tests.host.recorder_fakes import (
    LIGHT,
    DeviceBuffer,
    FakeReport,
    HangingSink,
    ListSink,
    buffer_of,
    report,
    wait_for,
)


@pytest.mark.parametrize("why", ["not ready", "bytes"])
def test_reports_dropped_unread_are_counted_logged_and_reported(tmp_path, caplog, monkeypatch, why):
    if why == "bytes":  # that P0 values alone fill
        monkeypatch.setattr(recorder, "_CAPACITY_BYTES", 16 * (4 * LIGHT.size + ITEM_BYTES))
    ready, size = threading.Event(), 16 if why == "not ready" else 1000
    with caplog.at_level(logging.WARNING), Recorder(tmp_path, Plan(), queue_size=size) as writer:
        writer.record(FakeReport(DeviceBuffer(buffer_of(0), ready), LIGHT))
        assert wait_for(lambda: writer._worker.computing)
        for step in range(1, 41):
            buffer = buffer_of(step)
            writer.record(FakeReport(DeviceBuffer(buffer, ready) if why == "not ready" else buffer, LIGHT))
        ready.set()
        assert writer.flush()
        for step in range(41, 44):
            writer.record(report(step))
            assert writer.flush()
    health, kept = writer.health, [found.step for found in read_flight(tmp_path / "flight" / "process_0.bin")]
    gone = sorted(set(range(44)) - set(kept))
    assert health.lost == len(gone) >= 24 and gone == list(range(gone[0], gone[-1] + 1)), "the oldest unread ones"
    assert kept[-15:] == list(range(29, 44)) and not health.ok
    run = open_run(tmp_path)
    assert run.series("sys/monitor/dropped")[1][-1] == health.lost + health.passed_over + health.thinned > 0
    (line,) = [line.message for line in caplog.records if "lost in part or whole" in line.message]
    assert "sys/monitor/dropped" in line and "recorder.health" in line
    assert any(item.what.startswith("records lost") for item in find_unusual(run))


def test_values_that_no_longer_fit_before_a_sink_are_counted_and_logged(monkeypatch, caplog):
    monkeypatch.setattr(outlets, "_CAPACITY", 200)
    bad, good = HangingSink(), ListSink()
    writer = Recorder(sinks=[bad, good], patience=0.1)
    writer.record(report(0))
    assert bad.entered.wait(20)
    for step in range(1, 30):
        writer.record(report(step))
        assert wait_for(lambda step=step: len(good.steps) == step + 1)
    dropped = writer.health.sinks["HangingSink"].dropped
    assert dropped > 15 and good.readings[-1].scalars()["sys/monitor/dropped"] >= dropped - 1
    assert "lost in part or whole" in caplog.text, "a sink that hangs raises nothing: this is its only line"
    bad.release.set()
    writer.close()
    assert len(bad.steps) + writer.health.sinks["HangingSink"].dropped == 30 and bad.steps[-1] == 29


def test_the_documented_caps_are_the_real_ones():
    text = (ROOT / "docs" / "run_folder.md").read_text("utf-8")
    size = inspect.signature(Recorder).parameters["queue_size"].default
    assert f"Recorder(queue_size={size})" in text
    assert recorder._CAPACITY_BYTES == 256 << 20 and "or 256 MiB of reports" in text
    assert f"{outlets._CAPACITY:,} values" in text
    assert inspect.signature(FlightRecord).parameters["cap_bytes"].default == 256 << 20
    counted = {field.name for health in (Health, SinkHealth) for field in dataclasses.fields(health)}
    for name in ("passed_over", "lost", "thinned", "dropped"):
        assert f"`{name}`" in text or f"`sinks[name].{name}`" in text
        assert name in counted
    assert "sys/monitor/dropped" in text and "sys/monitor/dropped" in HOST_NAMES
