"""What was seen, in the run folder: once a program and attempt, and never in the way of training."""

from __future__ import annotations

import dataclasses
import json

import pytest

import probes_jax as pj
from probes_jax.host import strict_json
from probes_jax.host.damage import DamagedRun
from probes_jax.host.store_sink import StoreSink
from probes_jax.spec.coverage import Coverage, SeenPoint
from tests.host.recorder_fakes import FULL, LIGHT, buffer_of, full_layout

SEEN = Coverage((SeenPoint("block[*]/mlp", layers=(3,), reported=True),), (("opt/learning_rate", "use pj.chain"),))
UNSEEN = Coverage((), (("opt/learning_rate", "use pj.chain"),))


@dataclasses.dataclass
class Report:
    buffer: object
    layout: object
    coverage: object


def report(step, layout=FULL, coverage=SEEN):
    return Report(buffer_of(step, layout), layout, coverage)


def record(path, reports):
    with pj.Recorder(path, pj.Plan()) as recorder:
        for one in reports:
            recorder.record(one)
    return recorder.health


def entries(path):
    return sorted(str(found.relative_to(path)) for found in path.glob("entries/coverage/*/*.json"))


def test_every_program_says_once_what_it_saw(tmp_path):
    health = record(tmp_path, [report(0), report(1, LIGHT, UNSEEN), report(2, LIGHT, UNSEEN), report(3)])
    assert health.ok
    assert entries(tmp_path) == [
        f"entries/coverage/000001/full-{FULL.fingerprint}.json",
        f"entries/coverage/000001/light-{LIGHT.fingerprint}.json",
    ]
    assert pj.open_run(tmp_path).coverage() == [
        {"attempt": 1, "program": "full", "layout": FULL.fingerprint, "coverage": SEEN},
        {"attempt": 1, "program": "light", "layout": LIGHT.fingerprint, "coverage": UNSEEN},
    ]


def test_a_series_that_could_not_be_measured_gives_the_reason(tmp_path):
    record(tmp_path, [report(0)])
    with pytest.raises(KeyError, match="'opt/learning_rate'; use pj.chain"):
        pj.open_run(tmp_path).series("opt/learning_rate")


def test_a_later_flush_does_not_write_it_again(tmp_path):
    sink = StoreSink(tmp_path)
    sink.describe(FULL, SEEN)
    written = []
    for step in range(2):
        sink.write(readings(step))
        sink.flush()
        written.append((tmp_path / entries(tmp_path)[0]).stat().st_ino)  # a replaced entry is another file
    assert written[0] == written[1]


def test_the_entry_is_plain_json(tmp_path):
    record(tmp_path, [report(0)])
    (entry,) = (json.loads((tmp_path / name).read_text()) for name in entries(tmp_path))
    assert (entry["program"], entry["layout"]) == ("full", FULL.fingerprint)
    assert entry["points"][0]["name"] == "block[*]/mlp" and entry["points"][0]["layers"] == [3]
    assert entry["missing"] == [{"name": "opt/learning_rate", "reason": "use pj.chain"}]


def test_a_resumed_run_and_another_model_keep_what_was_seen_before(tmp_path):
    other = Coverage((SeenPoint("block[*]/mlp", layers=(2,), reported=True),))
    record(tmp_path, [report(0)])
    record(tmp_path, [report(1), report(2, full_layout(2), other)])
    found = [(entry["attempt"], entry["coverage"]) for entry in pj.open_run(tmp_path).coverage()]
    assert sorted(found, key=str) == sorted([(1, SEEN), (2, SEEN), (2, other)], key=str)


def test_a_rollback_begins_an_attempt_that_says_it_again(tmp_path):
    sink = StoreSink(tmp_path, rows=4)
    sink.describe(FULL, SEEN)
    for step in (0, 1, 0):
        sink.write(readings(step))
    sink.close()
    assert [entry["attempt"] for entry in pj.open_run(tmp_path).coverage()] == [1, 2]


def readings(step):
    from probes_jax.spec.readings import decoder_of

    return decoder_of(FULL).decode(buffer_of(step, FULL))


def test_nothing_is_created_before_the_first_row(tmp_path):
    sink = StoreSink(tmp_path / "run")
    sink.describe(FULL, SEEN)
    sink.flush()
    assert not (tmp_path / "run" / "entries" / "coverage").exists()


def test_a_failure_to_write_is_counted_and_tried_again(tmp_path, monkeypatch):
    """The recorder goes on, its rows are saved, and what was seen is written at the next flush."""
    calls = []

    def dumps(value):
        if "points" in value and len(calls) < 1:
            calls.append(value)
            raise OSError(28, "No space left on device")
        return real(value)

    real = strict_json.dumps
    monkeypatch.setattr(strict_json, "dumps", dumps)
    with pj.Recorder(tmp_path, pj.Plan()) as recorder:
        recorder.record(report(0))
        assert not recorder.flush(10.0)
        assert pj.open_run(tmp_path).series("loss/mean")[0].tolist() == [0]
        recorder.record(report(1))
    assert recorder.health.sinks["store"].failed == 1
    assert recorder.health.sinks["store"].dropped == 0
    assert [entry["coverage"] for entry in pj.open_run(tmp_path).coverage()] == [SEEN]


@pytest.mark.parametrize("coverage", [None, "all", {"points": 3}])
def test_what_is_no_coverage_is_not_written(tmp_path, coverage):
    assert record(tmp_path, [report(0, FULL, coverage)]).ok
    assert pj.open_run(tmp_path).coverage() == []


def test_a_damaged_entry_is_named_and_left_out(tmp_path):
    record(tmp_path, [report(0), report(1, LIGHT, UNSEEN)])
    (tmp_path / entries(tmp_path)[0]).write_text('{"program": "full", "layout": "x"}')
    (tmp_path / "entries" / "coverage" / "000001" / "zzz.json").write_text("{")
    run = pj.open_run(tmp_path)
    with pytest.warns(DamagedRun, match="what of a program was seen"):
        found = run.coverage()
    assert [entry["program"] for entry in found] == ["light"]
    assert len(run.damaged()) == 2
