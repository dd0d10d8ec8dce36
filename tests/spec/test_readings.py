import math

import numpy as np
import pytest

from probes_jax.spec.layout import Entry, Layout
from probes_jax.spec.readings import Decoder, decoder_of
from probes_jax.spec.summary import ABSENT_BITS
from tests.spec.packing import limbs, pack

LAYOUT = Layout(
    "full",
    (
        Entry("norm", ("grad/a/{stat}", "grad/b/{stat}")),
        Entry("mean", ("loss/shard[0]", "loss/shard[1]")),
        Entry("scalar", ("opt/lr",)),
        Entry("counter", ("data/tokens_total",)),
        Entry("tally", ("data/tokens",)),
    ),
)


def _leaves(**changes):
    leaves = {
        "norm": {"parts": [1.0, 1.0], "sum_sq": [9.0, 16.0]},
        "mean": {"total": [6.0, 0.0], "weight": [3.0, 0.0]},
        "scalar": {"bits": np.float32([0.125]).view(np.uint32)},
        "counter": {"words": [[3, 1]]},
        "tally": {"count": limbs(2**24 + 1)},
    }
    return [{**leaves[entry.kind], **changes.get(entry.kind, {})} for entry in LAYOUT.entries]


def test_a_buffer_becomes_named_values():
    readings = decoder_of(LAYOUT).decode(pack(LAYOUT, *_leaves(), step=11))
    assert readings is not None
    assert (readings.step, readings.program) == (11, "full")
    assert readings.scalars() == {
        "grad/a/norm": 3.0,
        "grad/b/norm": 4.0,
        "loss/shard[0]": 2.0,
        "opt/lr": 0.125,
        "data/tokens_total": 2.0**32 + 3,
        "data/tokens": 2.0**24 + 1,
        "grad/a/share": 0.36,
        "grad/b/share": 0.64,
        "loss/worst_shard": 2.0,
        "grad/worst_layer_norm": 4.0,
    }
    assert readings.which == {"loss/worst_shard": "loss/shard[0]", "grad/worst_layer_norm": "grad/b"}


def test_absent_and_nan_are_two_things():
    buffer = pack(LAYOUT, *_leaves(scalar={"bits": [ABSENT_BITS]}, norm={"sum_sq": [np.nan, 16.0]}))
    readings = decoder_of(LAYOUT).decode(buffer)
    scalars = readings.scalars()
    assert "opt/lr" not in scalars
    assert "loss/shard[1]" not in scalars
    assert math.isnan(scalars["grad/a/norm"])
    assert math.isnan(scalars["grad/worst_layer_norm"])
    assert readings.which["grad/worst_layer_norm"] == "grad/a"
    assert np.isnan(readings.values[~readings.present]).all()


def test_only_the_wanted_statistics_are_reported():
    layout = Layout("light", (Entry("extreme", ("act/x/{stat}",), ("abs_max",)),))
    readings = Decoder(layout).decode(pack(layout, {"nan": limbs(0), "inf": limbs(1), "abs_max": [2.0]}))
    assert readings.scalars() == {"act/x/abs_max": math.inf, "act/abs_max": math.inf}


def test_a_step_on_which_the_program_did_not_run_reads_as_nothing():
    assert decoder_of(LAYOUT).decode(pack(LAYOUT, *_leaves(), fresh=0)) is None


def test_names_are_one_object_for_every_report():
    decoder = decoder_of(LAYOUT)
    first, second = (decoder.decode(pack(LAYOUT, *_leaves(), step=step)) for step in (1, 2))
    assert first.names is second.names
    assert decoder_of(Layout.from_json(LAYOUT.to_json())) is decoder
    assert first.extended(("sys/a",), (1.0,)).names is second.extended(("sys/a",), (2.0,)).names


def test_readings_take_what_the_host_measured():
    readings = decoder_of(LAYOUT).decode(pack(LAYOUT, *_leaves()))
    more = readings.extended(("sys/step_time", "sys/memory"), (0.25, None))
    assert more.scalars() == {**readings.scalars(), "sys/step_time": 0.25}
    assert len(more.names) == len(more.values) == len(more.present) == len(readings.names) + 2
    with pytest.raises(ValueError, match="2 names and 1 values"):
        readings.extended(("a", "b"), (1.0,))
    with pytest.raises(ValueError, match="'opt/lr'"):
        readings.extended(("opt/lr",), (1.0,))


def test_a_buffer_of_another_layout_or_format_is_refused():
    buffer = pack(LAYOUT, *_leaves())
    with pytest.raises(ValueError, match="shape"):
        decoder_of(LAYOUT).decode(buffer[:-1])
    buffer[0] = 99
    with pytest.raises(ValueError, match="format 99"):
        decoder_of(LAYOUT).decode(buffer)


def test_two_metrics_of_one_name_are_refused():
    layout = Layout("light", (Entry("norm", ("x/{stat}",)), Entry("scalar", ("x/norm",))))
    with pytest.raises(ValueError, match="'x/norm'"):
        Decoder(layout)
