"""The store: nothing lost, nothing half-read, every bit that matters kept."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import tensorstore

from probes_jax.host.run_folder import open_run
from probes_jax.host.run_reader import Run
from probes_jax.host.series_block import ABSENT_BITS, Block, block_rows, decode, encode
from probes_jax.host.store import SeriesArrays, Store
from probes_jax.host.store_sink import StoreSink
from probes_jax.spec.plan import Guard, Plan
from probes_jax.spec.readings import Readings

NAMES = ("loss/mean", "data/tokens_total", "act/a/rms", "act/a/nan_count")


def reading(step, values, present=None, names=NAMES, program="light", **more):
    seen = np.ones(len(names), bool) if present is None else np.asarray(present, bool)
    return Readings(step, program, names, np.where(seen, np.asarray(values, np.float64), np.nan), seen, **more)


def files(folder):
    return [os.path.join(base, name) for base, _, names in os.walk(folder) for name in names]


def test_values_absence_and_nan_come_back_apart(tmp_path):
    sink = StoreSink(tmp_path, rows=4)
    rng = np.random.default_rng(0)
    values = rng.normal(size=(11, 4)).astype(np.float32)  # more than two blocks
    present = rng.random((11, 4)) < 0.7
    values[3] = np.nan
    for step in range(11):
        sink.write(reading(10 * step, values[step], present[step]))
    sink.close()
    run = open_run(tmp_path)
    assert run.names() == list(NAMES)
    for column, name in enumerate(NAMES):
        steps, found, seen = run.series(name)
        np.testing.assert_array_equal(steps, 10 * np.arange(11))
        np.testing.assert_array_equal(seen, present[:, column])
        np.testing.assert_array_equal(found, np.where(present[:, column], values[:, column], np.nan))
    with pytest.raises(KeyError, match=r"names\(\), or `probes series` without a name, lists"):
        run.series("loss/typo")


def test_signals_counts_and_non_finite_values_keep_every_bit(tmp_path):
    tokens = 1e13 + 1.0
    loss = 2.0 + 2.0**-50
    sink = StoreSink(tmp_path)
    sink.write(reading(0, [loss, tokens, 1.0 / 3.0, 2.0**24 + 1]))
    sink.write(reading(1, [math.inf, -math.inf, 1e300, 5e-324]))
    sink.close()
    run = open_run(tmp_path)
    assert run.series("loss/mean")[1].tolist() == [loss, math.inf]
    assert run.series("data/tokens_total")[1].tolist() == [tokens, -math.inf]
    assert run.series("act/a/nan_count")[1].tolist() == [2.0**24 + 1, 5e-324]
    assert run.series("act/a/rms")[1].tolist() == [float(np.float32(1.0 / 3.0)), 1e300]


def test_encoding_against_the_plain_form():
    rng = np.random.default_rng(0)
    values = np.concatenate(
        [rng.normal(size=50) * 10.0 ** rng.integers(-300, 300, 50), [0.0, -0.0, 7.0, np.nan, np.inf]]
    )
    present, exact = rng.random(55) < 0.8, rng.random(55) < 0.3
    found, seen = decode(encode(values, present, exact))
    np.testing.assert_array_equal(seen, present)
    for value, back, keep, there in zip(values, found, exact, present, strict=True):
        with np.errstate(all="ignore"):
            rounded = float(np.float32(value))
            close = abs(rounded - value) <= abs(value) * 2.0**-24
        whole = math.isfinite(value) and value == round(value)
        plain = rounded if close and not (keep or whole) else value
        assert not there or back == plain or (math.isnan(back) and math.isnan(plain))


def test_a_measured_nan_never_reads_as_absent():
    payload = np.array([ABSENT_BITS], np.uint64).view(np.float64)
    _, present = decode(encode(payload, np.ones(1, bool), np.ones(1, bool)))
    assert present.tolist() == [True]


def test_blocks_have_sensible_heights():
    assert [block_rows(n) for n in (1, 100, 1000, 5200, 10**6)] == [1024, 1024, 128, 16, 16]


def test_l098_nothing_is_created_before_the_first_write(tmp_path):
    sink = StoreSink(tmp_path / "run", plan=Plan())
    sink.flush()
    sink.close()
    assert files(tmp_path) == []
    with pytest.raises(FileNotFoundError, match="no run in"):
        open_run(tmp_path / "run")


def test_a_folder_that_cannot_be_made_is_said_at_set_up(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="run_dir .* is not a folder"):
        StoreSink(tmp_path / "file" / "run")
    with pytest.raises(TypeError, match="cannot store"):
        StoreSink(tmp_path, info={"model": object()})
    with pytest.raises(ValueError, match="rows must be"):
        StoreSink(tmp_path, rows=0)


def test_l100_one_value_per_step_after_a_resume_and_both_in_the_raw_record(tmp_path):
    for steps, offset in ((range(1, 6), 0.0), (range(3, 7), 100.0)):
        sink = StoreSink(tmp_path)
        for step in steps:
            sink.write(reading(step, [step + offset, step + offset], names=("loss/mean", "grad/norm")))
        sink.close()
    run = open_run(tmp_path)
    for name in ("loss/mean", "grad/norm"):
        steps, values, _ = run.series(name)
        assert steps.tolist() == [1, 2, 3, 4, 5, 6]
        assert values.tolist() == [1.0, 2.0, 103.0, 104.0, 105.0, 106.0]
        steps, values, _ = run.series(name, raw=True)
        assert steps.tolist() == [1, 2, 3, 4, 5, 3, 4, 5, 6]
        assert values.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 103.0, 104.0, 105.0, 106.0]


def test_l100_what_was_not_measured_again_is_superseded_too(tmp_path):
    first, second = StoreSink(tmp_path), StoreSink(tmp_path)
    for step in range(6):
        first.write(reading(step, [step, 1.0], names=("loss/mean", "eval/nll")))
    first.close()
    second.write(reading(3, [30.0], names=("loss/mean",)))
    second.close()
    run = open_run(tmp_path)
    assert run.series("loss/mean")[0].tolist() == [0, 1, 2, 3]
    assert run.series("eval/nll")[0].tolist() == [0, 1, 2]
    assert run.series("eval/nll", raw=True)[0].tolist() == [0, 1, 2, 3, 4, 5]


def test_steps_that_go_back_within_a_session_start_another_attempt(tmp_path):
    sink = StoreSink(tmp_path, rows=4)
    for step in (0, 1, 2, 3, 4, 5, 2, 3):
        sink.write(reading(step, [step], names=("loss/mean",)))
    sink.close()
    run = open_run(tmp_path)
    assert run.series("loss/mean")[0].tolist() == [0, 1, 2, 3]
    assert [attempt["first_step"] for attempt in run.manifest()["attempts"]] == [0, 2]


def test_a_step_recorded_twice_reads_once_and_the_last_counts(tmp_path):
    now = [0.0]
    sink = StoreSink(tmp_path, clock=lambda: now[0])
    for value in (1.0, 2.0):
        sink.write(reading(5, [value], names=("loss/mean",)))
        now[0] += 1.0
    sink.close()
    assert open_run(tmp_path).series("loss/mean")[1].tolist() == [2.0]
    assert open_run(tmp_path).series("loss/mean", raw=True)[1].tolist() == [1.0, 2.0]


def test_light_and_full_reports_and_changed_plans_join_by_name(tmp_path):
    light, full, other = ("loss/mean", "grad/norm"), ("loss/mean", "grad/norm", "act/a/rms"), ("act/a/rms", "loss/mean")
    sink = StoreSink(tmp_path)
    for step in range(4):
        names = full if step % 2 == 0 else light
        sink.write(
            reading(step, np.arange(len(names)) + step, names=names, program="full" if names is full else "light")
        )
    sink.close()
    sink = StoreSink(tmp_path)
    sink.write(reading(4, [6.0, 4.0], names=other, program="full"))
    sink.close()
    run = open_run(tmp_path)
    assert run.names() == list(full)
    assert [a.tolist() for a in run.series("loss/mean")[:2]] == [[0, 1, 2, 3, 4], [0.0, 1.0, 2.0, 3.0, 4.0]]
    assert [a.tolist() for a in run.series("act/a/rms")[:2]] == [[0, 2, 4], [2.0, 4.0, 6.0]]
    assert len(run.manifest()["series"]) == 3


def test_equal_names_in_another_tuple_continue_the_same_series(tmp_path):
    sink = StoreSink(tmp_path)
    for step in range(3):
        sink.write(reading(step, [step], names=(*["loss/mean"],)))
    sink.close()
    assert len(open_run(tmp_path).manifest()["series"]) == 1
    assert open_run(tmp_path).series("loss/mean")[0].tolist() == [0, 1, 2]


def test_readable_while_the_run_writes(tmp_path):
    sink = StoreSink(tmp_path, rows=8)
    written, errors, stop = [0], [], threading.Event()

    def read():
        try:
            while not stop.is_set():
                least = written[0]
                if least:
                    steps, values, present = Run(str(tmp_path)).series("act/a/rms")
                    assert len(steps) >= least
                    assert (values == 2.0 * steps).all()
                    assert present.all()
        except Exception as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(60):
        sink.write(reading(step, [1.0, 1.0, 2.0 * step, 0.0]))
        if step % 3 == 2:
            sink.flush()
            written[0] = step + 1
    stop.set()
    reader.join()
    assert errors == []


def test_rows_are_saved_by_time_by_count_and_by_flush(tmp_path):
    now = [1000.0]
    sink = StoreSink(tmp_path, rows=4, seconds=10.0, clock=lambda: now[0])

    def saved():
        return len(open_run(tmp_path).series("loss/mean")[0]) if files(tmp_path) else 0

    sink.write(reading(0, [1.0, 1, 1, 1]))
    assert saved() == 0
    now[0] += 11.0
    sink.write(reading(1, [1.0, 1, 1, 1]))
    assert saved() == 1
    for step in (2, 3, 4):
        sink.write(reading(step, [1.0, 1, 1, 1]))
    assert saved() == 4
    sink.flush()
    assert saved() == 5


def test_wall_time_is_the_reports_own_or_the_clocks(tmp_path):
    sink = StoreSink(tmp_path, clock=lambda: 1_700_000_000.25)
    sink.write(reading(0, [1.0] * 4))
    sink.write(reading(1, [1.0] * 4, wall_time=1_700_000_001.5))
    sink.close()
    steps, seconds = open_run(tmp_path).wall_times("loss/mean")
    assert (steps.tolist(), seconds.tolist()) == ([0, 1], [1_700_000_000.25, 1_700_000_001.5])


def test_l091_a_failing_disk_loses_nothing_that_fits_a_block_and_takes_no_row_twice(tmp_path, monkeypatch):
    sink = StoreSink(tmp_path, rows=4)
    broken, real = [True], SeriesArrays.write

    def write(self, block):
        if broken[0]:
            raise OSError("No space left on device")
        real(self, block)

    monkeypatch.setattr(SeriesArrays, "write", write)
    failures = 0
    for step in range(10):
        try:
            sink.write(reading(step, [step] * 4))
        except OSError:
            failures += 1
    assert failures == 6  # four rows wait, the others were refused: memory stays flat
    broken[0] = False
    sink.write(reading(10, [10.0] * 4))
    sink.close()
    assert open_run(tmp_path).series("loss/mean")[0].tolist() == [0, 1, 2, 3, 10]


@pytest.mark.parametrize("calls", range(1, 7))
def test_l091_whichever_entry_fails_the_next_flush_mends_it(tmp_path, monkeypatch, calls):
    sink, count, real = StoreSink(tmp_path), [0], tensorstore.KvStore.write

    class Flaky:
        def __init__(self, kv):
            self._kv = kv

        def __getattr__(self, name):
            return getattr(self._kv, name)

        def __truediv__(self, prefix):
            return self._kv / prefix

        def write(self, *args, **kwargs):
            count[0] += 1
            if count[0] == calls:
                raise OSError("flaky")
            return real(self._kv, *args, **kwargs)

    sink._open()._kv = Flaky(sink._open()._kv)
    sink.write(reading(0, [1.0] * 4))
    failed = 0
    for _ in range(2):
        try:
            sink.flush()
        except OSError:
            failed += 1
    assert failed == (calls <= 5)  # run, attempt, columns, series, event
    run = open_run(tmp_path)
    assert run.series("loss/mean")[1].tolist() == [1.0]
    assert len(run.manifest()["attempts"]) == 1
    assert [event["kind"] for event in run.events()] == ["attempt"]


def test_a_run_of_another_format_is_not_continued(tmp_path):
    Store(str(tmp_path)).write("entries/run.json", {"format": 99, "created": 0.0})
    with pytest.raises(ValueError, match="format 99, this version writes 1"):
        StoreSink(tmp_path).write_event(0, "start", {})


def test_l087_rows_survive_a_killed_process(tmp_path):
    code = """
        import os, sys
        import numpy as np
        from probes_jax.host.store_sink import StoreSink
        from probes_jax.spec.readings import Readings
        sink = StoreSink(sys.argv[1])
        for step in range(38):
            sink.write(Readings(step, "light", ("loss/mean",), np.array([float(step)]), np.ones(1, bool)))
        sink.flush()
        assert not {"jax", "tensorflow", "tensorboard"} & set(sys.modules)
        os._exit(7)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], check=False)
    assert done.returncode == 7
    assert open_run(tmp_path).series("loss/mean")[0].tolist() == list(range(38))


