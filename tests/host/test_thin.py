"""The P0 part of a report that waits too long: the same values by the same names, from fewer words."""

import itertools
import logging
import threading

import numpy as np
import pytest

from probes_jax.host.priority import shed
from probes_jax.host.read_flight import read_flight
from probes_jax.host.recorder import Recorder
from probes_jax.host.run_folder import open_run
from probes_jax.host.thin import thin
from probes_jax.spec.derive import derive
from probes_jax.spec.layout import FORMAT, HEADER, PROGRAMS, Entry, Layout
from probes_jax.spec.metric import Priority
from probes_jax.spec.plan import Plan
from probes_jax.spec.readings import decoder_of
from probes_jax.spec.summary import ABSENT_BITS, KINDS, LIMB_BITS, LIMBS, Reduce
from tests.host.recorder_fakes import FULL, LIGHT, DeviceBuffer, FakeReport, buffer_of, light_layout, report, wait_for

NAN, INF = np.nan, np.inf
ELEMENTS = ([], [0.0], [-INF, NAN], [NAN], [NAN, 2.0], [INF, 1.0], [-INF])  # of rows; most have numbers only


def _rows(where):
    return tuple(f"{where}[{i}]/mlp/{{stat}}" for i in range(7))


MODEL = Layout(
    "full",
    (
        Entry("moments", _rows("act/block")),
        Entry("mean", tuple(f"loss/shard[{i}]" for i in range(4))),
        Entry("magnitude", _rows("grad_act/block")),
        Entry("magnitude", _rows("grad/block")),
        Entry("norm", _rows("update/block")),
        Entry("norm", _rows("param/block")),
        Entry("moments", ("act/head/{stat}",), ("rms", "abs_max")),
        Entry("extreme", ("logits/{stat}",)),
        Entry("tally", ("loss/valid_tokens",)),
        *light_layout(("loss/mean", "grad/norm", "opt/learning_rate"), ("alert/co_spike/count", "data/steps")).entries,
    ),
)
NO_ALERT = Layout("light", (Entry("scalar", ("opt/learning_rate",)),))


def _limbs(count):
    return [(count >> (LIMB_BITS * k)) % (1 << LIMB_BITS) for k in range(LIMBS)]


def _row(kind, reduce, elements, random):
    """The leaves of one row: those that a maximum needs are of the elements, the others anything."""
    x = np.array(elements, np.float64)
    finite = np.abs(x[np.isfinite(x)])
    known = {
        "count": _limbs(x.size),
        "nan": _limbs(int(np.isnan(x).sum())),
        "inf": _limbs(int(np.isinf(x).sum())),
        "abs_max": [finite.max() if finite.size else -INF],
    }
    leaves = [leaf for leaf in KINDS[kind].leaves if leaf.reduce is reduce]
    return np.concatenate([known.get(leaf.name, random.uniform(1, 9, leaf.width or 1)) for leaf in leaves])


def _buffer(layout, step, random):
    buffer = np.zeros(layout.size, np.uint32)
    odd = random.choice([0.0, 0.1, 0.9])
    rows = [
        [ELEMENTS[random.integers(len(ELEMENTS))] if random.random() < odd else random.normal(size=3) for _ in e.labels]
        for e in layout.entries
    ]
    buffer[:HEADER] = FORMAT, step, 1, PROGRAMS.index(layout.program)
    for slot in layout.slots:
        kind = layout.entries[slot.entry].kind
        if slot.reduce is Reduce.RAW:
            words = random.integers(0, 1 << 30, slot.size, dtype=np.uint32)
            words = np.where(random.random(slot.size) < 0.2, np.uint32(ABSENT_BITS), words)
        else:
            leaves = [_row(kind, slot.reduce, elements, random) for elements in rows[slot.entry]]
            words = np.array(leaves, np.float32).view(np.uint32).ravel()
        buffer[slot.offset : slot.offset + slot.size] = words
    return buffer


def _alerts(buffer, layout):
    """(names, values, presence, labels) of what is P0."""
    found = shed(decoder_of(layout).decode(buffer), Priority.P0)
    return found.step, found.program, found.names, found.values.tobytes(), found.present.tolist(), found.which


@pytest.mark.parametrize("layout", [MODEL, LIGHT, FULL, NO_ALERT], ids=["model", "light", "full", "no alert"])
def test_the_part_decodes_to_the_same_p0_values(layout):
    random = np.random.default_rng(0)
    for step in range(100):
        whole = _buffer(layout, step, random)
        part = thin(whole, layout)
        assert part.buffer.shape == (part.layout.size,) and part.buffer.dtype == np.uint32
        assert _alerts(part.buffer, part.layout) == _alerts(whole, layout)


