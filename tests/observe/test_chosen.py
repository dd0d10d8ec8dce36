"""The forms in which a plan may name points."""

from __future__ import annotations

import pytest

from probes_jax.observe.chosen import means

SCANNED, UNROLLED = ("blocks[*]/mlp/up", (12,)), ("blocks[3]/mlp/up", ())


@pytest.mark.parametrize(
    ("text", "scanned", "unrolled"),
    [
        ("mlp", True, True),
        (r"^blocks\[\*\]/mlp", True, False),
        (r"^blocks\[3\]/mlp", False, True),
        (r"^blocks/mlp/up$", True, True),
        ("blocks/up", False, False),
        ("blocks[0..11]/mlp", True, True),
        ("^blocks[0..5,6..11]/mlp/up$", True, True),
        ("blocks[0..2]/mlp", False, False),
        ("blocks[3]/mlp", False, True),
        ("blocks[2]/mlp", False, False),
        ("blocks[1,3]/mlp", False, True),
        ("blocks[*]/mlp", True, True),
        ("head", False, False),
    ],
)
def test_a_word_in_its_forms(text, scanned, unrolled):
    assert (means(text, *SCANNED), means(text, *UNROLLED)) == (scanned, unrolled)


def test_two_axes_of_layers():
    name, layers = "groups[*]/layers[*]/mlp", (2, 3)
    assert means("groups[0..1]/layers[0..2]/mlp", name, layers)
    assert means("groups/layers/mlp", name, layers)
    assert not means("groups[0]/layers[0..2]/mlp", name, layers)
    assert not means("groups[0..1]/layers[1]/mlp", name, layers)
