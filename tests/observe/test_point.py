"""Points: identity, names, labels per layer; and the census that finds what is missing."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from probes_jax.observe.census import LOST, Visit, settle
from probes_jax.observe.point import Point
from probes_jax.observe.record import Record, float_leaves
from probes_jax.stats.moments import summarize_magnitude


@pytest.mark.parametrize(
    ("point", "label"),
    [
        (Point((), "Model"), "act/output/{stat}"),
        (Point((), "Model", "encode"), "act/output.encode/{stat}"),
        (Point(("block_3", "mlp"), "MLP"), "act/block[3]/mlp/{stat}"),
        (Point(("mlp",), "MLP", "gate", 2, "h.0"), "act/mlp.gate#2:h.0/{stat}"),
        (Point(("{stat}",), "MLP"), "act/%7Bstat%7D/{stat}"),
    ],
)
def test_labels(point, label):
    assert point.labels() == (label,)
    assert str(point) == label.removeprefix("act/").removesuffix("/{stat}")


def test_a_label_per_layer():
    point = Point(("groups", "layers", "mlp"), "MLP", stack=(1, 2))
    assert point.labels((2, 1)) == ("act/groups[0]/layers[0]/mlp/{stat}", "act/groups[1]/layers[0]/mlp/{stat}")
    assert Point(("mlp",), "MLP").labels((2,)) == ("act/mlp[0]/{stat}", "act/mlp[1]/{stat}")
    assert Point((), "MLP", stack=(0,)).labels((2,)) == ("act/output[0]/{stat}", "act/output[1]/{stat}")
    assert Point(("mlp",), "MLP", stack=(0,)).labels((2,), "grad_act")[1] == "grad_act/scan[1]/mlp/{stat}"


def test_identity():
    base = Point(("a",), "A")
    others = [Point(("b",), "A"), Point(("a",), "B"), Point(("a",), "A", "m"), Point(("a",), "A", call=1)]
    others.append(Point(("a",), "A", leaf="h"))
    assert len({base, *others, Point(("a",), "A", name="other")}) == 6
    assert len({p.key for p in [base, *others, Point(("a|A.__call__#0:",), "A")]}) == 7


@pytest.mark.parametrize("fields", [{"path": (1,)}, {"call": -1}, {"stack": (3,)}])
def test_wrong_points_are_refused(fields):
    with pytest.raises(ValueError, match="Point"):
        Point(**{"path": ("a",), "class_name": "A", **fields})


def test_float_leaves():
    x = jnp.ones(2)
    assert list(float_leaves(x)) == list(float_leaves((x, None))) == [""]
    assert list(float_leaves({"a": {"b": x}, "a.b": x, "k": [jnp.arange(2), x]})) == ["a.b", "a%2Eb", "k.1"]
    assert float_leaves((1, 2.0, None, jnp.sin, jnp.arange(3))) == {}
    assert float_leaves({1: x, "a": x}) == {}  # not a pytree for JAX
    assert list(float_leaves(jnp.ones(2, jnp.bfloat16))) == [""]


def record(value, class_name="A", method="__call__", **options):
    return Record({"": summarize_magnitude(jnp.float32(value))}, class_name, method, **options)


def visit(path, reason=None, class_name="A", method="__call__", leaves=("",), **options):
    return Visit(path, class_name, method, dict.fromkeys(leaves, ()), reason, **options)


def values(result):
    return {str(point): float(summary.leaves["abs_max"]) for point, summary in result.points.items()}


def test_records_meet_their_visits_in_order():
    visits = [visit(("a",)), visit(("b",), "no way"), visit(("a",)), visit(("a",), "no way"), visit(("a",))]
    returned = [(("a",), "", record(1)), (("a",), "", record(2)), (("a",), "", record(3))]
    result = settle(visits, returned, [], [])
    assert values(result) == {"a": 1.0, "a#1": 2.0, "a#3": 3.0}
    assert {str(p): why for p, why in result.missing.items()} == {"b": "no way", "a#2": "no way"}
    assert [str(p) for p in result.seen] == ["a", "b", "a#1", "a#2", "a#3"]


def test_a_record_that_does_not_come_back_is_missing_and_one_not_seen_is_a_point():
    result = settle([visit(("a",))], [(("b",), "", record(5))], [], [])
    assert values(result) == {"b": 5.0}
    assert {str(p): why for p, why in result.missing.items()} == {"a": LOST.format("a transform around the module")}
    assert len(result.seen) == 2


def test_records_of_different_transforms_do_not_meet_each_other_s_visits():
    visits = [visit(("a",), place="=1"), visit(("a",), place="=")]
    result = settle(visits, [(("a",), "=", record(1)), (("a",), "=1", record(2))], [], [])
    assert values(result) == {"a": 2.0, "a#1": 1.0}


def test_a_record_of_its_own_needs_no_return():
    result = settle([visit(("a",), record=record(4)), visit(("a",))], [(("a",), "", record(6))], [], [])
    assert values(result) == {"a": 4.0, "a#1": 6.0}


def test_records_of_a_nested_apply_and_leaves_in_the_output_s_order():
    both = Record({"b": summarize_magnitude(jnp.ones(())), "a": summarize_magnitude(jnp.zeros(()))}, "A", "m", ("in",))
    result = settle([visit(("out", "in"), method="m", leaves=("b", "a"))], [(("out",), "", both)], [], [])
    assert [str(p) for p in result.points] == ["out/in.m:b", "out/in.m:a"]


def test_names_are_unique_where_paths_are_not():
    visits = [visit(("a",), record=record(1)), visit(("a",), class_name="B", record=record(2, "B"))]
    dotted = [visit(("a.m",), record=record(3)), visit(("a",), method="m", record=record(4, method="m"))]
    result = settle([*visits, *dotted], [], [], [])
    assert values(result) == {"a": 1.0, "a~B": 2.0, "a.m": 3.0, "a.m~A": 4.0}


def test_a_root_child_called_output_does_not_clash_with_the_root():
    result = settle([visit(("output",), record=record(1)), visit((), record=record(2))], [], [("output", "w")], [])
    assert len(set(values(result))) == 2
