"""A damaged file in a run's folder: named, left out, and the rest is read."""

import contextlib
import json
import shutil
import warnings

import numpy as np
import pytest

from probes_jax.host.damage import DamagedRun
from probes_jax.host.flight import FlightRecord
from probes_jax.host.run_folder import open_run
from probes_jax.host.store_sink import StoreSink
from probes_jax.present.cli import main
from probes_jax.spec.coverage import Coverage
from probes_jax.spec.layout import Layout
from probes_jax.spec.readings import Readings

LIGHT, FULL = ("loss/mean", "grad/norm"), ("loss/mean", "act/a/rms")


@pytest.fixture
def folder(tmp_path):
    """Twelve steps: every third in a series of its own, blocks of four rows."""
    sink = StoreSink(tmp_path, rows=4)
    sink.describe(Layout("light", ()), Coverage((), ()))
    for step in range(12):
        names, program = (LIGHT, "light") if step % 3 else (FULL, "full")
        sink.write(Readings(step, program, names, np.array([step, 1.0]), np.ones(2, bool)))
    sink.close()
    return tmp_path


def arrays(folder, program):
    (found,) = (folder / "series" / "000001").glob(f"{program}-*")
    return found


def read(run, name):
    """Steps of a metric, and the texts of the warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        steps = run.series(name)[0].tolist()
    assert all(issubclass(warning.category, DamagedRun) for warning in said)
    return steps, [str(warning.message) for warning in said]


@pytest.mark.parametrize("array", ["values/c/1/0", "step/c/1", "wall_time/c/1"])
def test_a_damaged_chunk_costs_its_block_of_one_series(folder, array):
    chunk = arrays(folder, "light") / array
    chunk.write_bytes(b"not a chunk")
    run = open_run(folder)
    steps, (said,) = read(run, "loss/mean")
    assert steps == [0, 1, 2, 3, 4, 5, 6, 9], "the four last rows of the light series are in the damaged block"
    assert str(chunk) in said and "1 of its 2 blocks of steps" in said and "put the file back" in said
    assert read(run, "loss/mean") == (steps, []), "said once"
    assert read(run, "act/a/rms") == ([0, 3, 6, 9], [])
    assert run.names() == ["loss/mean", "act/a/rms", "grad/norm"] and run.damaged() == [said]


@pytest.mark.parametrize("name", ["values", "step"])
@pytest.mark.parametrize("how", ["damage", "delete"])
def test_a_damaged_array_costs_its_series(folder, name, how):
    path = arrays(folder, "full") / name / "zarr.json"
    path.write_text("{") if how == "damage" else path.unlink()
    run = open_run(folder)
    steps, (said,) = read(run, "loss/mean")
    assert steps == [1, 2, 4, 5, 7, 8, 10, 11]
    assert "series/000001/full-" in said and "the whole series" in said and str(path) in said
    assert "tensorstore_spec" not in said
    assert read(run, "act/a/rms") == ([], [])
    assert [len(column) for column in run.wall_times("act/a/rms")] == [0, 0]
    assert read(run, "grad/norm") == ([1, 2, 4, 5, 7, 8, 10, 11], [])
    assert len(run.events()) == 1 and len(run.manifest()["series"]) == 2


@pytest.mark.parametrize(
    ("entry", "lost", "left"),
    [
        ("series/000001/full-*", "a series", [1, 2, 4, 5, 7, 8, 10, 11]),
        ("columns/*", "every series with these columns", None),
        ("attempts/000001", "an attempt", list(range(12))),
        ("events/000001/00000000", "an event", list(range(12))),
    ],
)
@pytest.mark.parametrize("content", ["{", "null", "3", "{}", "[]"])
def test_a_damaged_entry_costs_what_it_describes(folder, entry, lost, left, content):
    path = next(folder.glob(f"entries/{entry}.json"))
    columns = json.loads(path.read_text()).get("names")
    path.write_text(content)
    run = open_run(folder)
    with pytest.warns(DamagedRun, match=lost) as said:
        run.manifest(), run.events()
    assert [str(path.relative_to(folder)) in str(warning.message) for warning in said] == [True]
    if left is None:
        left = [s for s in range(12) if (s % 3 == 0) != (columns == list(FULL))]
    assert read(run, "loss/mean") == (left, [])


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        *(("series/000001/full-*", field) for field in ("program", "columns", "path")),
        *(("events/000001/00000000", field) for field in ("step", "time", "kind", "payload")),
        *(("coverage/000001/light-*", field) for field in ("program", "layout", "points", "missing")),
        ("attempts/000001", "first_step"),
        ("columns/*", "names"),
    ],
)
@pytest.mark.parametrize("how", ["lacks", "is of another kind"])
def test_an_entry_without_one_of_its_fields_is_a_damaged_one(folder, entry, field, how):
    path = next(folder.glob(f"entries/{entry}.json"))
    content = json.loads(path.read_text())
    if how == "lacks":
        del content[field]
    else:
        content[field] = {} if field != "payload" else []
    path.write_text(json.dumps(content))
    run = open_run(folder)
    with pytest.warns(DamagedRun, match=field) as said:
        run.manifest(), run.events(), run.coverage()
    assert [str(path.relative_to(folder)) in str(warning.message) for warning in said] == [True]
    assert run.damaged() == [str(said[0].message)]
    steps, _ = read(run, "loss/mean")
    assert steps and set(steps) <= set(range(12))


def test_events_that_say_less_than_the_recorders_own_do_not_stop_the_screen(folder, capsys):
    sink = StoreSink(folder)
    for kind in ("shed", "scan_overhead", "attempt"):
        sink.write_event(5, kind, {"share": 0.1})
    sink.close()
    assert main(["screen", str(folder)]) == 0 and "loss/mean" in capsys.readouterr().out


def test_files_of_somebody_else_among_the_entries_are_passed_over(folder):
    for kind in ("attempts", "series", "events", "coverage"):
        (folder / "entries" / kind / "notes.json").write_text("mine")
    run = open_run(folder)
    assert read(run, "loss/mean") == (list(range(12)), [])
    assert len(run.manifest()["series"]) == 2 and len(run.events()) == len(run.coverage()) == 1


@pytest.mark.parametrize("content", ["{", "[]", "3"])
def test_a_damaged_run_entry_says_what_to_do(folder, content):
    (folder / "entries" / "run.json").write_text(content)
    with pytest.raises(ValueError, match=r'run.json is damaged .*write {"format": 1} into it'):
        open_run(folder)
    (folder / "entries" / "run.json").write_text('{"format": 1}')
    assert read(open_run(folder), "grad/norm")[0] == [1, 2, 4, 5, 7, 8, 10, 11]


def test_the_screen_shows_the_rest_and_says_what_is_missing(folder, capsys):
    chunk = arrays(folder, "light") / "values" / "c" / "0" / "0"
    chunk.write_bytes(b"")
    (folder / "flight").mkdir()
    (folder / "flight" / "process_0.bin").write_bytes(b"something else")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["screen", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "loss/mean" in out and "What was unusual" in out
    tail = out.split("Could not be read:\n")[1]
    assert str(chunk) in tail and "flight/process_0.bin" in tail and tail.count("\n") == 2


def lose(folder, what):
    (folder / "flight").mkdir()
    with contextlib.closing(FlightRecord(folder / "flight" / "process_0.bin")) as flight:
        flight.write(Readings(11, "light", LIGHT, np.array([11.0, 1.0]), np.ones(2, bool), wall_time=1e9))
    if what == "store":
        shutil.rmtree(folder / "entries")
    for path in (folder / "series").rglob("*"):
        if path.is_file():
            path.write_bytes(b"") if what == "bytes" else path.unlink()


@pytest.mark.parametrize("what", ["store", "arrays", "bytes"])
def test_of_a_run_whose_store_is_lost_nothing_is_said_to_be_usual(folder, what, capsys):
    lose(folder, what)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["screen", str(folder)]) == 0
        out = capsys.readouterr().out
        assert "Nothing can be said of the signals: the run's store is missing or damaged, or was never flushed" in out
        assert "What was unusual: nothing" not in out and "flight record goes on to step 11" in out
        assert main(["series", str(folder), "grad/norm"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("probes series: ") and err.count("\n") == 1
    assert ("its store is missing or damaged" in err and "flight() goes on to step 11" in err) == (what == "store")


def test_a_series_that_is_damaged_in_part_is_printed_and_said_to_be(folder, capsys):
    (arrays(folder, "light") / "values" / "c" / "1" / "0").write_bytes(b"")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["series", str(folder), "grad/norm"]) == 0
    out, err = capsys.readouterr()
    assert [line.split("\t")[0] for line in out.splitlines()] == ["1", "2", "4", "5"]
    assert err.startswith("probes series: ") and "1 of its 2 blocks" in err and err.count("\n") == 1
