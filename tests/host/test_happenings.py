"""Events of a run: what its counters show, and which steps an attempt did again."""

import logging

import numpy as np
import pytest

from probes_jax.host import store
from probes_jax.host.happenings import KINDS
from probes_jax.host.run_folder import open_run
from probes_jax.host.store import SeriesArrays
from probes_jax.host.store_sink import StoreSink
from probes_jax.spec.catalog import REGISTRY
from probes_jax.spec.readings import Readings

NAMES = (*KINDS, "loss/spike/score", "grad/spike/score")


def reading(step, **values):
    """Everything is 0 unless given (`alert__co_spike__count=1`); None is absent."""
    found = [dict.get(values, name.replace("/", "__"), 0.0) for name in NAMES]
    seen = np.array([value is not None for value in found])
    return Readings(step, "light", NAMES, np.array([np.nan if v is None else v for v in found]), seen)


def told(path):
    return [(e["attempt"], e["step"], e["kind"], e["payload"]) for e in open_run(path).events()]


def write(path, *readings, **more):
    sink = StoreSink(path, **more)
    for one in readings:
        sink.write(one)
    sink.close()


@pytest.mark.parametrize("name", KINDS)
def test_a_counter_that_rises_is_an_event_and_its_first_value_is_not(tmp_path, name):
    assert REGISTRY.find(name) is not None
    key = name.replace("/", "__")
    counts = (7.0, 7.0, 8.0, None, 8.0, 8.0)
    write(tmp_path, *(reading(step, **{key: count}) for step, count in enumerate(counts, 10)))
    events = told(tmp_path)
    assert [event[:3] for event in events] == [(1, 10, "attempt"), (1, 12, KINDS[name])]
    assert events[0][3] == {"first_step": 10}
    assert {"count": 8, "rise": 1, "last_step": 12}.items() <= events[1][3].items()


def test_a_co_spike_says_its_scores_also_infinite_ones_and_leaves_out_what_is_absent(tmp_path):
    scores = {"loss__spike__score": 9.5, "grad__spike__score": np.inf}
    sink = StoreSink(tmp_path)
    sink.write(reading(0))
    sink.write(reading(1, alert__co_spike__count=1, **scores))
    sink.flush()
    sink.write(reading(2, alert__co_spike__count=2, loss__spike__score=None, grad__spike__score=7.0))
    sink.close()
    _, first, second = (payload for *_, payload in told(tmp_path))
    assert (first["loss/spike/score"], first["grad/spike/score"]) == (9.5, np.inf)
    assert second == {"count": 2, "rise": 1, "last_step": 2, "grad/spike/score": 7.0}


def test_a_run_in_which_every_step_goes_wrong_has_one_event_of_a_kind_per_flush(tmp_path):
    sink = StoreSink(tmp_path)
    for step in range(60):
        sink.write(reading(step, alert__nonfinite_steps=step, alert__guard__skipped_count=2 * step))
        if step == 29:
            sink.flush()
    sink.close()
    assert told(tmp_path)[1:] == [
        (1, 1, "skipped", {"count": 58, "rise": 58, "last_step": 29}),
        (1, 1, "nonfinite", {"count": 29, "rise": 29, "last_step": 29}),
        (1, 30, "skipped", {"count": 118, "rise": 60, "last_step": 59}),
        (1, 30, "nonfinite", {"count": 59, "rise": 30, "last_step": 59}),
    ]


def test_l100_an_attempt_says_which_steps_it_supersedes_and_logs_them_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "probes_jax.recorder"):
        write(tmp_path, *map(reading, range(10)), rows=4)
        assert caplog.messages == []
        write(tmp_path, *map(reading, range(6, 8)))  # supersedes 6..9
        write(tmp_path, *map(reading, range(8, 12)))  # continues at 8: steps 8 and 9 were superseded before
        write(tmp_path, *map(reading, range(3, 5)))
    assert [payload for *_, payload in told(tmp_path)] == [
        {"first_step": 0},
        {"first_step": 6, "superseded_through": 9},
        {"first_step": 8},
        {"first_step": 3, "superseded_through": 11},
    ]
    assert [message.split(" of an")[0] for message in caplog.messages] == ["steps 6..9", "steps 3..11"]


def test_steps_that_go_back_within_a_session_are_an_attempt_with_a_baseline_of_its_own(tmp_path):
    counts = [(0, 0), (1, 3), (2, 4), (1, 3), (2, 3)]
    write(tmp_path, *(reading(step, data__empty_steps=count) for step, count in counts))
    assert [(attempt, step, kind) for attempt, step, kind, _ in told(tmp_path)] == [
        (1, 0, "attempt"),
        (1, 1, "empty_step"),
        (2, 1, "attempt"),
    ]
    assert told(tmp_path)[-1][3] == {"first_step": 1, "superseded_through": 2}


def test_an_earlier_attempt_that_cannot_be_read_keeps_nothing_from_being_written(tmp_path, monkeypatch, caplog):
    write(tmp_path, *map(reading, range(3)))

    def broken(self):
        raise ValueError("damaged")

    monkeypatch.setattr(SeriesArrays, "last_step", broken)
    write(tmp_path, *map(reading, range(1, 5)))
    assert "could not be read (damaged)" in caplog.text
    assert open_run(tmp_path).series("data/empty_steps")[0].tolist() == [0, 1, 2, 3, 4]
    assert told(tmp_path)[-1][3] == {"first_step": 1}


@pytest.mark.parametrize("count", [0, 1, 4, 5, 8])
def test_the_last_step_of_a_series_is_found_from_its_end(tmp_path, count):
    opened = store.Store(str(tmp_path))
    arrays = SeriesArrays.create(opened, "series/a", 1, rows=4)
    block = store.Block(1, 4)
    for step in range(count):
        if block.full:
            block.advance()
        block.append(10 * step, 0.0, np.zeros(1))
        arrays.write(block)
    arrays._arrays["step"].resize(exclusive_max=[16]).result()  # a writer that died after growing the array
    found = SeriesArrays(opened, "series/a").last_step()
    assert found == (10 * (count - 1) if count else None)
