"""Names: the same for scanned and unrolled models, unique whatever the modules are called."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes_jax.observe.names import Names, escape, expand, label_params, param_labels


def names_of(*paths, stacks=(), also=()):
    names = Names(paths, stacks, also)
    return [names.path(path) for path in (*paths, *also)]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (("block_3", "mlp", "kernel"), "block[3]/mlp/kernel"),
        (("blocks", "3", "mlp"), "blocks[3]/mlp"),  # an nnx list
        (("encoder", "layer", "0", "1", "w"), "encoder/layer[0][1]/w"),
        (("blocks_0", "1"), "blocks_0[1]"),  # a list with a number in its name: blocks[0] could be a list's too
        (("CheckpointBlock_2", "w"), "Block[2]/w"),
        (("ScanCheckpointBlock_0", "w"), "Block[0]/w"),
        (("Checkpointer", "w_0"), "Checkpointer/w[0]"),
        (("layer_03", "w_a"), "layer_03/w_a"),
        (("0", "w"), "0/w"),
        (("_1",), "_1"),
        (("a.b", "c/d", "e{stat}", "f[*]#1:~"), "a.b/c%2Fd/e%7Bstat%7D/f%5B%2A%5D%231%3A%7E"),
        ((), ""),
    ],
)
def test_rules(path, name):
    assert names_of(path) == [name]


@pytest.mark.parametrize(
    ("path", "stacks", "labels", "axis"),
    [
        (("blocks", "mlp", "w"), {("blocks",): (0, 2)}, ("blocks[0]/mlp/w", "blocks[1]/mlp/w"), 0),
        (("blocks", "mlp", "w"), {("blocks",): (1, 1)}, ("blocks[0]/mlp/w",), 1),
        (("blocks", "mlp", "w"), {("blocks",): (-1, 4)}, tuple(f"blocks[{i}]/mlp/w" for i in range(4)), 2),
        (("ScanBlock_0", "w"), {("ScanBlock_0",): (0, 2)}, ("Block[0]/w", "Block[1]/w"), 0),
        (("body", "w_0"), {("body", "w_0"): (0, 2)}, ("body/w[0]", "body/w[1]"), 0),
        (("blocks", "mlp", "w"), {("other",): (0, 2)}, ("blocks/mlp/w",), None),
        (("blocks", "mlp", "w"), {("blocks",): (0, 7)}, ("blocks/mlp/w",), None),  # not of that length: not unstacked
        (("a", "b", "w"), {("a",): (0, 2), ("a", "b"): (0, 1)}, ("a[0]/b[0]/w", "a[1]/b[0]/w"), (0, 1)),
        (("a", "b", "w"), {("a",): (1, 1), ("a", "b"): (0, 2)}, ("a[0]/b[0]/w", "a[0]/b[1]/w"), (1, 0)),
        (("a", "b", "w"), {("a",): (0, 2), ("a", "b"): (1, 9)}, ("a[0]/b/w", "a[1]/b/w"), 0),
        (("a", "w"), {("a",): (1, 1, 0, 2)}, ("a[0][0]/w", "a[0][1]/w"), (1, 0)),  # a stack of stacks
    ],
)
def test_parameters_of_a_stack(path, stacks, labels, axis):
    assert param_labels(path, (2, 1, 4), stacks) == (labels, axis)


def test_l013_a_stack_of_one_layer_is_named_like_layer_0_of_a_deeper_one():
    one, _ = param_labels(("blocks", "w"), (1, 4), {("blocks",): (0, 1)})
    two, _ = param_labels(("blocks", "w"), (2, 4), {("blocks",): (0, 2)})
    assert one == two[:1]


def test_siblings_that_would_share_a_name_keep_their_own():
    assert names_of(("Block_0",), ("CheckpointBlock_0",)) == ["Block[0]", "CheckpointBlock[0]"]
    assert names_of(("ScanBlock_0",), ("CheckpointBlock_0",)) == ["ScanBlock[0]", "CheckpointBlock[0]"]
    assert names_of(("h_1",), ("h", "1")) == ["h_1", "h[1]"]
    assert names_of(("blocks_0",), ("blocks",), stacks=[("blocks",)]) == ["blocks_0", "blocks"]
    assert names_of(("b_0",), ("b_1",), stacks=[("b_0",)]) == ["b_0", "b_1"]


def test_parameters_have_the_first_word():
    assert names_of(("CheckpointBlock_0",)) == ["Block[0]"]
    assert names_of(("CheckpointBlock_0",), also=[("Block_0",)]) == ["Block[0]", "Block_0"]


def test_expand():
    assert expand("a[*]/b[*]", (1, 2)) == "a[1]/b[2]"
    assert expand("a", (1,)) == "a[1]"
    assert expand("a[*]/b", ()) == "a/b"


ELEMENTS = st.sampled_from(
    [
        "a",
        "a_0",
        "a_1",
        "a_0_1",
        "0",
        "1",
        "B_0",
        "ScanB_0",
        "CheckpointB_0",
        "ScanCheckpointB_0",
        "a[0]",
        "a[*]",
        "a/b",
        ".",
    ]
)
TREES = st.lists(st.lists(ELEMENTS, min_size=1, max_size=4).map(tuple), min_size=1, max_size=12, unique=True)


@given(TREES, st.data())
def test_names_of_a_tree_are_unique(paths, data):
    prefixes = sorted({path[:n] for path in paths for n in range(1, len(path))})
    leaves = [path for path in paths if path not in prefixes]
    chosen = data.draw(st.lists(st.sampled_from(prefixes), unique=True)) if prefixes else []
    stacks = dict.fromkeys(chosen, (0, 2))
    labels = [label for own, _ in label_params(dict.fromkeys(leaves, (2, 3)), stacks).values() for label in own]
    assert len(labels) == len(set(labels))
    assert all("{" not in label and "*" not in label for label in labels)


@given(st.text(max_size=6), st.text(max_size=6))
def test_escape_is_reversible(left, right):
    assert (escape(left) == escape(right)) == (left == right)


def test_names_are_fast_for_many_layers():
    paths = [(f"layer_{i}", name) for i, name in itertools.product(range(1000), ("w", "b"))]
    assert names_of(*paths)[-1] == "layer[999]/b"
