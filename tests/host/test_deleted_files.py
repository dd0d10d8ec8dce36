"""Somebody deletes or moves a run's files while the run goes on: said once, and the run is written again."""

import logging
import os
import shutil

import numpy as np
import pytest

from probes_jax.host.flight import FlightRecord
from probes_jax.host.read_flight import read_flight
from probes_jax.host.recorder import Recorder
from probes_jax.host.run_folder import is_still_at, open_run
from probes_jax.host.store import SeriesArrays, Store
from probes_jax.host.store_sink import StoreSink
from probes_jax.host.writers.event import EventWriter
from probes_jax.spec.plan import Plan
from probes_jax.spec.readings import Readings
from tests.host.event_files import read_scalars
from tests.host.recorder_fakes import report

NAMES = ("loss/mean", "data/empty_steps")


def reading(step, program="light", names=NAMES):
    return Readings(step, program, names, np.array([float(step), 0.0]), np.ones(2, bool))


def delete(folder, aside):
    shutil.rmtree(folder)


def move(folder, aside):
    folder.rename(aside)


@pytest.mark.parametrize("how", [delete, move])
def test_every_sink_of_a_recorder_says_it_once_and_writes_on(tmp_path, caplog, how):
    folder = tmp_path / "run"
    with caplog.at_level(logging.WARNING), Recorder(folder, Plan(), flush_every=1000.0) as recorder:
        for step in range(5):
            recorder.record(report(step))
        assert recorder.flush()
        how(folder, tmp_path / "aside")
        for step in range(5, 10):
            recorder.record(report(step))
        assert not recorder.flush()
        assert recorder.flush()
        for step in range(10, 15):
            recorder.record(report(step))
    health = recorder.health
    assert {name: sink.failed for name, sink in health.sinks.items()} == {"flight": 1, "events": 1, "store": 1}
    assert all(
        str(folder) in sink.last_error and "deleted or moved" in sink.last_error for sink in health.sinks.values()
    )
    lines = [record.message for record in caplog.records if "was deleted" in record.message]
    assert len(lines) == 3, lines
    run = open_run(folder)
    assert run.series("loss/mean")[0].tolist() == list(range(15)), "the rows of the last block were still in memory"
    assert run.series("sys/monitor/failed")[1].max() == 3.0
    assert [attempt["first_step"] for attempt in run.manifest()["attempts"]] == [0]
    assert next((event["kind"], event["step"]) for event in run.events()) == ("attempt", 0)
    assert read_scalars(folder / "events")["loss/mean"][-1][0] == 14
    assert [found.step for found in run.flight()][-5:] == list(range(10, 15))


@pytest.mark.parametrize(
    "gone", ["entries/run.json", "entries/attempts", "series", "series/000001/light-{}/step/zarr.json"]
)
def test_any_part_of_the_store_that_is_gone_is_noticed(tmp_path, gone):
    sink = StoreSink(tmp_path, rows=4)
    for step in range(6):
        sink.write(reading(step))
    sink.flush()
    (series,) = (tmp_path / "series" / "000001").iterdir()
    path = tmp_path / gone.format(series.name.removeprefix("light-"))
    path.unlink() if path.is_file() else shutil.rmtree(path)
    sink.write(reading(6))
    with pytest.raises(FileNotFoundError, match="deleted or moved") as said:
        sink.flush()
    assert str(tmp_path) in str(said.value)
    sink.write(reading(7))
    sink.close()
    assert open_run(tmp_path).manifest()["attempts"][-1]["first_step"] == 4


def test_a_full_block_is_saved_again_and_the_step_that_found_out_is_taken_at_the_second_try(tmp_path):
    sink = StoreSink(tmp_path, rows=4)
    for step in range(4):
        sink.write(reading(step))
    sink.write(reading(4))  # saves the full block
    for step in range(5, 8):
        sink.write(reading(step))
    shutil.rmtree(tmp_path)
    with pytest.raises(FileNotFoundError, match="deleted or moved"):
        sink.write(reading(8))
    sink.write(reading(8))
    sink.close()
    assert open_run(tmp_path).series("loss/mean")[0].tolist() == [4, 5, 6, 7, 8]
    (series,) = open_run(tmp_path).manifest()["series"]
    assert SeriesArrays(Store(str(tmp_path)), series["path"]).blocks() == [(0, 4), (4, 8)], "without a hole"


def test_a_rollback_and_several_series_after_a_deletion(tmp_path):
    sink, other = StoreSink(tmp_path), ("loss/mean", "act/a/rms")
    for step in range(3):
        sink.write(reading(step))
    sink.write(reading(3, "full", other))
    sink.flush()
    shutil.rmtree(tmp_path)
    with pytest.raises(FileNotFoundError):
        sink.write(reading(1))
    sink.write(reading(1))
    sink.close()
    run = open_run(tmp_path)
    assert run.series("loss/mean")[0].tolist() == [0, 1]
    assert run.series("loss/mean", raw=True)[0].tolist() == [0, 1, 2, 3, 1]


def test_a_moved_file_is_noticed_like_a_deleted_one(tmp_path):
    record = FlightRecord(tmp_path / "flight.bin")
    record.write(reading(0))
    (tmp_path / "flight.bin").rename(tmp_path / "aside.bin")
    with pytest.raises(FileNotFoundError, match="flight record .* was deleted or moved"):
        record.flush()
    record.write(reading(1))
    record.close()
    assert [[s.step for s in read_flight(tmp_path / f"{name}.bin")] for name in ("aside", "flight")] == [[0], [1]]
    writer = EventWriter(tmp_path / "events")
    writer.write_scalars(0, {"loss/mean": 1.0})
    writer.flush()
    (tmp_path / "events").rename(tmp_path / "old")
    with pytest.raises(FileNotFoundError, match="event file .* was deleted or moved"):
        writer.flush()
    writer.write_scalars(1, {"loss/mean": 1.0})
    writer.close()
    assert [[s for s, _ in read_scalars(tmp_path / name)["loss/mean"]] for name in ("old", "events")] == [[0], [1]]


def test_a_replaced_file_is_not_still_there(tmp_path):
    with open(tmp_path / "a", "w") as file:
        assert is_still_at(tmp_path / "a", file.fileno())
        (tmp_path / "b").write_text("")
        os.replace(tmp_path / "b", tmp_path / "a")
        assert not is_still_at(tmp_path / "a", file.fileno())


def test_a_changed_working_directory_moves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with Recorder("run", Plan()) as recorder:
        monkeypatch.chdir(tmp_path / "elsewhere")
        for step in range(5):
            recorder.record(report(step))
        assert recorder.flush()
        monkeypatch.chdir(tmp_path)
        recorder.record(report(5))
    assert recorder.health.ok and not list((tmp_path / "elsewhere").iterdir())
    assert open_run(tmp_path / "run").series("loss/mean")[0].tolist() == list(range(6))
