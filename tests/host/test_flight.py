import os
import time

import numpy as np
import pytest

from probes_jax.host.flight import MAGIC, FlightRecord, frame, previous_path
from probes_jax.host.read_flight import read_flight
from probes_jax.spec.readings import Readings, decoder_of
from tests.host.recorder_fakes import FULL, LIGHT, P0, buffer_of

NAMES = (*P0, "alert/co_spike/count", "grad/abs_mean")  # the last is P1


def _readings(step, values=None, names=NAMES, present=None, which=None, wall_time=100.0):
    values = np.arange(len(names)) + step / 4 if values is None else np.array(values, np.float64)
    present = np.ones(len(names), bool) if present is None else np.array(present)
    return Readings(step, "light", names, np.where(present, values, np.nan), present, which or {}, wall_time)


def _write(path, *readings, **options):
    record = FlightRecord(path, **options)
    for one in readings:
        record.write(one)
    record.close()


def test_every_p0_value_of_every_step_comes_back(tmp_path):
    path = tmp_path / "flight" / "process_3.bin"
    _write(path, *(_readings(step, wall_time=1.7e9 + step / 8) for step in range(50)), process=3)
    steps = read_flight(path)
    assert [s.step for s in steps] == list(range(50))
    assert steps[7].values == {name: index + 7 / 4 for index, name in enumerate(NAMES[:-1])}, "P0 only"
    assert steps[7].wall_time == 1.7e9 + 7 / 8 and steps[7].attempt == 0


def test_counts_are_exact_past_2_to_24(tmp_path):
    count = 2.0**53 - 1
    names = ("alert/co_spike/count", "loss/mean")
    _write(tmp_path / "f.bin", _readings(0, [count, 0.1], names))
    assert read_flight(tmp_path / "f.bin")[0].values == {names[0]: count, names[1]: float(np.float32(0.1))}


def test_absent_nan_zero_and_infinity_stay_four_things(tmp_path):
    values = [np.nan, 0.0, np.inf, -np.inf, np.nan, 0.0, 3.0, 1.0]
    present = [True, True, True, True, False, False, True, True]
    _write(tmp_path / "f.bin", _readings(0, values, present=present))
    found = read_flight(tmp_path / "f.bin")[0].values
    assert np.isnan(found[P0[0]])
    assert [found[name] for name in P0[1:4]] == [0.0, np.inf, -np.inf]
    assert P0[4] not in found and P0[5] not in found


def test_which_layer_or_shard_it_was_stands_beside_the_value(tmp_path):
    rows = [
        _readings(0, which={"loss/worst_shard": "loss/shard[3]"}),
        _readings(1),
        _readings(2, which={"loss/worst_shard": "loss/shard[0]"}),
        _readings(3, which={"loss/worst_shard": "loss/shard[3]"}),
    ]
    _write(tmp_path / "f.bin", *rows)
    found = [s.which.get("loss/worst_shard") for s in read_flight(tmp_path / "f.bin")]
    assert found == ["loss/shard[3]", None, "loss/shard[0]", "loss/shard[3]"]


def test_light_and_full_reports_alternate(tmp_path):
    light, full = (decoder_of(layout).decode(buffer_of(0, layout)) for layout in (LIGHT, FULL))
    rows = [
        Readings(step, "", r.names, r.values, r.present, r.which)
        for step in range(9)
        for r in [full if step % 3 == 0 else light]
    ]
    _write(tmp_path / "f.bin", *rows)
    steps = read_flight(tmp_path / "f.bin")
    assert [s.step for s in steps] == list(range(9))
    assert ["act/abs_max" in s.values for s in steps] == [s % 3 == 0 for s in range(9)]
    assert steps[3].which["act/abs_max"] == "act/block[0]/mlp"


def test_about_a_hundred_bytes_a_step(tmp_path):
    names = (
        "loss/mean", "loss/worst_shard",
        *(f"loss/group/{group}/{stat}" for group in ("a", "b", "c") for stat in ("mean", "token_share")),
        "grad/norm", "grad/clip_rate", "alert/co_spike", "alert/co_spike/count", "alert/guard/stopped",
        "alert/nonfinite_accepted", "logits/abs_max",
    )  # fmt: skip
    which = {"loss/worst_shard": "loss/shard[1]"}
    _write(tmp_path / "f.bin", *(_readings(s, names=names, which=which) for s in range(1000)))
    assert (tmp_path / "f.bin").stat().st_size / 1000 < 110


@pytest.mark.parametrize("cut", [1, 4, 5, 30, 45])
def test_a_torn_tail_costs_only_the_last_step(tmp_path, cut):
    path = tmp_path / "f.bin"
    _write(path, *(_readings(step) for step in range(10)))
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    assert [s.step for s in read_flight(path)][:9] == list(range(9))
    assert len(read_flight(path)) == 9


