"""Which metrics go to the event files: bounded, with names that do not change between runs."""

import math

import numpy as np
import pytest

from probes_jax.host.select import Selection
from probes_jax.spec.readings import Readings

LAYERS, TENSORS = 48, 12
STATS = ("abs_max", "rms", "zero_fraction", "nan_count")


def report(names, values=None, present=None, step=0):
    values = np.arange(len(names), dtype=np.float64) if values is None else np.asarray(values, np.float64)
    seen = np.ones(len(names), bool) if present is None else np.asarray(present, bool)
    return Readings(step, "full", names, values, seen)


def deep_model():
    points = [f"block[{i}]/tensor_{j}" for i in range(LAYERS) for j in range(TENSORS)]
    layers = [f"act/{point}/{stat}" for point in points for stat in STATS]
    layers += [f"grad/{point}/{stat}" for point in points for stat in ("abs_max", "norm", "share")]
    layers += [f"update/{point}/{stat}" for point in points for stat in ("norm", "ratio")]
    layers += [f"param/{point}/norm" for point in points] + [f"loss/shard[{i}]" for i in range(64)]
    groups = ["loss/mean", "loss/group/code/mean", "grad/norm", "act/abs_max", "opt/learning_rate", "my_metric"]
    return tuple(groups + layers), groups


def test_l148_a_deep_model_gives_a_bounded_number_of_tags():
    names, groups = deep_model()
    selected = Selection()(report(names))
    ranked = [
        f"top/{family}/{stat}/{i}" for family, stat in (("act", "abs_max"), ("grad", "abs_max")) for i in range(1, 6)
    ]
    ranked += [f"top/update/ratio/{i}" for i in range(1, 6)]
    assert len(names) > 5000
    assert sorted(selected.scalars) == sorted(groups + ranked)
    assert sorted(selected.texts) == ["top/act/abs_max/layers", "top/grad/abs_max/layers", "top/update/ratio/layers"]


def test_l148_names_do_not_depend_on_which_layers_are_worst():
    names, _ = deep_model()
    rng = np.random.default_rng(0)
    select = Selection(worst=3)
    tags = {tuple(sorted(select(report(names, rng.normal(size=len(names)))).scalars)) for _ in range(4)}
    assert len(tags) == 1


def test_the_worst_layers_are_ranked_like_a_plain_sort():
    rng = np.random.default_rng(1)
    names = tuple(f"act/l{i}/abs_max" for i in range(40))
    values, present = rng.normal(size=40), rng.random(40) < 0.8
    selected = Selection(worst=6)(report(names, values, present))
    plain = sorted((i for i in range(40) if present[i]), key=lambda i: -values[i])[:6]
    assert list(selected.scalars.values()) == [values[i] for i in plain]
    assert selected.texts["top/act/abs_max/layers"] == "\n".join(f"{k}. `l{i}`" for k, i in enumerate(plain, 1))


def test_nan_is_the_worst_then_infinity_and_absent_is_no_point():
    names = (*(f"act/{x}/abs_max" for x in "abcde"), "loss/mean")
    values = [1.0, math.inf, 9.0, math.nan, math.nan, math.nan]
    selected = Selection()(report(names, values, [True, True, False, True, True, False]))
    assert list(selected.scalars) == [f"top/act/abs_max/{i}" for i in (1, 2, 3, 4)]
    assert selected.texts["top/act/abs_max/layers"] == "1. `d`\n2. `e`\n3. `b`\n4. `a`"
    assert math.isnan(selected.scalars["top/act/abs_max/1"])
    assert list(selected.scalars.values())[2:] == [math.inf, 1.0]


def test_families_fall_back_to_what_is_measured():
    names = ("grad/a/norm", "update/a/norm", "grad/norm", "update/norm")
    assert sorted(Selection()(report(names)).scalars) == [
        "grad/norm",
        "top/grad/norm/1",
        "top/update/norm/1",
        "update/norm",
    ]


def test_no_layers_on_request_and_bad_settings_are_refused():
    names, groups = deep_model()
    assert sorted(Selection(worst=0)(report(names)).scalars) == sorted(groups)
    assert Selection(worst=0)(report(names)).texts == {}
    with pytest.raises(ValueError, match="worst must be 0"):
        Selection(worst=-1)


def test_names_are_looked_at_once_per_layout(monkeypatch):
    names, _ = deep_model()
    select = Selection()
    select(report(names))
    monkeypatch.setattr(select._registry, "find", lambda name: pytest.fail("looked again"))
    select(report(names, step=1))


def test_equal_ids_of_other_names_do_not_mix():
    select = Selection()
    for i in range(200):  # more layouts than the cache holds
        names = (f"my/metric_{i}",)
        assert select(report(names)).scalars == {f"my/metric_{i}": 0.0}


def test_a_plan_with_less_room_leaves_signals():
    names = ("loss/mean", "grad/norm", "grad/abs_mean", "data/tokens", "act/a/rms", "sys/monitor/queue")
    assert sorted(Selection(max_series=1)(report(names)).scalars) == ["grad/norm", "loss/mean", "sys/monitor/queue"]
