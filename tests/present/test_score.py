from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from probes_jax.present.score import find_plan, robust_scores
from probes_jax.spec.plan import Plan


def _slow(values, present, plan):
    """The definition, one value at a time."""
    window, out = [], []
    for value, seen in zip(values, present):
        score = None
        usable = seen and math.isfinite(value) and value > 0
        if seen and not math.isfinite(value) and len(window) >= plan.min_history:
            score = math.inf
        if usable:
            u = math.log(value + 1e-30)
            recent = window[-plan.window :]
            if len(window) >= plan.min_history:
                q = statistics.median(recent)
                d = statistics.median(abs(x - q) for x in recent)
                score = 0.6745 * (u - q) / max(d, plan.deviation_floor)
            window.append(u)
        out.append(score)
    return out


@pytest.mark.parametrize(
    "plan", [Plan(), Plan(window=5, min_history=2), Plan(window=8, min_history=3, deviation_floor=0.1)]
)
def test_same_as_the_definition(plan):
    random = np.random.default_rng(0)
    values = np.exp(random.normal(0, 0.05, 400))
    values[[50, 120, 300]] *= 30
    values[[60, 61, 200]] = [np.nan, np.inf, -np.inf]
    values[[70, 71]] = [0.0, -1.0]
    present = random.random(400) > 0.1
    scores, known = robust_scores(values, present, plan)
    expected = _slow(values, present, plan)
    assert known.tolist() == [score is not None for score in expected]
    np.testing.assert_allclose(scores[known], [s for s in expected if s is not None], rtol=1e-9, atol=1e-9)
    assert np.isnan(scores[~known]).all()
    assert (scores > 6).any()


def test_many_values_are_taken_in_parts():
    values = np.exp(np.random.default_rng(1).normal(size=5000))
    plan = Plan(window=4, min_history=2)
    scores, known = robust_scores(values, np.ones(5000, bool), plan)
    expected = _slow(values.tolist(), [True] * 5000, plan)
    np.testing.assert_allclose(scores[known], [s for s in expected if s is not None], rtol=1e-9)


@pytest.mark.parametrize("count", [0, 1, 32])
def test_a_short_history_has_no_score(count):
    scores, known = robust_scores(np.ones(count), np.ones(count, bool), Plan())
    assert scores.shape == (count,) and not known.any()


def test_one_value_changes_the_floor_decides():
    """A quiet window: the floor alone sets the scale of the score."""
    values = np.full(100, 2.0)
    values[-1] = 2.0 * math.exp(0.03)
    scores, _ = robust_scores(values, np.ones(100, bool), Plan())
    assert scores[-1] == pytest.approx(0.6745 * 0.03 / 3e-3, rel=1e-6)


def test_plan_of_a_run():
    plan = Plan(groups=("code",), theta=4.5, window=64, min_history=8, deviation_floor=1e-5)
    for said in (
        repr(plan),
        {"theta": 4.5, "window": 64, "min_history": 8, "deviation_floor": 1e-5, "groups": ["code"]},
    ):
        found = find_plan({"attempts": [{"plan": "Plan(theta=1.0)"}, {"plan": said}]})
        assert (found.theta, found.window, found.min_history, found.deviation_floor) == (4.5, 64, 8, 1e-5)
    assert find_plan({"attempts": [{"plan": None}]}) == Plan()
    assert find_plan({}) == Plan()
