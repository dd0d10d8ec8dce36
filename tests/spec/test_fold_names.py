"""Folding names and unfolding them gives the same names."""

from __future__ import annotations

import itertools
import re

from hypothesis import given
from hypothesis import strategies as st

from probes_jax.spec.fold_names import fold_names

FORMS = ("blocks[{}]/mlp", "stage[{}]/block[{}]/up", "head", "embed[{}].attend#1:0.k")


def unfold(name):
    """The slow way back: every number of every bracket, written out."""
    parts = re.split(r"\[([^\]]*)\]", name)
    choices = []
    for stretches in parts[1::2]:
        numbers = []
        for stretch in stretches.split(","):
            first, _, last = stretch.partition("..")
            numbers += range(int(first), int(last or first) + 1)
        choices.append(numbers)
    for numbers in itertools.product(*choices):
        yield "".join(itertools.chain(*itertools.zip_longest(parts[::2], [f"[{n}]" for n in numbers], fillvalue="")))


@given(
    st.lists(
        st.tuples(st.sampled_from(FORMS), st.integers(0, 3), st.integers(0, 3), st.sampled_from("ab")),
        max_size=30,
        unique_by=lambda item: item[0].format(item[1], item[2]),
    )
)
def test_nothing_is_lost_and_nothing_made_up(items):
    named = [(form.format(first, second), key) for form, first, second, key in items]
    folded = fold_names(named)
    assert sorted((name, row.key) for row in folded for name in unfold(row.name)) == sorted(named)
    assert [row.count for row in folded] == [len(list(unfold(row.name))) for row in folded]


def test_a_whole_stack_is_one_row_in_the_order_of_first_appearance():
    names = ["embed", *(f"block[{i}]/{part}" for i in range(12) for part in ("attn", "mlp")), "head"]
    folded = fold_names((name, "") for name in names)
    assert [(row.name, row.count) for row in folded] == [
        ("embed", 1), ("block[0..11]/attn", 12), ("block[0..11]/mlp", 12), ("head", 1),
    ]  # fmt: skip


def test_stages_of_unequal_depth_stay_apart():
    depth = (2, 2, 6, 2)
    names = [f"stage[{i}]/block[{j}]" for i, blocks in enumerate(depth) for j in range(blocks)]
    assert [row.name for row in fold_names((name, "") for name in names)] == [
        "stage[0..1,3]/block[0..1]",
        "stage[2]/block[0..5]",
    ]
