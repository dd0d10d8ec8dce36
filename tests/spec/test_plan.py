import dataclasses

import pytest

from probes_jax.spec.plan import Guard, Plan


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
        ({"deviation_floor": 0.0}, "deviation_floor must be positive"),
        ({"theta": float("nan")}, "theta must be positive"),
        ({"embeddings": "("}, "not a regular expression"),
        ({"exclude": ("[",)}, "not a regular expression"),
        ({"guard": True}, r"guard=Guard\(\)"),
    ],
)
def test_a_mistake_fails_when_the_plan_is_built_and_names_itself(settings, match):
    with pytest.raises(ValueError, match=match):
        Plan(**settings)


def test_a_guard_that_guards_nothing_is_refused():
    with pytest.raises(ValueError, match="guards nothing"):
        Guard(nonfinite=False)
    with pytest.raises(ValueError, match="max_consecutive"):
        Guard(max_consecutive=0)


def test_the_fingerprint_changes_with_any_setting():
    plans = [Plan(), Plan(theta=7.0), Plan(guard=Guard()), Plan(guard=Guard(co_spike=True)), Plan(groups=("a",))]
    assert len({plan.fingerprint for plan in plans}) == len(plans)
    assert Plan().fingerprint == Plan().fingerprint


def test_a_plan_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan().theta = 1.0
