import json

import pytest

from probes_jax.spec.layout import HEADER, Entry, Layout
from probes_jax.spec.summary import KINDS, Reduce

ENTRIES = (
    Entry("magnitude", ("grad/a/{stat}", "grad/b/{stat}"), ("norm", "zero_fraction")),
    Entry("scalar", ("opt/lr",)),
    Entry("mean", ("loss/mean",)),
    Entry("counter", ("data/tokens",)),
    Entry("extreme", ("act/x/{stat}",)),
)


def test_leaves_lie_in_sections_without_gap_or_overlap():
    layout = Layout("light", ENTRIES)
    expected = HEADER
    sections = []
    for slot in layout.slots:
        assert slot.offset == expected
        rows = len(layout.entries[slot.entry].labels)
        assert slot.shape == (rows, KINDS[layout.entries[slot.entry].kind].width(slot.reduce))
        expected += slot.size
        sections.append(slot.reduce)
    assert layout.size == expected
    order = [Reduce.SUM, Reduce.MAX, Reduce.RAW]
    assert sections == sorted(sections, key=order.index)
    assert [(slot.entry, slot.reduce) for slot in layout.slots] == [
        (index, reduce)
        for reduce in order
        for index, entry in enumerate(ENTRIES)
        if any(leaf.reduce is reduce for leaf in KINDS[entry.kind].leaves)
    ]


def test_sections_are_the_slots_of_one_reduction():
    layout = Layout("light", ENTRIES)
    assert [slot.entry for slot in layout.section(Reduce.MAX)] == [0, 4]
    assert [slot.entry for slot in layout.section(Reduce.RAW)] == [1, 3]


def test_a_report_of_nothing_is_a_header():
    assert Layout("light", ()).size == HEADER


def test_a_label_names_every_statistic():
    assert ENTRIES[0].names("norm") == ("grad/a/norm", "grad/b/norm")
    assert ENTRIES[1].names("") == ("opt/lr",)
    assert ENTRIES[0].key == "grad/a/{stat}"


def test_json_round_trip_and_fingerprint():
    layout = Layout("full", ENTRIES)
    again = Layout.from_json(json.loads(json.dumps(layout.to_json())))
    assert again == layout
    assert again.fingerprint == layout.fingerprint
    assert len(layout.fingerprint) == 12
    others = [
        Layout("light", ENTRIES),
        Layout("full", ENTRIES[::-1]),
        Layout("full", ENTRIES[:-1]),
        Layout("full", (Entry("magnitude", ("grad/a/{stat}", "grad/c/{stat}"), ("norm",)), *ENTRIES[1:])),
    ]
    assert len({layout.fingerprint, *(other.fingerprint for other in others)}) == 5


def test_another_format_is_refused():
    data = {**Layout("full", ENTRIES).to_json(), "format": 99}
    with pytest.raises(ValueError, match="format 99"):
        Layout.from_json(data)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: Entry("median", ("a",)), "'median' is unknown; known kinds: moments"),
        (lambda: Entry("norm", ()), "no label"),
        (lambda: Entry("norm", ("a/{stat}",), ("rms",)), r"no statistic \['rms'\]"),
        (lambda: Layout("forensic", ()), "'forensic' is unknown"),
        (lambda: Layout("light", (Entry("mean", ("a",)), Entry("scalar", ("a",)))), "share the name 'a'"),
    ],
)
def test_mistakes_are_named_when_built(build, match):
    with pytest.raises(ValueError, match=match):
        build()