def test_events_are_strict_json_kept_in_order_and_marked_when_superseded(tmp_path):
    first = StoreSink(tmp_path, clock=lambda: 5.0)
    first.write_event(0, "start", {"note": "before any step"})
    for step in range(6):
        first.write(reading(step, [1.0] * 4))
    first.write_event(2, "spike", {"z": math.inf, "loss": np.float32("nan"), "top": ("a", "b")})
    first.write_event(5, "skip", {})
    first.close()
    second = StoreSink(tmp_path)
    second.write(reading(3, [1.0] * 4))
    second.write_event(3, "resume", {})
    second.close()
    assert [attempt["first_step"] for attempt in open_run(tmp_path).manifest()["attempts"]] == [0, 3]
    events = open_run(tmp_path).events()
    assert [(e["attempt"], e["step"], e["kind"], e["superseded"]) for e in events] == [
        (1, 0, "start", False),
        (1, 0, "attempt", False),
        (1, 2, "spike", False),
        (1, 5, "skip", True),
        (2, 3, "attempt", False),
        (2, 3, "resume", False),
    ]
    assert events[2]["payload"]["z"] == math.inf
    assert math.isnan(events[2]["payload"]["loss"])
    for path in files(tmp_path / "entries"):  # L071: every entry under a strict parser
        with open(path) as file:
            json.load(file, parse_constant=lambda token: pytest.fail(f"bare {token}"))


