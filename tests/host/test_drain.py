"""What a close that takes long says of itself."""

from __future__ import annotations

import re
import threading
import time

import pytest

from probes_jax.host.recorder import Recorder
from tests.host.recorder_fakes import LIGHT, DeviceBuffer, FakeReport, HangingSink, ListSink, buffer_of, report


class SlowSink(ListSink):
    """Takes its time for each reading, or for its last flush."""

    def __init__(self, write=0.0, flush=0.0):
        super().__init__()
        self._write, self._flush = write, flush

    def write(self, readings):
        time.sleep(self._write)
        super().write(readings)

    def flush(self):
        time.sleep(self._flush)


def said(caplog):
    return [text for record in caplog.records if "closing the recorder" in (text := record.getMessage())]


@pytest.mark.parametrize(
    ("sink", "who"),
    [
        (SlowSink(write=0.05), r"sink 'SlowSink' \(readings not written: (\d+)\)"),
        (SlowSink(flush=0.6), r"sink 'SlowSink' \((its last flush)\)"),
    ],
    ids=["writes", "flush"],
)
def test_a_slow_sink_is_named_once_and_waited_for(sink, who, monkeypatch, caplog):
    monkeypatch.setattr("probes_jax.host.drain._SAY_AFTER", 0.2)
    recorder = Recorder(sinks=[sink, ListSink()], patience=2.5)
    for step in range(12):
        recorder.record(report(step))
    recorder.close()
    (line,) = said(caplog)
    (left,) = re.findall(f"waits for {who}; what makes no progress for 2.5 s is left behind$", line)
    assert left == "its last flush" or 1 <= int(left) <= 12
    assert sink.steps == list(range(12))


def test_a_hanging_sink_is_named_again_and_again_and_left_behind_when_it_was(monkeypatch, caplog):
    monkeypatch.setattr("probes_jax.host.drain._SAY_AFTER", 0.05)
    monkeypatch.setattr("probes_jax.host.drain._SAY_EVERY", 0.2)
    sink = HangingSink()
    recorder = Recorder(sinks=[sink], patience=0.7)
    for step in range(9):
        recorder.record(report(step))
    assert sink.entered.wait(20)
    start = time.monotonic()
    recorder.close()
    assert 0.7 <= time.monotonic() - start < 10
    sink.release.set()
    lines = said(caplog)
    assert 2 <= len(lines) <= 5
    assert all("waits for sink 'HangingSink' (readings not written: 9); what" in line for line in lines)
    assert "hangs and is left behind; 9 readings are dropped" in caplog.text


def test_a_late_device_is_named(monkeypatch, caplog):
    monkeypatch.setattr("probes_jax.host.drain._SAY_AFTER", 0.05)
    ready = threading.Event()
    recorder = Recorder(sinks=[ListSink()], patience=1.0)
    recorder.record(FakeReport(DeviceBuffer(buffer_of(0), ready), LIGHT))
    threading.Timer(0.5, ready.set).start()
    recorder.close()
    (line,) = said(caplog)
    assert "waits for the device (reports queued: 1); what makes no progress for 12 s" in line


def test_a_quick_close_says_nothing(caplog):
    with Recorder(sinks=[ListSink()]) as recorder:
        recorder.record(report(0))
    assert not caplog.records


def test_a_flush_beside_a_close_ends_with_it():
    """Its ticket lies behind the end of the worker, where nobody answers it."""
    recorder = Recorder(sinks=[sink := SlowSink(write=0.05)], patience=2.5)
    for step in range(12):
        recorder.record(report(step))
    closing = threading.Thread(target=recorder.close)
    closing.start()
    time.sleep(0.05)
    start = time.monotonic()
    assert recorder.flush(30.0) and time.monotonic() - start < 15.0
    assert sink.steps == list(range(12))
    closing.join()