def test_a_resumed_run_goes_on_after_a_torn_tail(tmp_path):
    path = tmp_path / "f.bin"
    _write(path, *(_readings(step) for step in range(10)), clock=lambda: 1.0)
    path.write_bytes(path.read_bytes()[:-3])
    _write(path, *(_readings(step) for step in range(5, 8)), clock=lambda: 2.0)
    assert [(s.attempt, s.step) for s in read_flight(path)] == [(0, s) for s in range(9)] + [(1, s) for s in (5, 6, 7)]


def test_a_flipped_bit_is_no_value(tmp_path):
    path = tmp_path / "f.bin"
    _write(path, *(_readings(step) for step in range(10)))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    good = {s: _readings(s).values[:-1].tolist() for s in range(10)}
    found = read_flight(path)
    assert 0 < len(found) < 10
    assert all(list(s.values.values()) == good[s.step] for s in found)


def test_the_cap_holds_and_the_newest_steps_stay(tmp_path):
    path = tmp_path / "f.bin"
    record = FlightRecord(path, cap_bytes=8192, clock=lambda: 5.0)
    for step in range(1000):
        record.write(_readings(step, which={"loss/worst_shard": f"loss/shard[{step % 5}]"}))
        older = previous_path(path)
        assert path.stat().st_size + (older.stat().st_size if older.exists() else 0) <= 8192
    record.close()
    steps = read_flight(path)
    assert [s.step for s in steps] == list(range(1000 - len(steps), 1000)) and len(steps) > 40
    older = read_flight(previous_path(path))
    assert len(older) > 30 and steps[: len(older)] == older, "both segments are read as one record"
    assert {s.attempt for s in steps} == {0}
    assert steps[-1].which == {"loss/worst_shard": "loss/shard[4]"}
    assert record.discarded_bytes > 8192


def test_after_a_failed_write_the_next_one_starts_where_a_reader_looks(tmp_path, monkeypatch):
    path = tmp_path / "f.bin"
    record = FlightRecord(path)
    record.write(_readings(0))
    real = os.write

    def full_disk(fd, data):
        real(fd, bytes(data)[:20])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full_disk)
    with pytest.raises(OSError, match="space"):
        record.write(_readings(1))
    monkeypatch.setattr(os, "write", real)
    record.write(_readings(2))
    record.close()
    assert [s.step for s in read_flight(path)] == [0, 2]


def test_a_write_that_takes_only_part_is_completed(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data)[:7]))
    _write(tmp_path / "f.bin", *(_readings(step) for step in range(5)))
    monkeypatch.undo()
    assert len(read_flight(tmp_path / "f.bin")) == 5


def test_a_deleted_file_is_noticed_and_made_again(tmp_path):
    path = tmp_path / "flight" / "f.bin"
    record = FlightRecord(path)
    record.write(_readings(0))
    path.unlink()
    path.parent.rmdir()
    with pytest.raises(FileNotFoundError, match="deleted"):
        record.flush()
    record.write(_readings(1))
    record.close()
    assert [s.step for s in read_flight(path)] == [1]


def test_many_sets_of_names_start_afresh(tmp_path):
    rows = [_readings(step, names=("loss/mean", f"loss/group/g{step}/mean")) for step in range(600)]
    _write(tmp_path / "f.bin", *rows)
    steps = read_flight(tmp_path / "f.bin")
    assert [s.step for s in steps] == list(range(600)) and {s.attempt for s in steps} == {0}
    assert steps[599].values["loss/group/g599/mean"] == 1 + 599 / 4


def test_names_longer_than_a_short_frame(tmp_path):
    names = tuple(f"loss/group/{'x' * 40}{i}/mean" for i in range(2000))
    _write(tmp_path / "f.bin", *(_readings(step, names=names) for step in range(3)))
    assert [len(s.values) for s in read_flight(tmp_path / "f.bin")] == [2000] * 3


def test_unknown_format_and_foreign_files_are_refused(tmp_path):
    path = tmp_path / "f.bin"
    path.write_bytes(MAGIC + frame(b"A", b'{"format": 2, "process": 0, "started": 1}'))
    with pytest.raises(ValueError, match="format 2"):
        read_flight(path)
    path.write_bytes(b"something else entirely")
    with pytest.raises(ValueError, match="not a flight record"):
        read_flight(path)
    path.write_bytes(b"")
    assert read_flight(path) == []
    with pytest.raises(FileNotFoundError):
        read_flight(tmp_path / "none.bin")
    with pytest.raises(ValueError, match="cap_bytes"):
        FlightRecord(path, cap_bytes=10)


def test_a_step_is_in_the_file_before_write_returns(tmp_path):
    path = tmp_path / "f.bin"
    record = FlightRecord(path)
    for step in range(3):
        record.write(_readings(step))
        assert read_flight(path)[-1].step == step
    record.close()


def test_a_step_costs_little(tmp_path):
    record = FlightRecord(tmp_path / "f.bin")
    start = time.perf_counter()
    rows = [_readings(step) for step in range(2000)]
    for one in rows:
        record.write(one)
    assert (time.perf_counter() - start) / 2000 < 5e-3
    record.close()
