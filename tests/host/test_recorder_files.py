"""The recorder with its real sinks: what another process reads afterwards."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import probes_jax as pj
from probes_jax.host.read_flight import read_flight
from tests.host.event_files import paths, read_scalars
from tests.host.recorder_fakes import FULL, LIGHT, report

ROOT = pathlib.Path(__file__).parents[2]


def _steps(run):
    """Steps of the loss in the event files, in the store, and in the flight record."""
    events = [step for step, _ in read_scalars(run / "events")["loss/mean"]]
    stored = pj.open_run(str(run)).series("loss/mean")[0].tolist()
    return events, stored, [s.step for s in read_flight(run / "flight" / "process_0.bin")]


def test_all_three_hold_every_step(tmp_path):
    with pj.Recorder(tmp_path / "run", pj.Plan()) as recorder:
        for step in range(25):
            recorder.record(report(step, FULL if step % 10 == 0 else LIGHT, grad__norm=np.nan if step == 3 else 2.0))
    assert recorder.health.ok
    assert _steps(tmp_path / "run") == (list(range(25)),) * 3
    _, values, present = pj.open_run(str(tmp_path / "run")).series("grad/norm")
    assert np.isnan(values[3]) and present.all() and values[4] == 2.0
    assert "act/block[1]/mlp/rms" in pj.open_run(str(tmp_path / "run")).names()
    assert "sys/monitor/record_seconds" in read_scalars(tmp_path / "run" / "events")


def test_a_resumed_run_shows_each_step_once(tmp_path):
    for first in (0, 3):
        with pj.Recorder(tmp_path / "run", pj.Plan()) as recorder:
            for step in range(first, first + 5):
                recorder.record(report(step, loss__mean=float(first)))
    steps, values, _ = pj.open_run(str(tmp_path / "run")).series("loss/mean")
    assert steps.tolist() == list(range(8)) and values.tolist() == [0.0] * 3 + [3.0] * 5
    assert len(paths(tmp_path / "run" / "events")) == 2


@pytest.mark.parametrize("end", ["raise ZeroDivisionError", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_everything_through_step_37_is_readable_after_the_process_died(tmp_path, end):
    """L087, with the files a run really has."""
    script = f"""
        import os, signal, sys
        import probes_jax as pj
        from tests.host.recorder_fakes import report
        with pj.Recorder(sys.argv[1], pj.Plan(), flush_every=1000.0) as recorder:
            for step in range(100):
                recorder.record(report(step))
                if step == 37:
                    {end}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "run")],
        cwd=ROOT, capture_output=True, text=True, timeout=100, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == (-signal.SIGTERM if "kill" in end else 1), done.stderr
    assert _steps(tmp_path / "run") == (list(range(38)),) * 3


def test_two_runs_in_one_process_do_not_mix(tmp_path):
    """L089."""
    with pj.Recorder(tmp_path / "a", pj.Plan()) as a, pj.Recorder(tmp_path / "b", pj.Plan()) as b:
        for step in range(5):
            a.record(report(step))
            b.record(report(100 + step))
    assert _steps(tmp_path / "a") == (list(range(5)),) * 3
    assert _steps(tmp_path / "b") == (list(range(100, 105)),) * 3


@pytest.mark.tensorflow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_writer_of_clu_gets_every_step(tmp_path, asynchronous):
    pytest.importorskip("tensorflow", reason="CLU's writers need TensorFlow")
    from clu import metric_writers

    writer = metric_writers.SummaryWriter(str(tmp_path / "logs"))
    writer = metric_writers.AsyncMultiWriter([writer]) if asynchronous else writer
    with pj.Recorder(tmp_path / "run", pj.Plan(), writer=writer) as recorder:
        for step in range(5):
            recorder.record(report(step))
    assert [step for step, _ in read_scalars(tmp_path / "logs")["loss/mean"]] == list(range(5))
    assert not (tmp_path / "run" / "events").exists(), "the writer stands in for the event files"
    writer.write_scalars(5, {"loss/mean": 1.0})  # the user's writer is still theirs
    writer.close()
    assert [step for step, _ in read_scalars(tmp_path / "logs")["loss/mean"]] == list(range(6))
