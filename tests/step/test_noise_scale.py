"""The gradient noise scale of a step, against gradients of its microbatches taken one by one in float64."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import probes_jax as pj
from probes_jax.detect.noise_scale import KEEP
from tests.step.small import Model, copy, loss_fn, make_batch, make_sgd, make_state, only, plain_loss
from tests.step.test_mesh import CASES, count_collectives, mesh_of

pytestmark = pytest.mark.slow  # together; the second pair of Python and JAX goes without

PLAN = only("noise", scan_every=2)
NAMES = ("grad/microbatch_norm", "grad/noise/trace", "grad/noise/square", "grad/noise_scale")


gradient_of = jax.jit(jax.grad(lambda params, batch: plain_loss(params, batch)[0]))


def flat(tree):
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


def expected(params, batch, microbatches):
    """A, tr(S) and |G|^2 by the definitions."""
    size = len(batch["tokens"]) // microbatches
    gradients, sizes = [], []
    for index in range(microbatches):
        part = {key: x[index * size : (index + 1) * size] for key, x in batch.items()}
        if part["mask"].sum():
            gradients.append(flat(gradient_of(params, part)))
            sizes.append(part["mask"].sum())
    whole = sum(b * g for b, g in zip(sizes, gradients)) / sum(sizes)
    a = sum(b * (g**2).sum() for b, g in zip(sizes, gradients)) / sum(sizes)
    between = (a - (whole**2).sum()) / (len(sizes) - 1)
    return a, between * sum(sizes), (whole**2).sum() - between


@pytest.mark.parametrize(("microbatches", "scale"), [(2, None), (4, 1024.0)])
def test_the_estimates_and_their_smoothed_ratio(microbatches, scale):
    plan = only("noise", scan_every=1)
    state = make_state(plan=plan, tx=make_sgd(), microbatches=microbatches, loss_scale=scale)
    means = np.zeros(2)
    for seed in range(3):
        batch, params = make_batch(seed), copy(state.params)
        if seed == 1:
            batch["mask"][:2] = 0.0  # with four microbatches, one of them is empty
        state, report = pj.monitored_train_step(state, batch)
        a, trace, square = expected(params, batch, microbatches)
        means = float(KEEP) * means + (1 - float(KEEP)) * np.array([trace, square])
        found = report.scalars()
        assert found["grad/microbatch_norm"] == pytest.approx(np.sqrt(a), rel=1e-5)
        assert found["grad/noise/trace"] == pytest.approx(trace, rel=1e-4)
        assert found["grad/noise/square"] == pytest.approx(square, rel=1e-3, abs=1e-5 * a)
        if means[1] > 1e-4 * a:
            assert found["grad/noise_scale"] == pytest.approx(means[0] / means[1], rel=1e-2)


def test_a_batch_of_copies_has_no_noise():
    one = make_batch(batch=2)
    batch = {key: np.concatenate([x] * 4) for key, x in one.items()}
    _, report = pj.monitored_train_step(make_state(plan=PLAN, batch=batch, microbatches=4), batch)
    found = report.scalars()
    assert found["grad/microbatch_norm"] == pytest.approx(found["grad/norm"], rel=1e-6)
    assert found["grad/noise/square"] == pytest.approx(found["grad/norm"] ** 2, rel=1e-5)
    assert found["grad/noise_scale"] == pytest.approx(0.0, abs=1e-3)


def test_where_it_is_absent_the_coverage_says_why():
    def missing(**kwargs):
        _, report = pj.monitored_train_step(make_state(**{"plan": PLAN, **kwargs}), make_batch())
        assert not [name for name in NAMES if name in report.scalars()]
        return dict(report.coverage.missing)

    def one_number(model, batch, rngs):
        return loss_fn(model, batch, rngs).nll.mean()

    assert "microbatches=K" in missing()["grad/noise_scale"]
    assert "pj.Loss" in missing(microbatches=2, loss_fn=one_number)["grad/noise_scale"]
    without = missing(microbatches=2, plan=only("noise", without=("noise",)))
    assert "grad/noise_scale" not in without
    assert "Plan without" in without["noise"]


def test_the_light_program_knows_nothing_of_it():
    state = make_state(plan=PLAN, microbatches=2, tx=make_sgd())
    for _ in range(2):
        state, report = pj.monitored_train_step(state, make_batch())
    assert report.layout.program == "light"
    assert not [name for name in NAMES if name in report.scalars()]
    assert "grad/noise_scale" not in dict(report.coverage.missing)
    assert float(state.monitor.noise.trace) != 0.0  # as the step before left it


def test_frozen_parameters_do_not_count():
    tx = optax.masked(optax.set_to_zero(), lambda params: {name: name == "embed" for name in params})
    tx = pj.chain(("freeze", tx), ("lr", optax.scale_by_learning_rate(0.1)))
    batch = make_batch()
    state = make_state(plan=PLAN, tx=tx, microbatches=2)
    params = copy(state.params)
    _, report = pj.monitored_train_step(state, batch)
    parts = [{key: x[at : at + 4] for key, x in batch.items()} for at in (0, 4)]
    square = 0.0
    for part in parts:
        gradient = gradient_of(params, part)
        gradient.pop("embed")
        square += part["mask"].sum() * (flat(gradient) ** 2).sum() / batch["mask"].sum()
    assert report.scalars()["grad/microbatch_norm"] == pytest.approx(np.sqrt(square), rel=1e-5)


def test_shards_are_the_whole_for_no_more_collectives():
    axes, token_axes, rule, _ = CASES["data"]
    batch, shards = make_batch(batch=16), axes["data"]
    # Every shard gives its part to every microbatch: an order in which these are the halves of the batch.
    order = np.arange(16).reshape(2, shards, 8 // shards).transpose(1, 0, 2).ravel()
    _, alone = pj.monitored_train_step(make_state(plan=PLAN, batch=batch, microbatches=2), batch)
    lies = NamedSharding(mesh_of(**axes), PartitionSpec(*token_axes))
    sharded = {key: jax.device_put(x[order], lies) for key, x in batch.items()}
    kwargs: dict[str, Any] = dict(batch=sharded, shardings=rule, microbatches=2, donate=False)
    state = make_state(plan=PLAN, **kwargs)
    _, many = pj.monitored_train_step(state, sharded)
    for name in NAMES:
        assert many.scalars()[name] == pytest.approx(alone.scalars()[name], rel=1e-3), name
    bare = make_state(plan=only(scan_every=2), **kwargs)
    assert count_collectives(state, "full", sharded) == count_collectives(bare, "full", sharded)


def test_a_loop_of_its_own_has_it_too():
    batch, tx = make_batch(), make_sgd()
    state = make_state(plan=PLAN, microbatches=2, tx=tx, donate=False)
    _, report = pj.monitored_train_step(state, batch)
    monitor = pj.Monitor.create(
        tx=tx, params=state.params, plan=PLAN, model=Model(), loss_fn=loss_fn, batch=batch
    )  # fmt: skip
    (_, seen), gradients = monitor.value_and_grad(state.params, batch, jax.random.key(0), scan=True, microbatches=2)
    _, own = monitor.measure(seen, gradients, state.params, state.params, state.opt_state, state.opt_state)
    for name in NAMES:
        assert own.scalars()[name] == pytest.approx(report.scalars()[name], rel=1e-4), name


def test_an_older_checkpoint_starts_its_means_anew():
    state, _ = pj.monitored_train_step(make_state(plan=PLAN, microbatches=2), make_batch())
    saved = {"monitor": state.monitor._replace(noise=None)._asdict()}
    saved |= {name: getattr(state, name) for name in ("step", "params", "frozen", "model_state", "opt_state", "key")}
    resumed = pj.restore_state(make_state(plan=PLAN, microbatches=2), saved)
    assert float(resumed.monitor.noise.trace) == 0.0
    assert float(state.monitor.noise.trace) != 0.0
    pj.monitored_train_step(resumed, make_batch())
