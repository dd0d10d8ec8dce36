import dataclasses

import numpy as np
import pytest

from probes_jax.spec.plan import MORE, Guard, Plan


def test_the_defaults_are_those_of_the_design():
    plan = Plan()
    assert (plan.window, plan.min_history, plan.deviation_floor, plan.theta) == (128, 32, 3e-3, 6.0)
    assert plan.guard is None


def test_lists_are_taken_as_tuples():
    plan = Plan(groups=["code", "law"], token_axes=["data"])
    assert plan.groups == ("code", "law")
    assert plan.token_axes == ("data",)
    assert hash(plan) == hash(Plan(groups=("code", "law"), token_axes=("data",)))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"groups": "code"}, r"groups must be a tuple.*\('code',\)"),
        ({"token_axes": "data"}, r"token_axes must be a tuple.*\('data',\)"),
        ({"feature_axes": "model"}, "feature_axes"),
        ({"exclude": "mlp"}, "exclude"),
        ({"groups": ("a/b",)}, "'a/b'"),
        ({"groups": ("",)}, "empty"),
        ({"groups": ("a", "a")}, "unique"),
        ({"groups": ("other",)}, "'other'"),
        ({"scan_every": 0}, "scan_every must be an integer of at least 1, got 0"),
        ({"scan_every": True}, "scan_every"),
        ({"window": 1}, "window"),
        ({"clip_window": 2.5}, "clip_window"),
        ({"window": 16}, "min_history .32. exceeds window .16."),
        ({"deviation_floor": 0.0}, "deviation_floor must be a positive number, got 0.0"),
        ({"theta": float("nan")}, "theta must be a positive number, got nan"),
        ({"embeddings": "("}, "not a regular expression"),
        ({"exclude": ("[",)}, "not a regular expression"),
        ({"guard": True}, r"guard=Guard\(\)"),
        ({"groups": (1, 2)}, r"groups must be a tuple of names, got \(1, 2\); write for example"),
        ({"groups": 3}, "groups must be a tuple of names, got 3"),
        ({"groups": {"a", "b"}}, "groups must be a tuple"),
        ({"groups": None}, "groups must be a tuple"),
        ({"exclude": (1,)}, "exclude must be a tuple"),
        ({"include": ("role:",)}, "Plan include 'role:' names no role"),
        ({"roles": ("mixer", "query")}, "roles must be .* pairs"),
        ({"roles": (("[", "query"),)}, "roles is not a regular expression"),
        ({"feature_axes": (0,)}, "feature_axes must be a tuple"),
        ({"token_axes": 1}, "token_axes must be a tuple"),
        ({"embeddings": 3}, "embeddings must be a regular expression, got 3"),
        ({"embeddings": None}, "embeddings must be a regular expression, got None"),
        ({"theta": "x"}, "theta must be a positive number, got 'x'"),
        ({"theta": True}, "theta"),
        ({"theta": -6.0}, "theta"),
        ({"deviation_floor": float("nan")}, "deviation_floor"),
        ({"scan_every": 2.0}, "scan_every must be an integer"),
        ({"min_history": "3"}, "min_history"),
        ({"skip_empty": 1}, "skip_empty must be True or False, got 1"),
        ({"max_series": 0}, "max_series must be"),
        ({"max_payload": 1e6}, "max_payload must be an integer"),
    ],
)
def test_a_mistake_fails_when_the_plan_is_built_and_names_itself(settings, match):
    with pytest.raises(ValueError, match=match):
        Plan(**settings)


def test_a_guard_that_guards_nothing_is_refused():
    with pytest.raises(ValueError, match="guards nothing"):
        Guard(nonfinite=False)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"max_consecutive": 0}, "max_consecutive must be an integer of at least 1, got 0"),
        ({"max_consecutive": 2.5}, "max_consecutive .* got 2.5"),
        ({"max_consecutive": True}, "max_consecutive"),
        ({"nonfinite": 1}, "Guard nonfinite must be True or False, got 1"),
        ({"co_spike": None}, "Guard co_spike"),
    ],
)
def test_the_settings_of_a_guard_name_themselves(settings, match):
    with pytest.raises(ValueError, match=match):
        Guard(**settings)


def test_numbers_of_numpy_are_plain_numbers():
    plan = Plan(scan_every=np.int64(50), theta=np.float32(5.0), guard=Guard(max_consecutive=np.int32(7)))
    assert plan.fingerprint == Plan(scan_every=50, theta=5, guard=Guard(max_consecutive=7)).fingerprint
    assert type(plan.scan_every) is int and type(plan.theta) is float


def test_the_fingerprint_changes_with_any_setting():
    plans = [Plan(), Plan(theta=7.0), Plan(guard=Guard()), Plan(guard=Guard(co_spike=True)), Plan(groups=("a",))]
    assert len({plan.fingerprint for plan in plans}) == len(plans)
    assert Plan().fingerprint == Plan().fingerprint


def test_a_plan_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan().theta = 1.0


def test_presets_are_plans_that_can_be_changed():
    assert Plan.diagnose(scan_every=50) == Plan(scan_every=50, more=MORE)
    assert Plan().left_out == MORE and Plan.diagnose().left_out == ()
    first = Plan.first_screen(groups=("code",))
    assert first.groups == ("code",)
    assert not first.backward
    assert {"residual", "router", "replica", "act"}.isdisjoint(first.left_out)  # these have signals that page
    found = Plan.forensics(points=["role:query"], scan_every=1)
    assert (found.include, found.precision, found.stages, found.scan_every) == (("role:query",), True, True, 1)
    assert Plan.first_screen(without=("logits",)).without == (*first.without, "logits")
    assert Plan.first_screen(more=("noise",)).more == (*first.more, "noise")
    assert Plan.diagnose(without=("noise",)).more == tuple(family for family in MORE if family != "noise")
    with pytest.raises(ValueError, match=r"points must be a tuple of names, got the string 'moe'"):
        Plan.forensics("moe")
    with pytest.raises(ValueError, match="points and include"):
        Plan.forensics(("moe",), include=("mlp",))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(top_k=0), "top_k"),
        (dict(more=("act",)), "more"),
        (dict(expert_shards="two"), "expert_shards"),
        (dict(modalities=("text", "text")), "modality"),
        (dict(modalities=("a/b",)), "modality"),
        (dict(encoder="("), "encoder"),
    ],
)
def test_settings_of_the_index_that_cannot_be(settings, words):
    with pytest.raises((ValueError, TypeError), match=words):
        Plan(**settings)
