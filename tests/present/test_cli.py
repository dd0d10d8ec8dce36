from __future__ import annotations

import json
import math
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest

from probes_jax.host.store_sink import StoreSink
from probes_jax.present.cli import main
from probes_jax.spec.catalog import REGISTRY
from probes_jax.spec.plan import Plan
from probes_jax.spec.readings import Readings


def _refuse(token):
    raise AssertionError(f"not strict JSON: {token}")


def _run(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False)


def _record(folder, losses):
    sink = StoreSink(folder, plan=Plan(theta=5.0))
    names = ("loss/mean", "loss/spike/score", "alert/co_spike")
    for step, (loss, score) in enumerate(losses):
        sink.write(Readings(step, "light", names, np.array([loss, score, 0.0]), np.ones(3, bool)))
    sink.close()


def test_metrics_as_json_is_strict_and_complete(capsys):
    assert main(["metrics", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out, parse_constant=_refuse)
    assert [entry["name"] for entry in entries] == [spec.name for spec in REGISTRY]
    for entry in entries:
        assert entry["priority"] in ("P0", "P1", "P2")
        assert all(isinstance(value, str) and value for value in entry.values())


def test_metrics_by_name(capsys):
    assert main(["metrics", "--json", "loss/group/code/mean", "grad/norm"]) == 0
    names = [entry["name"] for entry in json.loads(capsys.readouterr().out)]
    assert names == ["loss/group/{group}/mean", "grad/norm"]


def test_metrics_as_a_table(capsys):
    assert main(["metrics"]) == 0
    out = capsys.readouterr().out
    assert "loss/mean" in out and "nat/token" in out and "P0" in out


def test_metrics_through_a_pipe_have_a_line_each_so_that_grep_finds_them():
    lines = _run("-m", "probes_jax", "metrics").stdout.splitlines()
    for spec in REGISTRY:
        (line,) = [line for line in lines if line.strip().split(" ")[0] == spec.name]
        assert spec.catches in line


def test_the_screen_of_a_part_of_a_run_names_the_run(tmp_path, capsys, monkeypatch):
    _record(tmp_path / "run", [(2.0, 0.0)])
    (tmp_path / "run" / "events").mkdir()
    monkeypatch.chdir(tmp_path)
    for part, named in (("run/events", "run"), ("run/entries/", "run"), (str(tmp_path / "run" / "series"), "")):
        assert main(["screen", part]) == 1
        assert f"of a run: open {named or str(tmp_path / 'run')!r}" in capsys.readouterr().err
    (tmp_path / "events").mkdir()
    assert main(["screen", "events"]) == 1
    assert "nothing was recorded there yet" in capsys.readouterr().err


def test_an_unknown_metric_is_wrong_use(capsys):
    assert main(["metrics", "nothing/like/it"]) == 2
    assert "no metric 'nothing/like/it'" in capsys.readouterr().err


def test_screen_of_a_recorded_run(tmp_path, capsys):
    _record(tmp_path / "run", [(2.0, 0.0), (2.0, 5.5), (float("nan"), float("inf"))])
    assert main(["screen", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    row = next(line.split() for line in out.splitlines() if line.strip().startswith("loss/mean"))
    assert row == ["loss/mean", "NaN", "nat/token", "alert", "1"]
    assert "spike of loss/mean at steps 1-2 (worst score inf at 2, threshold 5)" in out


def test_screen_of_no_run_says_so_in_one_line(tmp_path, capsys):
    assert main(["screen", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("probes screen: no run in") and error.count("\n") == 1


def test_screen_as_a_picture(tmp_path, capsys):
    _record(tmp_path / "run", [(2.0, 0.0)])
    assert main(["screen", str(tmp_path / "run"), "--svg", str(tmp_path / "screen.svg")]) == 0
    picture = (tmp_path / "screen.svg").read_text()
    ElementTree.fromstring(picture)
    assert "loss/mean" in picture and "url(" not in picture.replace("url(#", "")
    assert main(["screen", str(tmp_path / "run"), "--svg", str(tmp_path / "no" / "folder.svg")]) == 1
    assert "folder.svg" in capsys.readouterr().err


def test_without_a_command_the_help_is_shown(capsys):
    assert main([]) == 2
    assert "examples:" in capsys.readouterr().out


def test_version(capsys):
    from probes_jax import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize(
    "arguments", [["bogus"], ["screen"], ["metrics", "--json", "--markdown"], ["series", "RUN", "NAME", "--last", "0"]]
)
def test_wrong_use(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2


def test_as_a_module():
    done = _run("-m", "probes_jax", "metrics", "--json", "loss/mean")
    assert done.returncode == 0
    assert json.loads(done.stdout)[0]["name"] == "loss/mean"


def test_reading_a_run_imports_neither_jax_nor_tensorflow(tmp_path):
    """The command must start at once, also where no JAX is installed."""
    _record(tmp_path / "run", [(2.0, 0.0)])
    program = (
        "import sys; from probes_jax.present.cli import main; import probes_jax.present.progress;"
        f"main(['screen', {str(tmp_path / 'run')!r}]); main(['metrics']);"
        "bad = [m for m in ('jax', 'flax', 'optax', 'tensorflow', 'clu') if m in sys.modules]; assert not bad, bad"
    )
    done = _run("-c", program)
    assert done.returncode == 0, done.stderr


def test_help_needs_no_table_no_numpy():
    program = (
        "import sys; from probes_jax.present.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "bad = [m for m in ('numpy', 'rich', 'tensorstore') if m in sys.modules]; assert not bad, bad"
    )
    done = _run("-c", program)
    assert done.returncode == 0, done.stderr
    assert "exit code" in done.stdout


def test_a_reader_that_stops_early_is_no_error():
    command = f"{sys.executable} -m probes_jax metrics --markdown | head -n 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["coverage", "screen", "walk"])
def test_a_folder_of_runs_lists_them(tmp_path, capsys, command):
    for name in ("b", "a", "gan/generator"):
        _record(tmp_path / name, [(1.0, 0.0)])
    (tmp_path / "killed" / "flight").mkdir(parents=True)
    (tmp_path / "killed" / "flight" / "process_0.bin").write_bytes(b"")
    (tmp_path / "notes").mkdir()
    assert main([command, str(tmp_path)]) == 1
    error = capsys.readouterr().err
    names = ("a", "b", "gan/generator", "killed")
    assert f"it holds runs: open {', '.join(repr(str(tmp_path / name)) for name in names)})" in error
    for number in range(30):
        _record(tmp_path / f"run_{number}", [(1.0, 0.0)])
    assert main([command, str(tmp_path)]) == 1
    assert "and 14 more" in capsys.readouterr().err
    assert main([command, str(tmp_path / "notes")]) == 1
    assert "nothing was recorded there yet" in capsys.readouterr().err


def test_a_metric_asked_for_by_name_comes_with_its_definition(capsys):
    assert main(["metrics", "opt/learning_rate"]) == 0
    out = capsys.readouterr().out
    spec = REGISTRY["opt/learning_rate"]
    for text in (spec.definition, spec.catches, spec.reduction, spec.timing, spec.source):
        assert text in out


@pytest.mark.parametrize(
    ("asked", "meant"), [("learning", "opt/learning_rate"), ("clip", "grad/clip_rate"), ("grad/nrm", "grad/norm")]
)
def test_a_metric_that_is_not_there_has_near_matches(tmp_path, capsys, asked, meant):
    assert main(["metrics", asked]) == 2
    assert meant in capsys.readouterr().err


def _series(folder):
    sink = StoreSink(folder)
    for step, (value, present) in enumerate([(2.0, True), (0.0, False), (math.nan, True), (0.1234567891, True)]):
        sink.write(Readings(step, "light", ("grad/norm",), np.array([value]), np.array([present])))
    sink.close()
    return str(folder)


def test_a_series_has_a_line_for_each_step_that_measured_it(tmp_path, capsys):
    run = _series(tmp_path / "run")
    assert main(["series", run, "grad/norm"]) == 0
    assert capsys.readouterr().out == "0\t2\n2\tnan\n3\t0.1234568\n"
    for last, shown in (("1", "3\t0.1234568\n"), ("99", "0\t2\n2\tnan\n3\t0.1234568\n")):
        assert main(["series", run, "grad/norm", "--last", last]) == 0
        assert capsys.readouterr().out == shown


def test_a_series_for_a_program_is_strict_json(tmp_path, capsys):
    assert main(["series", _series(tmp_path / "run"), "grad/norm", "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=_refuse)
    assert found == {"name": "grad/norm", "steps": [0, 2, 3], "values": [2.0, {"$float": "NaN"}, 0.1234567891]}


def test_without_a_name_series_lists_what_a_run_has(tmp_path, capsys):
    run = _series(tmp_path / "run")
    assert main(["series", run]) == 0
    names = capsys.readouterr().out.splitlines()
    assert "grad/norm" in names and names == sorted(set(names))
    assert main(["series", run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == names


def test_a_series_that_is_not_there_has_near_matches(tmp_path, capsys):
    assert main(["series", _series(tmp_path / "run"), "grad/nrm"]) == 2
    error = capsys.readouterr().err
    assert "no series 'grad/nrm'; did you mean 'grad/norm'?" in error and error.count("\n") == 1