def test_of_an_activation_only_the_words_of_its_maximum_are_kept():
    part = thin(np.zeros(MODEL.size, np.uint32), MODEL)
    kept = {entry.key: entry.kind for entry in part.layout.entries}
    assert kept["act/block[0]/mlp/{stat}"] == kept["grad_act/block[0]/mlp/{stat}"] == "extreme"
    assert not any(key.startswith(("grad/block", "update", "param", "opt")) for key in kept)
    assert part.layout.size < MODEL.size / 2
    assert thin(np.zeros(4, np.uint32), MODEL) is None, "a buffer of another layout: nothing to keep"


def test_stacked_reports_are_thinned_step_by_step():
    random = np.random.default_rng(1)
    whole = np.stack([_buffer(MODEL, step, random) for step in range(5)])
    part = thin(DeviceBuffer(whole), MODEL)
    assert part.buffer.shape == (5, part.layout.size)
    for row, less in zip(whole, part.buffer, strict=True):
        assert _alerts(less, part.layout) == _alerts(row, MODEL)


def test_what_the_device_has_not_delivered_cannot_be_thinned():
    ready = threading.Event()
    buffer = DeviceBuffer(buffer_of(3), ready)
    assert thin(buffer, LIGHT) is None
    ready.set()
    assert thin(buffer, LIGHT) is not None

    class Failed(DeviceBuffer):
        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("the computation failed")

    assert thin(Failed(buffer_of(3)), LIGHT) is None


@pytest.mark.parametrize("name", ["act/abs_max", "grad/worst_layer_norm", "update/worst_ratio", "grad/a/share"])
def test_the_sources_of_a_derived_metric_suffice_for_it(name):
    families = itertools.product(("act", "grad", "update", "param"), "ab", ("norm", "abs_max"))
    names = tuple("/".join(parts) for parts in families)
    values, every = np.random.default_rng(2).uniform(1, 2, len(names)), derive(names)
    columns = sorted(every.sources(name))
    some = derive(tuple(names[c] for c in columns))
    assert 0 < len(columns) < len(names)

    def value(derived, values):
        found, _, which = derived.compute(values, np.ones(len(values), bool))
        return found[derived.names.index(name)], which.get(name)

    assert value(some, values[columns]) == value(every, values)


STEPS, EVERY = 10_000, 100


def _record(folder, stalled):
    """Records 10,000 steps; while it is stalled the worker waits for the first of them."""
    first = threading.Event()
    with Recorder(folder, Plan(), queue_size=512) as recorder:
        recorder.record(FakeReport(DeviceBuffer(buffer_of(0, FULL), first), FULL))
        assert wait_for(lambda: recorder._backlog.waiting == 0)  # the worker has it: what waits undelivered can be lost
        assert stalled or first.set() is None
        for step in range(1, STEPS):
            recorder.record(report(step, FULL if step % EVERY == 0 else LIGHT))
            assert stalled or wait_for(lambda: recorder._backlog.pressure < 0.2)
        assert not stalled or not recorder.flush(limit=0.01)
        first.set()
        assert recorder.flush(limit=120)
        return recorder.health


@pytest.mark.filterwarnings("error")
def test_behind_a_stalled_worker_no_p0_value_of_10000_steps_is_lost(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        stalled = _record(tmp_path / "stalled", True)
    assert stalled.read == STEPS and stalled.lost == 0 and not stalled.ok
    assert STEPS - 520 < stalled.thinned < STEPS and "lost in part or whole" in caplog.text
    assert _record(tmp_path / "whole", False).thinned == 0
    flights = [read_flight(tmp_path / run / "flight" / "process_0.bin") for run in ("stalled", "whole")]
    assert [step.step for step in flights[0]] == list(range(STEPS))
    for found, expected in zip(*flights, strict=True):
        assert (
            repr(sorted(found.values.items())) == repr(sorted(expected.values.items()))
            and found.which == expected.which
        )
    runs = [open_run(tmp_path / run) for run in ("stalled", "whole")]
    names = {name for name in runs[1].names() if not name.startswith(("sys/", "act/block", "data/"))}
    assert {"loss/mean", "act/abs_max", "alert/co_spike/count"} < names
    for name in names:
        for found, expected in zip(*(run.series(name) for run in runs), strict=True):
            np.testing.assert_array_equal(found, expected)
    assert len(runs[0].series("act/abs_max")[0]) == STEPS // EVERY
