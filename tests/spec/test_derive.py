import math

import numpy as np
import pytest

from probes_jax.spec.derive import derive


def _compute(values: dict[str, float | None]):
    """Derived values by name (None where absent), and which one the worst is."""
    rules = derive(tuple(values))
    array = np.asarray([np.nan if value is None else value for value in values.values()], np.float64)
    present = np.asarray([value is not None for value in values.values()], bool)
    out, seen, which = rules.compute(array, present)
    assert len(rules.names) == len(out) == len(seen)
    return {name: float(v) if s else None for name, v, s in zip(rules.names, out, seen, strict=True)}, which


def test_nothing_to_derive():
    assert _compute({"loss/mean": 1.0, "grad/norm": 2.0}) == ({}, {})
    assert _compute({}) == ({}, {})


def test_shares_of_squared_norms_add_to_one():
    found, _ = _compute({"grad/norm": 99.0, "grad/a/norm": 3.0, "grad/b/c/norm": 4.0, "grad/b/c/abs_max": 1.0})
    assert found["grad/a/share"] == pytest.approx(9 / 25)
    assert found["grad/a/share"] + found["grad/b/c/share"] == pytest.approx(1.0)
    assert "grad/share" not in found


def test_shares_of_nothing_are_absent():
    found, _ = _compute({"grad/a/norm": 0.0, "grad/b/norm": 0.0})
    assert found["grad/a/share"] is None
    assert found["grad/worst_layer_norm"] == 0.0
    found, _ = _compute({"grad/a/norm": None, "grad/b/norm": 2.0})
    assert (found["grad/a/share"], found["grad/b/share"]) == (None, 1.0)


def test_a_nan_layer_shows_in_every_share():
    found, which = _compute({"grad/a/norm": math.nan, "grad/b/norm": 2.0})
    assert math.isnan(found["grad/a/share"])
    assert math.isnan(found["grad/b/share"])
    assert math.isnan(found["grad/worst_layer_norm"])
    assert which["grad/worst_layer_norm"] == "grad/a"


def test_update_ratio_by_tensor():
    found, which = _compute(
        {"update/norm": 1.0, "update/a/norm": 1.0, "param/a/norm": 4.0, "update/b/norm": 1.0, "param/b/norm": 2.0}
    )
    assert (found["update/a/ratio"], found["update/b/ratio"]) == (0.25, 0.5)
    assert found["update/worst_ratio"] == 0.5
    assert which["update/worst_ratio"] == "update/b"


def test_l036_the_ratio_to_a_parameter_of_norm_zero_is_undefined():
    found, which = _compute({"update/a/norm": 1.0, "param/a/norm": 0.0, "update/b/norm": 0.0, "param/b/norm": 0.0})
    assert found == {"update/a/ratio": None, "update/b/ratio": None, "update/worst_ratio": None}
    assert which == {}


def test_an_update_without_its_parameter_has_no_ratio():
    assert _compute({"update/a/norm": 1.0, "param/b/norm": 2.0}) == ({}, {})


def test_the_worst_is_nan_then_the_largest_and_says_which():
    values = {"act/a/abs_max": 2.0, "act/b/abs_max": 7.0, "act/c/abs_max": None, "act/b/finite_abs_max": 99.0}
    found, which = _compute(values)
    assert found == {"act/abs_max": 7.0}
    assert which == {"act/abs_max": "act/b"}
    found, which = _compute({**values, "act/a/abs_max": math.inf})
    assert (found["act/abs_max"], which["act/abs_max"]) == (math.inf, "act/a")
    found, which = _compute({**values, "act/a/abs_max": math.inf, "act/c/abs_max": math.nan})
    assert math.isnan(found["act/abs_max"])
    assert which["act/abs_max"] == "act/c"


def test_worst_shard_leaves_absent_shards_out():
    found, which = _compute({"loss/shard[0]": -3.0, "loss/shard[1]": None, "loss/shard[10]": -2.0})
    assert found == {"loss/worst_shard": -2.0}
    assert which == {"loss/worst_shard": "loss/shard[10]"}
    assert _compute({"loss/shard[0]": None}) == ({"loss/worst_shard": None}, {})


def test_copies_that_differ_are_counted_and_the_first_is_named():
    names = {"replica/param/a/diverged": 0.0, "replica/param/b/diverged": 1.0, "replica/opt/n/diverged": 1.0}
    found, which = _compute(names)
    assert (found, which) == ({"replica/divergent_tensors": 2.0}, {"replica/divergent_tensors": "replica/param/b"})
    found, which = _compute(dict.fromkeys(names, 0.0))
    assert (found, which) == ({"replica/divergent_tensors": 0.0}, {})
    assert _compute(dict.fromkeys(names)) == ({"replica/divergent_tensors": None}, {})
    assert derive(("grad/a/norm", *names)).sources("replica/divergent_tensors") == {1, 2, 3}
