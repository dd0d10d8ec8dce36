"""What was seen cannot be written, or cannot be read: the rows are none the worse for it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import textwrap
import warnings

import pytest

import probes_jax as pj
from probes_jax.host import strict_json
from probes_jax.host.sink import BesideNotSaved
from probes_jax.host.store_sink import StoreSink
from probes_jax.present.cli import main
from probes_jax.spec.readings import decoder_of
from tests.host.recorder_fakes import FULL, LIGHT, buffer_of
from tests.host.test_coverage import SEEN, UNSEEN, readings, record, report


def saved(path):
    return pj.open_run(path).series("loss/mean")[0].tolist()


@pytest.fixture
def in_place(tmp_path):
    """A run folder where a file stands in the place of the coverage."""
    (tmp_path / "entries").mkdir()
    (tmp_path / "entries" / "coverage").write_text("somebody else's")
    return tmp_path


@pytest.fixture
def full_disk(monkeypatch):
    """No space for what was seen, as long as the list is not empty."""
    full, real = [True], strict_json.dumps

    def dumps(value):
        if full and "points" in value:
            raise OSError(28, "No space left on device")
        return real(value)

    monkeypatch.setattr(strict_json, "dumps", dumps)
    return full


def test_training_goes_on_every_row_is_saved_and_it_is_said_once(in_place, caplog, capsys):
    """More rows than a block holds: what cannot be saved beside them keeps none of them out."""
    sink = StoreSink(in_place, rows=2)
    with caplog.at_level(logging.WARNING), pj.Recorder(sinks=[sink], flush_every=0.01) as recorder:
        for step in range(9):
            recorder.record(report(step))
            assert not recorder.flush(10.0)
    health = recorder.health.sinks["StoreSink"]
    assert (health.written, health.dropped) == (9, 0) and health.failed >= 9
    assert "rows are saved, but not what goes with them" in health.last_error
    said = [line.getMessage() for line in caplog.records]
    assert len(said) == 2 and "sink 'StoreSink': rows are saved" in said[1], said  # the first names what is missing
    assert saved(in_place) == list(range(9))
    assert pj.open_run(in_place).events()[0]["kind"] == "attempt"
    assert main(["coverage", str(in_place)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("probes coverage: entries/coverage/ of run") and error.count("\n") == 1
    assert main(["screen", str(in_place)]) == 0


def test_a_full_disk_that_has_space_again(tmp_path, full_disk):
    sink = StoreSink(tmp_path, rows=2)
    sink.describe(FULL, SEEN)
    for step in range(5):
        sink.write(readings(step))
    with pytest.raises(BesideNotSaved, match="No space left"):
        sink.flush()
    assert saved(tmp_path) == list(range(5)) and pj.open_run(tmp_path).coverage() == []
    full_disk.clear()
    sink.flush()
    assert [entry["coverage"] for entry in pj.open_run(tmp_path).coverage()] == [SEEN]


def test_a_run_that_goes_back_leaves_what_it_could_not_save(tmp_path, full_disk, caplog):
    sink = StoreSink(tmp_path)
    sink.describe(FULL, SEEN)
    with caplog.at_level(logging.WARNING):
        for step in (0, 1, 0):
            sink.write(readings(step))
    assert "attempt 000001" in caplog.text and "No space left" in caplog.text
    full_disk.clear()
    sink.close()
    assert [entry["attempt"] for entry in pj.open_run(tmp_path).coverage()] == [2]
    assert saved(tmp_path) == [0]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_kill_just_after_the_first_report_or_while_it_is_written(tmp_path, capsys, when):
    code = """
        import os, signal, sys
        import probes_jax as pj
        from probes_jax.host import strict_json
        from probes_jax.host.store import Store
        from tests.host.test_coverage import report
        def write(self, key, value):
            begun = self._kv.write(key, strict_json.dumps(value))
            if "coverage" in key:
                os.kill(os.getpid(), signal.SIGKILL)
            begun.result()
        Store.write = write
        recorder = pj.Recorder(sys.argv[1], pj.Plan())
        recorder.record(report(0))
        if sys.argv[2] == "meanwhile":
            recorder.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    run = tmp_path / "run"
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(run), when], check=False)
    assert done.returncode == -9
    assert main(["coverage", str(run)]) in ((1,) if when == "before" else (0, 1))  # the file may just have been renamed
    out, error = capsys.readouterr()
    assert "Traceback" not in error and "damaged" not in out + error
    assert record(run, [report(1)]).ok
    found = pj.open_run(run)
    assert found.coverage()[-1]["coverage"] == SEEN and found.damaged() == []
    assert saved(run) == ([1] if when == "before" else [0, 1])


def changed(**point):
    entry = {"program": "full", "layout": "a", **SEEN.to_json()}
    return {**entry, "points": [{**entry["points"][0], **point}]}


GARBAGE = {
    "empty": "",
    "truncated": json.dumps(changed())[:150],
    "null": "null",
    "list": "[]",
    "no points": json.dumps({**changed(), "points": 3}),
    "bare NaN": '{"points": NaN}',
    "an unknown float": '{"$float": "bad"}',
    "nested": "[" * 100_000,
    "layers": json.dumps(changed(layers="abc")),
    "shape": json.dumps(changed(shape=None)),
    "through": json.dumps(changed(through=[1])),
    "role": json.dumps(changed(role={"a": 1})),
    "reported": json.dumps(changed(reported="yes")),
    "name": json.dumps(changed(name=None)),
    "reason": json.dumps({**changed(), "missing": [{"name": "a", "reason": 4}]}),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_named_in_every_form_and_the_rest_is_shown(tmp_path, capsys, garbage):
    record(tmp_path, [report(0), report(1, LIGHT, UNSEEN)])
    entry = next(tmp_path.glob("entries/coverage/000001/full-*.json"))
    entry.write_text(garbage)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["coverage", str(tmp_path)]) == 0
        out, error = capsys.readouterr()
        assert entry.name in out.splitlines()[0] and "is damaged" in out and error == ""
        assert "Only the light program" not in out and "missing opt/learning_rate: use pj.chain" in out
        assert main(["coverage", "--json", str(tmp_path)]) == 0
        assert "is damaged" in json.loads(capsys.readouterr().out)["notes"][0]
        assert main(["coverage", "--markdown", str(tmp_path)]) == 0
        assert "is damaged" in capsys.readouterr().err
        assert main(["screen", str(tmp_path)]) == 0
    next(tmp_path.glob("entries/coverage/000001/light-*.json")).unlink()
    assert main(["coverage", str(tmp_path)]) == 1
    assert entry.name in capsys.readouterr().err


def test_an_event_that_cannot_be_saved_keeps_no_row_out(tmp_path):
    (tmp_path / "entries").mkdir()
    (tmp_path / "entries" / "events").write_text("somebody else's")
    sink = StoreSink(tmp_path, rows=2)
    sink.describe(LIGHT, UNSEEN)
    for step in range(5):
        sink.write(decoder_of(LIGHT).decode(buffer_of(step, LIGHT)))
    with pytest.raises(BesideNotSaved, match="Not a directory|not a directory|FAILED_PRECONDITION"):
        sink.flush()
    assert saved(tmp_path) == list(range(5))
    assert [entry["coverage"] for entry in pj.open_run(tmp_path).coverage()] == [UNSEEN]
