"""Every metric of a step against float64 NumPy on the arrays of a step written without the library."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

import probes_jax as pj
from tests.step.small import BATCH, GROUPS, LENGTH, copy, make_batch, make_state, make_tx, norm64, plain_step

LEAVES = {
    "embed/embedding": ("embed", "embedding"),
    "block[0]/norm/scale": ("block_0", "norm", "scale"),
    "block[1]/up/kernel": ("block_1", "up", "kernel"),
    "block[1]/down/bias": ("block_1", "down", "bias"),
    "head/kernel": ("head", "kernel"),
}


def pick(tree, path):
    for key in path:
        tree = tree[key]
    return np.asarray(tree, np.float64)


@pytest.fixture(scope="module")
def run():
    """Three monitored steps, and the same three by hand; a full scan on each."""
    batch = make_batch()
    tx = make_tx()
    state = make_state(plan=pj.Plan(groups=GROUPS, scan_every=1), tx=tx, batch=batch)
    params, opt_state = copy(state.params), copy(state.opt_state)
    steps = []
    for seed in range(3):
        batch = make_batch(seed)
        state, report = pj.monitored_train_step(state, batch)
        new, new_opt, gradients, nll, logits = plain_step(params, opt_state, batch, tx)
        steps.append((report, batch, params, new, gradients, np.asarray(nll, np.float64), np.asarray(logits)))
        params, opt_state = new, new_opt
    return state, steps


def test_loss_and_groups(run):
    _, steps = run
    for report, batch, _, _, _, nll, _ in steps:
        found, mask = report.scalars(), batch["mask"].astype(np.float64)
        assert found["loss/mean"] == pytest.approx((nll * mask).sum() / mask.sum(), rel=1e-6)
        assert found["loss/shard[0]"] == found["loss/worst_shard"] == found["loss/mean"]
        assert found["data/tokens"] == mask.sum()
        for index, name in enumerate((*GROUPS, "other")):
            of_group = mask * (batch["source"] == index)[:, None]
            if of_group.sum() == 0:
                assert f"loss/group/{name}/mean" not in found
            else:
                mean = (nll * of_group).sum() / of_group.sum()
                assert found[f"loss/group/{name}/mean"] == pytest.approx(mean, rel=1e-6)
            assert found[f"loss/group/{name}/token_share"] == pytest.approx(of_group.sum() / mask.sum(), rel=1e-6)


def test_totals(run):
    state, steps = run
    tokens = sum(batch["mask"].sum() for _, batch, *_ in steps)
    assert steps[-1][0].scalars()["data/tokens_total"] == tokens
    assert int(state.step) == 3
    assert [report.readings()[0].step for report, *_ in steps] == [0, 1, 2]


def test_gradients(run):
    _, steps = run
    for report, _, _, _, gradients, _, _ in steps:
        found = report.scalars()
        flat = np.concatenate([np.asarray(g, np.float64).ravel() for g in jax.tree.leaves(gradients)])
        assert found["grad/norm"] == pytest.approx(np.sqrt((flat**2).sum()), rel=1e-5)
        assert found["grad/abs_mean"] == pytest.approx(np.abs(flat).mean(), rel=1e-5)
        assert found["grad/abs_max"] == pytest.approx(np.abs(flat).max(), rel=1e-5)
        assert found["grad/zero_fraction"] == pytest.approx((flat == 0).mean(), abs=1e-9)
        embedding = pick(gradients, ("embed", "embedding"))
        assert found["grad/zero_fraction/embedding"] == pytest.approx((embedding == 0).mean(), abs=1e-9)
        assert found["grad/nan_count"] == found["grad/inf_count"] == 0
        for name, path in LEAVES.items():
            gradient = pick(gradients, path)
            assert found[f"grad/{name}/norm"] == pytest.approx(norm64(gradient), rel=1e-5)
            share = (gradient**2).sum() / (flat**2).sum()
            assert found[f"grad/{name}/share"] == pytest.approx(share, rel=1e-4, abs=1e-12)
        shares = [value for name, value in found.items() if name.endswith("/share")]
        assert sum(shares) == pytest.approx(1.0)


def test_clip(run):
    _, steps = run
    clipped = []
    for report, _, _, _, gradients, _, _ in steps:
        found = report.scalars()
        clipped.append(norm64(*jax.tree.leaves(gradients)) > 0.5)
        assert found["grad/clip_rate"] == pytest.approx(np.mean(clipped))
        assert found["grad/clip_threshold"] == pytest.approx(0.5)


def test_parameters_and_updates(run):
    _, steps = run
    for report, _, old, new, _, _, _ in steps:
        found = report.scalars()
        updates = jax.tree.map(lambda a, b: np.asarray(b, np.float64) - np.asarray(a, np.float64), old, new)
        assert found["param/norm"] == pytest.approx(norm64(*jax.tree.leaves(old)), rel=1e-5)
        assert found["update/norm"] == pytest.approx(norm64(*jax.tree.leaves(updates)), rel=1e-4)
        for name, path in LEAVES.items():
            weight, update = pick(old, path), pick(updates, path)
            assert found[f"param/{name}/norm"] == pytest.approx(norm64(weight), rel=1e-5)
            assert found[f"update/{name}/norm"] == pytest.approx(norm64(update), rel=1e-4)
            if norm64(weight) == 0:
                assert f"update/{name}/ratio" not in found  # L036: undefined, not infinite
            else:
                assert found[f"update/{name}/ratio"] == pytest.approx(norm64(update) / norm64(weight), rel=1e-4)


def test_logits(run):
    _, steps = run
    for report, batch, _, _, _, _, logits in steps:
        found = report.scalars()
        exact = np.asarray(logits, np.float64)
        assert found["logits/abs_max"] == pytest.approx(np.abs(exact).max(), rel=1e-5)
        lse = np.log(np.exp(exact).sum(-1))
        mask = batch["mask"].astype(np.float64)
        assert found["logits/logsumexp"] == pytest.approx((lse * mask).sum() / mask.sum(), rel=1e-5)


def test_activations(run):
    _, steps = run
    from tests.step.small import Model

    for report, batch, old, *_ in steps:
        found = report.scalars()
        _, captured = Model().apply({"params": old}, batch["tokens"], capture_intermediates=True)
        inner = captured["intermediates"]
        for name, x in {
            "embed": inner["embed"]["__call__"][0],
            "block[0]": inner["block_0"]["__call__"][0],
            "block[1]/up": inner["block_1"]["up"]["__call__"][0],
            "head": inner["head"]["__call__"][0],
        }.items():
            x = np.asarray(x, np.float64)
            expected = {
                "abs_max": np.abs(x).max(),
                "mean_square": (x**2).mean(),
                "rms": np.sqrt((x**2).mean()),
                "abs_mean": np.abs(x).mean(),
                "zero_fraction": (x == 0).mean(),
                "mean": x.mean(),
                "std": x.std(),
                "min": x.min(),
                "max": x.max(),
                "nan_count": 0,
                "inf_count": 0,
            }
            for stat, value in expected.items():
                assert found[f"act/{name}/{stat}"] == pytest.approx(value, rel=1e-4, abs=1e-6), (name, stat)
        worst = report.readings()[0].which["act/abs_max"]
        assert found["act/abs_max"] == found[f"{worst}/abs_max"]


def test_learning_rate_is_the_one_used():
    """L144: a warm-up of 0, 0.1, 0.2 is reported as 0, 0.1, 0.2 against steps 0, 1, 2."""
    tx = pj.chain(("lr", optax.scale_by_learning_rate(lambda count: 0.1 * count)))
    state = make_state(tx=tx)
    rates = {}
    for _ in range(3):
        state, report = pj.monitored_train_step(state, make_batch())
        rates[report.readings()[0].step] = report.scalars()["opt/learning_rate"]
    assert rates == pytest.approx({0: 0.0, 1: 0.1, 2: 0.2})


def test_light_program_measures_every_step_metrics_only():
    state = make_state(plan=pj.Plan(groups=GROUPS, scan_every=100))
    state, full = pj.monitored_train_step(state, make_batch())
    state, light = pj.monitored_train_step(state, make_batch())
    assert (full.layout.program, light.layout.program) == ("full", "light")
    assert not [name for name in light.scalars() if name.startswith("act/") or name.count("/") > 3]
    for name in ("loss/mean", "grad/norm", "param/norm", "update/norm", "logits/abs_max", "opt/learning_rate"):
        assert name in light.scalars()
    assert BATCH * LENGTH >= light.scalars()["data/tokens"] > 0
