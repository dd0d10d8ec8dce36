"""The flight record through the reader of the run: what a kill leaves behind."""

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

import probes_jax as pj
from probes_jax.host.flight import FlightRecord, previous_path
from probes_jax.host.read_flight import last_flight_step, read_flight
from probes_jax.spec.readings import decoder_of
from tests.host.recorder_fakes import LIGHT, buffer_of, report

ROOT = pathlib.Path(__file__).parents[2]


def test_a_run_killed_before_its_first_flush_is_not_lost(tmp_path):
    script = """
        import os, signal, sys, time
        import probes_jax as pj
        from probes_jax.host.read_flight import read_flight
        from tests.host.recorder_fakes import report
        recorder = pj.Recorder(sys.argv[1], pj.Plan(), flush_every=1000.0)
        for step in range(38):
            recorder.record(report(step))
        end = time.monotonic() + 60
        while recorder.health.sinks.get("flight") is None or recorder.health.sinks["flight"].written < 38:
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "run")],
        cwd=ROOT, capture_output=True, text=True, timeout=100, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == -9, done.stderr
    run = pj.open_run(str(tmp_path / "run"))
    assert run.flight_step() == 37
    assert [(s.step, s.values["loss/mean"]) for s in run.flight()] == [(step, step) for step in range(38)]
    assert (run.names(), run.events(), run.manifest()["attempts"]) == ([], [], [])


def test_each_process_has_its_own_and_without_a_record_there_is_an_empty_list(tmp_path):
    with pj.Recorder(tmp_path, pj.Plan()) as recorder:
        for step in range(3):
            recorder.record(report(step))
    with pj.Recorder(tmp_path, pj.Plan(), process_index=2) as other:
        other.record(report(7))
    run = pj.open_run(tmp_path)
    assert [[s.step for s in run.flight(process)] for process in range(3)] == [[0, 1, 2], [], [7]]
    assert run.flight_step() == 2
    (tmp_path / "flight" / "process_0.bin").unlink()
    assert (run.flight(), run.flight_step()) == ([], None)


def test_the_last_step_is_that_of_the_whole_record(tmp_path):
    """Across attempts that go back, a torn tail, and a new segment that has no step yet."""
    path, decoder = tmp_path / "f.bin", decoder_of(LIGHT)
    for steps in (range(9), range(5, 8)):
        record = FlightRecord(path)
        for step in steps:
            record.write(decoder.decode(buffer_of(step)))
        record.close()
    assert last_flight_step(path) == 7 == read_flight(path)[-1].step
    path.write_bytes(path.read_bytes()[:-3])
    assert last_flight_step(path) == 6 == read_flight(path)[-1].step
    path.rename(previous_path(path))
    path.write_bytes(b"")
    assert last_flight_step(path) == 6 == read_flight(path)[-1].step
    previous_path(path).unlink()
    assert last_flight_step(path) is None
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="not a flight record"):
        last_flight_step(path)
