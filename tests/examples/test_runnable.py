"""Every example trains, and measures what it is there for."""

from __future__ import annotations

import importlib
import pathlib
import re
import runpy
import sys

import numpy as np
import pytest

from probes_jax.spec.catalog.residual import THETAS

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
STEPS = 30
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """Calls `main` of an example, as a script would, in a folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        patch.chdir(tmp_path_factory.mktemp("examples"))
        yield lambda name, *arguments: importlib.import_module(name).main(*arguments)


@pytest.fixture(scope="module")
def scanned(example):
    return example("decoders", "scanned", STEPS)


@pytest.fixture(scope="module")
def nnx(example):
    return example("decoders", "nnx", STEPS)


@pytest.fixture(scope="module")
def experts(example):
    return example("experts", STEPS)


@pytest.fixture(scope="module")
def captions(example):
    return example("captions", 2 * STEPS)


@pytest.fixture(scope="module")
def gated(example):
    return example("gated", STEPS)


def first(run, name):
    """The value of step 0."""
    steps, values, present = run.series(name)
    assert steps[0] == 0 and present[0], name
    return values[0]


def first_of(run, pattern):
    """Values of step 0 of all names that match, by what is in the brackets."""
    found = {match[1]: name for name in run.names() if (match := re.fullmatch(pattern, name))}
    return {key: first(run, name) for key, name in found.items()}


def check_run(run, steps, drop):
    """The loss fell, and the folder is whole: every step in the store and in the flight record, curves, coverage."""
    found, loss, present = run.series("loss/mean")
    assert found.tolist() == [step.step for step in run.flight()] == list(range(steps)) and present.all()
    assert loss[-5:].mean() < loss[0] - drop
    assert run.damaged() == [] and run.lacking() == {} and run.coverage()
    assert list(pathlib.Path(run.folder.root, "events").iterdir())


def test_scanned_and_nnx_layers_have_the_same_names_and_a_row_each(scanned, nnx):
    for run in (scanned, nnx):
        check_run(run, STEPS, drop=1.0)
        for column in ("residual/block\\[(\\d)\\]/attention/ratio/mean", "grad/block\\[(\\d)\\]/mlp/up/kernel/norm"):
            rows = first_of(run, column)
            assert list(rows) == ["0", "1"] and 0 < min(rows.values()) < max(rows.values())
        entropy = first_of(run, r"attention/block\[(\d)\]/attention/entropy/max")
        assert len(entropy) == 2 and min(entropy.values()) > 0 and max(entropy.values()) <= np.log(64) + 1e-3
    assert set(scanned.names()) == set(nnx.names())


def test_experts_that_are_cut_over_the_mesh(experts):
    check_run(experts, STEPS, drop=1.0)
    for layer in (0, 1):
        router = f"router/block[{layer}]/experts/router"
        loads = first_of(experts, re.escape(f"{router}/load/expert[") + r"(\d)\]")
        assert len(loads) == 8 and sum(loads.values()) == pytest.approx(1.0)
        p = np.array(list(loads.values()))
        assert first(experts, f"{router}/max_violation") == pytest.approx(8 * p.max() - 1, rel=1e-5)
        assert first(experts, f"{router}/shard_imbalance") == pytest.approx(4 * p.reshape(4, 2).sum(1).max(), rel=1e-5)
        entropy = -sum(q * np.log(q) for q in p if q) / np.log(8)
        assert first(experts, f"{router}/entropy_norm") == pytest.approx(entropy, rel=1e-5)
        assert 0.5 < entropy <= 1
    assert experts.series("router/max_violation")[0].size == STEPS
    assert first(experts, "replica/divergent_tensors") == 0
    shares = first_of(experts, r"(loss/shard\[\d\])")
    assert list(shares) == ["loss/shard[0]", "loss/shard[1]"]


def test_images_and_their_captions(captions):
    run, right = captions
    check_run(run, 2 * STEPS, drop=2.0)
    assert right > 0.2  # by chance 0.1
    text, image = (run.series(f"media/{name}/token_share")[1] for name in ("text", "image"))
    np.testing.assert_allclose(text + image, 1.0, rtol=1e-6)
    assert 0.5 < image.min() <= image.max() < 0.75
    gradient, size = (first(run, f"media/encoder_{name}_share") for name in ("gradient", "parameter"))
    assert 0 < size < gradient < 1
    assert first(run, "media/image/scale_ratio") > 1
    seen, blind = (run.series(f"loss/group/{name}/mean")[1][-5:].mean() for name in ("seen", "blind"))
    assert seen < blind


def test_gates_that_are_shut_at_first(gated):
    check_run(gated, STEPS, drop=1.0)
    for theta, share in zip(THETAS, (0.0, 1.0, 1.0)):  # sigmoid(-2.5) is 0.076
        found = first_of(gated, rf"residual/block\[(\d)\]/gate/saturation/{theta}/mean")
        assert found == dict.fromkeys("012", share)
    ratios = first_of(gated, r"residual/block\[(\d)\]/mlp/ratio/mean")
    assert len(ratios) == 3 and min(ratios.values()) > 0
    assert first(gated, "residual/ratio") == pytest.approx(max(ratios.values()))


def test_without_scikit_learn_it_says_what_to_install(example, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit, match="pip install scikit-learn"):
        runpy.run_path(str(EXAMPLES / "captions.py"))
