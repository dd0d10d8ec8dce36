"""Models of other people, unedited: everything in them is seen or named, and they train as without the library."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import probes_jax as pj
from tests.contracts.source import ROOT
from tests.models.tables import as_page
from tests.models.train import STEPS, by_path, plain, start
from tests.models.zoo import MODELS, ONES, POSITIONS, VOCAB, RealModel


@dataclasses.dataclass
class Trained:
    real: RealModel
    reports: list[Any]
    weights: Any
    compiles: list[int]
    losses: list[float]
    params: Any


@contextlib.contextmanager
def counting():
    """Counts compiles by the backend."""
    compiles = []

    def listen(event, _seconds, **_more):
        if event == "/jax/core/compile/backend_compile_duration":
            compiles.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiles
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="module", params=MODELS, ids=lambda real: real.name)
def trained(request):
    real = request.param
    module = real.make()
    state, reports, counts = start(real, module), [], []
    for seed in range(STEPS):
        with counting() as compiles:
            state, report = pj.monitored_train_step(state, real.batch(seed))
        reports.append(report)
        counts.append(len(compiles))
    losses, params = plain(real, module)
    weights = state.module()
    weights = nnx.state(weights, nnx.Param) if isinstance(weights, nnx.Module) else weights["params"]
    return Trained(real, reports, weights, counts, losses, params)


def test_every_point_is_reported_or_named(trained):
    coverage = trained.reports[0].coverage
    lost = tuple(point.name for point in coverage.points if not point.reported)
    assert (len(coverage.seen), lost) == (trained.real.points, trained.real.missing)
    assert len(coverage.reported) == trained.real.points - len(trained.real.missing)
    assert set(dict(coverage.missing)) == set(lost)
    found = trained.reports[0].scalars()
    for point in coverage.points:
        for label in point.labels() if point.reported else ():
            assert f"act/{label}/abs_max" in found


def test_every_point_has_the_gradient_that_came_back_to_it(trained):
    found = trained.reports[-1].scalars()
    points = [point for point in trained.reports[-1].coverage.points if point.reported and point.method != "input"]
    assert all(point.gradient for point in points)
    without = {point.name for point in points if f"grad_act/{point.labels()[0]}/abs_max" not in found}
    assert without == set(trained.real.unused)  # absent, not zero


def test_it_trains_as_without_the_library(trained):
    losses = [report.scalars()["loss/mean"] for report in trained.reports]
    np.testing.assert_allclose(losses, trained.losses, rtol=1e-6)
    ours, theirs = by_path(trained.weights), by_path(trained.params)
    assert ours.keys() == theirs.keys()
    for path, value in theirs.items():
        np.testing.assert_allclose(ours[path], value, rtol=0, atol=2e-6, err_msg=path)


def test_it_compiles_once(trained):
    assert trained.compiles[0] >= 1 and trained.compiles[1:] == [0] * (STEPS - 1)


def test_the_values_are_those_that_the_model_itself_hands_out():
    """GPT-2 returns its hidden states when asked: the input of every block, and the output of the last norm."""
    (real,) = [real for real in MODELS if real.name == "gpt2"]
    module = real.make()
    state, batch = start(real, module), real.batch(0)
    out = module.apply(state.module(), batch["input"], ONES, POSITIONS, output_hidden_states=True)
    found = pj.monitored_train_step(state, batch)[1].scalars()
    error = np.asarray(jax.nn.softmax(out.logits) - jax.nn.one_hot(batch["target"], VOCAB), np.float64)
    for name, value in (
        ("act/transformer/h[0]", out.hidden_states[1]),
        ("act/transformer/ln_f", out.hidden_states[-1]),
        ("act/output", out.logits),
        ("grad_act/output", error / batch["target"].size),
    ):
        x = np.asarray(value, np.float64)
        assert found[f"{name}/rms"] == pytest.approx(np.sqrt((x * x).mean()), rel=1e-5)
        assert found[f"{name}/abs_max"] == pytest.approx(np.abs(x).max(), rel=1e-5)


def test_the_page_is_what_the_models_say_today():
    assert (ROOT / "docs" / "coverage_models.md").read_text("utf-8") == as_page(), "run: make docs-models"
