"""Where an explosion or a NaN began, from one scan and its history."""

from __future__ import annotations

import numpy as np
import pytest

from probes_jax.diagnose.order import forward_order
from probes_jax.diagnose.walk import walk
from probes_jax.spec.readings import Readings

POINTS = ("embed", "block[0]/up", "block[0]", "block[1]/up", "block[1]", "head", "output")


def scan(forward=None, backward=None, points=POINTS, step=400):
    names, values = [], []
    for family, changed in (("act", forward or {}), ("grad_act", backward or {})):
        for point in points:
            names.append(f"{family}/{point}/abs_max")
            values.append(changed.get(point, 0.5))
    present = np.array([value is not None for value in values])
    numbers = np.array([np.nan if value is None else value for value in values])
    return Readings(step, "full", tuple(names), numbers, present)


def earlier(name):
    return np.array([0.4, 0.5, 0.6, np.nan])


def test_the_first_layer_that_jumps_from_the_output_inwards_is_named():
    found = walk(scan(backward={"block[1]/up": 20.5, "block[0]": 300.0, "embed": 9000.0}), earlier)
    assert [place.point for place in found.chain] == list(reversed(POINTS))
    assert found.suspect.point == "block[1]/up"
    assert found.suspect.times == pytest.approx(41.0)
    assert found.lines() == ["grad_act/block[1]/up: 20.5, 41x its median, first in the chain"]


def test_a_large_gradient_that_always_was_large_is_no_suspect():
    found = walk(scan(backward={"embed": 9000.0}), lambda name: np.full(5, 8000.0 if "embed" in name else 0.5))
    assert found.suspect is None
    assert found.lines() == []


def test_without_history_nothing_jumps_but_a_nan_is_found():
    found = walk(scan(backward={"block[0]": np.nan, "embed": np.nan}))
    assert (found.forward, found.backward, found.suspect.point) == (None, "block[0]", "block[0]")
    assert found.lines() == ["grad_act/block[0]: first tensor with a NaN or infinity in the backward pass"]
    assert walk(scan(backward={"embed": 1e9}), lambda name: np.ones(2)).suspect is None


def test_a_nan_in_the_forward_pass_is_named_where_it_begins():
    found = walk(scan(forward={"block[0]": np.inf, "block[1]/up": np.nan, "output": np.nan}), earlier)
    assert found.forward == "block[0]"


def test_points_without_a_gradient_are_passed_over():
    found = walk(scan(backward={"head": None, "block[1]": 50.0}), earlier)
    assert "head" not in [place.point for place in found.chain]
    assert found.suspect.point == "block[1]"


def test_a_step_that_scanned_nothing_is_refused():
    light = Readings(7, "light", ("loss/mean",), np.ones(1), np.ones(1, bool))
    with pytest.raises(ValueError, match=r"step 7 measured no activations \(light program\)"):
        walk(light)


def test_scanned_and_unrolled_models_have_the_same_order():
    unrolled = [f"act/{point}/abs_max" for point in POINTS]
    scanned = ["embed", "block[0]/up", "block[1]/up", "block[0]", "block[1]", "head", "output"]
    names = [f"act/{point}/{stat}" for point in scanned for stat in ("abs_max", "finite_abs_max", "rms")]
    by_stat = [f"act/{p}/abs_max" for p in scanned]
    assert forward_order(names) == forward_order(by_stat) == forward_order(unrolled) == list(POINTS)


def test_two_stacks_behind_each_other_and_a_single_layer():
    names = ["a[0]/x", "a[1]/x", "a[0]", "a[1]", "b[0]/x", "b[1]/x", "b[2]/x", "b[0]", "b[1]", "b[2]", "c[0]/x", "c[0]"]
    wanted = [
        "a[0]/x",
        "a[0]",
        "a[1]/x",
        "a[1]",
        "b[0]/x",
        "b[0]",
        "b[1]/x",
        "b[1]",
        "b[2]/x",
        "b[2]",
        "c[0]/x",
        "c[0]",
    ]
    assert forward_order(f"act/{name}/abs_max" for name in names) == wanted