def test_definitions_say_what_the_columns_are(tmp_path):
    plan = Plan(groups=("code",), guard=Guard(co_spike=True))
    sink = StoreSink(tmp_path, plan=plan, info={"model": "tiny", "layers": 2}, clock=lambda: 9.0)
    sink.write(reading(4, [1.0] * 4))
    sink.close()
    manifest = open_run(tmp_path).manifest()
    assert (manifest["format"], manifest["created"]) == (1, 9.0)
    (attempt,) = manifest["attempts"]
    assert attempt == {
        "attempt": 1,
        "created": 9.0,
        "first_step": 4,
        "plan": json.loads(json.dumps(dataclasses.asdict(plan))),
        "plan_fingerprint": plan.fingerprint,
        "info": {"model": "tiny", "layers": 2},
    }
    assert manifest["names"] == list(NAMES)
    assert manifest["metrics"]["loss/mean"]["priority"] == "P0"
    assert manifest["metrics"]["act/{path}/rms"]["cadence"] == "every 100 steps"


def test_which_layer_is_behind_a_worst_of_metric(tmp_path):
    names = ("act/a/abs_max", "act/b/abs_max", "act/abs_max", "loss/shard[0]", "loss/shard[1]", "loss/worst_shard")
    nan, sink = math.nan, StoreSink(tmp_path)
    rows = [[1.0, 2.0, 2.0, 5.0, 4.0, 5.0], [nan, 3.0, nan, nan, 4.0, 4.0], [3.0, nan, nan, 1.0, 4.0, 4.0]]
    absent = [[True] * 6, [True, True, True, False, True, True], [True] * 6]
    for step, (values, present) in enumerate(zip(rows, absent, strict=True)):
        sink.write(reading(step, values, present, names=names))
    sink.close()
    run = open_run(tmp_path)
    assert run.which("act/abs_max")[1] == ["act/b", "act/a", "act/b"]
    assert run.which("loss/worst_shard")[1] == ["loss/shard[0]", "loss/shard[1]", "loss/shard[1]"]
    with pytest.raises(KeyError, match="worst of other"):
        run.which("loss/shard[0]")


