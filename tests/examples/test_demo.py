"""The demo end to end, as a newcomer starts it: a few steps, then its outputs and its last words.

What hangs on neither the size of the model nor on signals is asked of the same `main` with one layer, in this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from probes_jax.host.run_folder import open_run
from probes_jax.present.score import robust_scores
from probes_jax.spec.catalog import REGISTRY
from probes_jax.spec.metric import Priority
from probes_jax.spec.plan import Plan
from tests.host.event_files import read_scalars

_DEMO = pathlib.Path(__file__).parents[2] / "examples" / "demo.py"
_STEPS = 36
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def _command(folder, *options):
    return [sys.executable, str(_DEMO), "--out", str(folder), *options]


def _environment():
    plain = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "PROBES_JAX")}
    quick = {"XLA_FLAGS": "--xla_backend_optimization_level=0"} if os.environ.get("PROBES_TESTS") == "quick" else {}
    return {**plain, **quick, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="module")
def demo():
    """Calls `main` of the demo with one layer; what it said."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(_DEMO.parent)
        module = importlib.import_module("demo")
        patch.setattr(module, "CONFIG", dataclasses.replace(module.CONFIG, layers=1))

        def call(folder, *options):
            patch.setattr(sys, "argv", [str(_DEMO), "--out", str(folder), *options])
            with contextlib.redirect_stdout(io.StringIO()) as said:
                module.main()
            return said.getvalue()

        yield call


def _recorded(folder):
    """Steps that are recorded by now: the flight record has them within a second, the store a flush later."""
    try:
        last = open_run(folder).flight_step()
    except FileNotFoundError:
        return 0
    return 0 if last is None else last + 1


@pytest.fixture(scope="module")
def linen(tmp_path_factory):
    """A run that is stopped by Ctrl-C after a while: folder, what it said, what it said to stderr."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    process = subprocess.Popen(
        _command(folder, "--steps", "100000", "--minutes", "10"),
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 600
        while _recorded(folder) < _STEPS and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.25)
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, said + errors
    return folder, said, errors


@pytest.fixture(scope="module")
def nnx(tmp_path_factory, demo):
    """A run to its end."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    return folder, demo(folder, "--nnx", "--steps", "4")


def test_it_says_what_it_trains_and_where_the_files_are(nnx):
    folder, said = nnx
    assert "nnx decoder" in said and "parameters" in said and "code" in said
    assert "step 4/4" in said
    assert "First screen, step 3" in said and "What was unusual: nothing" in said
    assert "compiling the full program (step 0)" in said and "compiling the light program (step 1)" in said
    screen = next(line.split("   ")[0].split() for line in said.splitlines() if " screen " in line)
    again = subprocess.run(screen, env=_environment(), capture_output=True, text=True, check=True)
    assert "First screen, step 3" in again.stdout
    assert f"--logdir {folder}/events" in said
    assert max(map(len, said.replace(str(folder), "").replace(sys.executable, "").splitlines())) <= 120


def test_ctrl_c_ends_cleanly_with_everything_written(linen):
    folder, said, errors = linen
    assert "linen decoder" in said and "1 x" in said
    assert "stopping, writing what is left" in said and "Stopped by hand" in said and "Traceback" not in errors
    steps, _, present = open_run(folder).series("loss/mean")
    assert steps.tolist() == list(range(steps.size)) and present.all()
    assert f"First screen, step {steps[-1]}" in said and "What was unusual" in said
    *_, last = (line for line in said.splitlines() if line.startswith("step "))
    assert last.startswith(f"step {steps[-1] + 1}/100000"), "the last line of progress is about the step of the table"


