"""The rows of what is seen: read in a notebook, in a log, in a file."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from probes_jax.spec.coverage import HEADINGS, Coverage, SeenPoint, missing_lines

POINTS = (
    SeenPoint("embed", "embedding", "Embed", shape=(2, 4), reported=True, gradient=True),
    SeenPoint("blocks[*]/mlp", "feed_forward", "MLP", shape=(2, 4), layers=(3,), through=("nn.scan",), reported=True),
    SeenPoint("embed.attend", "logits", "Embed", "attend", shape=(2, 16), reported=True, gradient=True),
    SeenPoint("inner[0]", shape=(2,)),
    SeenPoint("inner[1]", shape=(2,)),
)
LOST = "lost; use nn.scan"
COVERAGE = Coverage(POINTS, (("grad/clip_rate", "name the <clip> stage"), ("inner[0]", LOST), ("inner[1]", LOST)))


def test_names_of_what_was_seen_and_what_reported():
    assert COVERAGE.seen == ("embed", "blocks[*]/mlp", "embed.attend", "inner[0]", "inner[1]")
    assert COVERAGE.reported == COVERAGE.seen[:3]
    assert (Coverage().seen, Coverage().reported, Coverage().missing) == ((), (), ())


def test_print_is_short():
    assert str(COVERAGE).splitlines() == [
        "3 of 5 observed points reported",
        "  missing grad/clip_rate: name the <clip> stage",
        "  missing inner[0..1]: lost; use nn.scan",
    ]
    many = Coverage(POINTS, tuple((f"p{i}", f"why {i}") for i in range(100)))
    assert len(str(many).splitlines()) == 10
    assert str(many).endswith("and for 92 more reasons, in report.coverage.missing")
    assert "full program only" in str(Coverage())
    assert "full program only" not in str(Coverage(missing=(("act", "no model"),)))


def test_what_is_missing_for_one_reason_is_one_line():
    inside = [f"block[{i}]/{name}" for name in ("mlp", "mlp/up", "mlp/down", "mlp/norm.input") for i in range(3)]
    calls = ["head#1", "head#2", "head/out#1", "header"]
    others = [f"other{letter}" for letter in "abcd"]
    missing = [*((name, "branch") for name in (*inside, *calls)), *((name, "lost") for name in others), ("last", "off")]
    assert missing_lines(missing) == [
        "  missing block[0..2]/mlp, head#1, header (16 in all): branch",
        "  missing othera, otherb, otherc (4 in all): lost",
        "  missing last: off",
    ]
    assert missing_lines(missing, most=None)[1:] == [
        "  missing othera, otherb, otherc, otherd: lost",
        "  missing last: off",
    ]
    assert "block[0..2]/mlp/norm.input" in missing_lines(missing, most=None)[0]


def test_the_table_has_one_row_for_layers_that_are_alike():
    assert COVERAGE.table() == [
        ("embed", "1", "embedding", "Embed", "2x4", "", "there and back"),
        ("blocks[0..2]/mlp", "3", "feed_forward", "MLP", "2x4", "nn.scan", "forward"),
        ("embed.attend", "1", "logits", "Embed.attend", "2x16", "", "there and back"),
        ("inner[0..1]", "2", "other", "", "2", "", "missing"),
    ]
    scanned = Coverage((SeenPoint("b[*]/x", layers=(4,)),))
    unrolled = Coverage(tuple(SeenPoint(f"b[{i}]/x") for i in range(4)))
    assert scanned.table() == unrolled.table()
    assert SeenPoint("a[*]/b[*]", layers=(2, 2)).labels() == ["a[0]/b[0]", "a[0]/b[1]", "a[1]/b[0]", "a[1]/b[1]"]


def test_a_notebook_shows_the_table_and_every_reason():
    page = ElementTree.fromstring(f"<div>{COVERAGE._repr_html_()}</div>")
    rows = [[cell.text or "" for cell in row] for row in page.iter("tr")]
    assert rows == [list(HEADINGS), *map(list, COVERAGE.table())]
    assert [item.text for item in page.iter("li")] == [line.strip() for line in missing_lines(COVERAGE.missing)]


def test_it_is_part_of_the_structure_of_a_report():
    same = Coverage.from_json(json.loads(json.dumps(COVERAGE.to_json())))
    assert same == COVERAGE and hash(same) == hash(COVERAGE)
    told = Coverage(POINTS, stored=(("act", 1200), ("grad", 300)), warnings=("a report is too large",))
    assert Coverage.from_json(json.loads(json.dumps(told.to_json()))) == told
    assert str(told).splitlines()[1:] == [
        "  1,500 series go to the store only: act 1,200, grad 300",
        "  a report is too large",
    ]
    assert Coverage(POINTS[:1]) != COVERAGE


def test_what_a_later_version_adds_is_left_out():
    entry = json.loads(json.dumps(COVERAGE.to_json())) | {"new": 1}
    entry["points"][0]["colour"] = "red"
    del entry["points"][1]["gradient"]
    assert Coverage.from_json(entry) == COVERAGE
