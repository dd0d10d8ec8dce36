"""The flight records of a job side by side."""

import numpy as np
import pytest

import probes_jax as pj
from probes_jax.host.damage import DamagedRun
from probes_jax.host.flight import FlightRecord, previous_path
from probes_jax.host.flights import FlightTail, find_lacking, flight_tail
from probes_jax.host.read_flight import read_flight
from probes_jax.present.unusual import find_unusual
from probes_jax.spec.readings import decoder_of
from tests.host.recorder_fakes import LIGHT, buffer_of, report


def _write(path, *attempts, **options):
    decoder = decoder_of(LIGHT)
    for started, steps in enumerate(attempts):
        record = FlightRecord(path, clock=lambda started=started: 100.0 + started, **options)
        for step in steps:
            record.write(decoder.decode(buffer_of(step)).extended((), (), 1000.0 + step))
        record.close()


def _tail(steps, processes=2, started=0.0, cut=False, pace=1.0):
    steps = np.array(list(steps), np.int64)
    return FlightTail(processes, started, steps, 50.0 + pace * steps, cut)


@pytest.mark.parametrize("most_bytes", [1 << 20, 2000, 400])
def test_the_tail_is_the_end_of_what_the_whole_reader_finds(tmp_path, most_bytes):
    path = tmp_path / "process_1.bin"
    _write(path, range(50), process=1, processes=4)
    tail, whole = flight_tail(path, most_bytes), read_flight(path)
    count = tail.steps.size
    assert count == 50 if most_bytes == 1 << 20 else 0 < count < 50
    assert tail.steps.tolist() == [s.step for s in whole[-count:]]
    assert tail.wall_times.tolist() == [s.wall_time for s in whole[-count:]]
    assert (tail.processes, tail.started, tail.cut) == (4, 100.0, most_bytes < 1 << 20)


def test_the_tail_is_that_of_the_last_attempt_and_survives_torn_frames(tmp_path):
    path = tmp_path / "process_0.bin"
    _write(path, range(9), range(5, 12))
    assert flight_tail(path).steps.tolist() == list(range(5, 12))
    data = bytearray(path.read_bytes())
    data[len(data) - 200] ^= 0xFF  # in the middle of a step
    path.write_bytes(bytes(data[:-3]))
    left = flight_tail(path).steps.tolist()
    assert left == sorted(left) and set(left) < set(range(5, 11)) and len(left) >= 3
    path.rename(previous_path(path))
    path.write_bytes(b"")
    assert flight_tail(path) is None


def test_all_alike_lack_nothing():
    assert find_lacking({}) == {}
    assert find_lacking({0: _tail(range(9)), 1: _tail(range(9))}) == {}
    assert find_lacking({0: _tail(range(9), processes=1)}) == {}


def test_gaps_early_ends_and_missing_records_are_named():
    tails = {
        0: _tail(range(20), processes=4),
        1: _tail([step for step in range(20) if step not in (5, 6)], processes=4),
        3: _tail(range(15), processes=4),
    }
    assert find_lacking(tails) == {1: (5, 6), 2: None, 3: (15, 16, 17, 18, 19)}


def test_less_than_a_second_at_the_end_is_no_lack():
    """Ten steps a second: the eleventh from the end was recorded a second before the end."""
    whole = _tail(range(100), pace=0.1)
    assert find_lacking({0: whole, 1: _tail(range(91), pace=0.1)}) == {}
    assert find_lacking({0: whole, 1: _tail(range(89), pace=0.1)}) == {1: tuple(range(89, 100))}
    assert find_lacking({0: whole, 1: _tail([*range(40), *range(41, 91)], pace=0.1)}) == {1: (40,)}


def test_a_record_that_was_cut_is_compared_from_where_it_begins():
    assert find_lacking({0: _tail(range(20)), 1: _tail(range(12, 20), cut=True)}) == {}
    assert find_lacking({0: _tail(range(20)), 1: _tail(range(2, 20), started=-1.0)}) == {1: (0, 1)}


def test_the_job_is_as_large_as_the_newest_attempt_says():
    """A job that goes on with fewer processes lacks none."""
    old, new = _tail(range(9), processes=3, started=1.0), _tail(range(9, 20), processes=1, started=2.0)
    assert find_lacking({0: new, 1: old, 2: old}) == {}
    assert find_lacking({0: new._replace(processes=2), 1: old}) == {1: tuple(range(9, 20))}, "it never came up again"


def test_a_run_says_which_processes_it_has_and_what_they_lack(tmp_path):
    for process, steps in ((0, range(6)), (2, range(4))):
        now = [0.0]
        with pj.Recorder(tmp_path, pj.Plan(), process_index=process, clock=lambda now=now: now[0]) as recorder:
            for step in steps:
                now[0] = 1000.0 + step + process / 10  # the job is as large as the last of them says
                recorder.record(report(step))
                assert recorder.flush()
    run = pj.open_run(tmp_path)
    assert run.processes() == [0, 2]
    assert [run.flight_step(process) for process in range(3)] == [5, None, 3]
    assert run.lacking() == {1: None, 2: (4, 5)}
    told = [str(item) for item in find_unusual(run)]
    assert "flight record of process 1 is not in this folder" in told
    assert "flight record of process 2 lacks what others have at steps 4-5" in told


def test_a_run_of_which_only_another_process_left_something_opens(tmp_path):
    _write(tmp_path / "flight" / "process_1.bin", range(3), process=1, processes=2)
    run = pj.open_run(tmp_path)
    assert (run.processes(), run.flight_step(1), len(run.flight(1)), run.names()) == ([1], 2, 3, [])
    assert run.lacking() == {0: None}


def test_a_damaged_record_is_named_and_the_others_are_read(tmp_path):
    for process in range(2):
        _write(tmp_path / "flight" / f"process_{process}.bin", range(3), process=process, processes=2)
    (tmp_path / "flight" / "process_1.bin").write_bytes(b"something else")
    run = pj.open_run(tmp_path)
    with pytest.warns(DamagedRun, match="process_1.bin"):
        assert run.lacking() == {1: None}