def test_ctrl_c_before_the_first_step_says_that_nothing_was_recorded(tmp_path):
    command = _command(tmp_path / "run", "--steps", "9")
    process = subprocess.Popen(
        command, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        heard = []
        for line in process.stdout:
            heard.append(line)
            if "compiling the full program" in line:
                process.send_signal(signal.SIGINT)
                break
        rest, errors = process.communicate(timeout=200)
    finally:
        process.kill()
    said = "".join(heard) + rest
    assert process.returncode == 0 and "Traceback" not in errors, said + errors
    assert "Stopped by hand. Nothing was recorded" in said
    assert "written" not in said.replace("writing", "")


def test_every_signal_of_the_table_has_a_value(linen):
    rows = {parts[0]: parts[1:] for line in linen[1].splitlines() if (parts := line.split())}
    plain = [spec.name for spec in REGISTRY if spec.priority is Priority.P0 and "{" not in spec.name]
    groups = [f"loss/group/{name}/mean" for name in ("code", "docs", "law")]
    without = ("alert/guard/", "router/", "replica/", "media/")  # no guard, no experts, one device, text only
    plain = [name for name in plain if not name.startswith(without)]
    assert "residual/stream_norm" in plain
    for name in (*plain, *groups):
        assert "no data" not in " ".join(rows[name]), name


def test_the_loss_falls_and_tokens_are_counted(linen):
    run = open_run(linen[0])
    _, loss, _ = run.series("loss/mean")
    assert loss[0] == pytest.approx(np.log(256), abs=0.3)
    assert loss[-1] < loss[0] - 0.5
    _, tokens, _ = run.series("data/tokens_total")
    assert 0.9 * loss.size * 8 * 128 < tokens[-1] <= loss.size * 8 * 128


def test_every_recorded_name_has_an_entry_in_the_registry(linen):
    assert [name for name in open_run(linen[0]).names() if REGISTRY.find(name) is None] == []


def test_the_score_shown_for_other_signals_is_that_of_the_detectors(linen):
    run = open_run(linen[0])
    for metric, detector in (("loss/mean", "loss"), ("grad/norm", "grad"), ("update/norm", "update")):
        _, score, known = run.series(f"{detector}/spike/score")
        _, values, present = run.series(metric)
        own, seen = robust_scores(values, present, Plan())
        assert np.array_equal(seen, known) and known.any()
        np.testing.assert_allclose(own[seen], score[known], rtol=2e-2, atol=2e-2)


def test_event_files_are_readable_by_tensorboard(linen):
    steps, _, _ = open_run(linen[0]).series("loss/mean")
    assert [step for step, _ in read_scalars(linen[0] / "events")["loss/mean"]] == steps.tolist()


def test_the_nnx_model_reports_the_same_names(linen, nnx):
    """Of its one layer those of each of the four, but the gain, which is beside the layer before."""
    names, one = open_run(linen[0]).names(), set(open_run(nnx[0]).names())
    layers = {match[1] for name in names if (match := re.search(r"\bblock\[(\d)\]", name))}
    assert layers == set("0123")
    for layer in layers:
        here = {name.replace(f"block[{layer}]", "block[0]") for name in names if not name.endswith("]/gain")}
        assert {name for name in here if not re.search(r"\bblock\[[1-9]\]", name)} == one


def test_a_folder_with_a_run_is_not_written_into(nnx, demo, capsys):
    with pytest.raises(SystemExit) as stopped:
        demo(nnx[0])
    assert stopped.value.code == 2
    assert "there is a run in" in capsys.readouterr().err


def test_the_time_limit_counts_from_the_third_step_and_is_said(tmp_path, demo):
    said = demo(tmp_path / "run", "--nnx", "--steps", "51", "--minutes", "1e-9")  # the learning rates of the other run
    assert "(step 3 of 51)" in said and "minutes of training are over" in said
    assert "First screen, step 2" in said


def test_without_probes_it_trains_and_says_that_nothing_was_recorded(tmp_path, demo, monkeypatch):
    monkeypatch.setenv("PROBES_JAX", "off")
    said = demo(tmp_path / "run", "--steps", "2")
    assert "Nothing was recorded" in said
    assert not (tmp_path / "run").exists()