@pytest.mark.parametrize("root", ["memory://bucket/runs/one", "file://{tmp}/run"])
def test_urls_are_the_same_code(tmp_path, root):
    root, context = root.format(tmp=tmp_path), tensorstore.Context()
    sink = StoreSink(root, context=context)
    sink.write(reading(1, [1.0] * 4))
    sink.write_event(1, "spike", {})
    sink.close()
    run = Run(root, context)
    assert run.series("loss/mean")[1].tolist() == [1.0]
    assert [event["kind"] for event in run.events()] == ["attempt", "spike"]


def test_two_sessions_never_share_an_attempt(tmp_path, monkeypatch):
    monkeypatch.setattr(Store, "keys", lambda self, prefix: [])  # each looks before any other has claimed a number
    sinks = [StoreSink(tmp_path) for _ in range(3)]
    for step, sink in enumerate(sinks):
        sink.write(reading(step, [1.0] * 4))
    for sink in sinks:
        sink.flush()
    monkeypatch.undo()
    assert [a["attempt"] for a in open_run(tmp_path).manifest()["attempts"]] == [1, 2, 3]
    assert not Store(str(tmp_path)).create("entries/attempts/000001.json", {})


def test_a_report_without_metrics_is_nothing(tmp_path):
    sink = StoreSink(tmp_path)
    sink.write(reading(0, [], names=()))
    sink.close()
    assert files(tmp_path) == []


def test_a_block_counts_what_waits():
    block = Block(2, 4)
    block.append(7, 1.0, np.array([1.0, 2.0]))
    assert (block.waiting, block.full, block.step.tolist()) == (1, False, [7, -1, -1, -1])
    block.advance()
    assert (block.base, block.waiting) == (4, 0)
    assert not decode(block.values)[1].any()


def test_files_of_somebody_else_among_the_attempts_are_left_alone(tmp_path):
    first = StoreSink(tmp_path)
    first.write(reading(0, [1.0, 2.0, 3.0, 4.0]))
    first.close()
    (tmp_path / "entries" / "attempts" / "notes.json").write_text("{}")
    second = StoreSink(tmp_path)
    second.write(reading(1, [1.0, 2.0, 3.0, 4.0]))
    second.close()
    assert open_run(tmp_path).series("loss/mean")[0].tolist() == [0, 1]
