"""What a loss function may return, and clear words when it returns something else."""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import probes_jax as pj
from probes_jax.step.loss import check_loss
from tests.step.small import Model, make_batch, make_state, only


def ones(*shape):
    return jnp.ones(shape, jnp.float32)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (3.0, "loss_fn must return pj.Loss"),
        (ones(2), "loss_fn must return pj.Loss or a float scalar"),
        (jnp.int32(1), "float scalar"),
        (pj.Loss(nll=jnp.float32(1.0)), r"Loss nll must be float \[batch, ...\].* without pj.Loss"),
        (pj.Loss(nll=jnp.ones((2, 3), jnp.int32)), "Loss nll must be float"),
        (pj.Loss(nll=ones(2, 3), mask=ones(3)), "Loss mask has shape"),
        (pj.Loss(nll=ones(2, 3), group=jnp.zeros((2,), jnp.int32)), "Plan.groups is empty"),
        (pj.Loss(nll=ones(2), extra={"z": ones(2)}), r"extra\['z'\] must be a scalar"),
        (pj.Loss(nll=ones(2), extra={"a/b": ones()}), "Loss extra name"),
    ],
)
def test_clear_errors(loss, words):
    with pytest.raises((TypeError, ValueError), match=words):
        check_loss(loss, ())


def test_group_ids_must_be_integers():
    with pytest.raises(ValueError, match="integer ids into Plan"):
        check_loss(pj.Loss(nll=ones(2, 3), group=ones(2)), ("a",))


def test_per_example_mask_and_group_reach_every_token():
    tokens = check_loss(pj.Loss(nll=ones(2, 3), mask=jnp.array([1, 0]), group=jnp.array([0, 1])), ("a", "b"))
    np.testing.assert_array_equal(tokens.weight, [[1, 1, 1], [0, 0, 0]])
    np.testing.assert_array_equal(tokens.group, [[0, 0, 0], [1, 1, 1]])


def test_fractional_weights():
    """L is the weighted mean, tokens count those with weight above zero."""
    batch = make_batch(masked=False)
    rng = np.random.default_rng(0)
    batch["mask"] = rng.choice([0.0, 0.25, 1.0], batch["mask"].shape).astype(np.float32)
    nll = rng.random(batch["mask"].shape).astype(np.float32)
    batch["nll"] = nll

    def loss_fn(model, batch, rngs):
        return pj.Loss(nll=batch["nll"] + 0.0 * model(batch["tokens"]).sum(), mask=batch["mask"])

    state = make_state(loss_fn=loss_fn, plan=only(groups=()), batch=batch)
    _, report = pj.monitored_train_step(state, batch)
    found, weight = report.scalars(), batch["mask"].astype(np.float64)
    assert found["loss/mean"] == pytest.approx((weight * nll).sum() / weight.sum(), rel=1e-6)
    assert found["data/tokens"] == (weight > 0).sum()


def test_nan_under_the_mask_stays_there():
    batch = make_batch()
    batch["hole"] = np.where(batch["mask"] > 0, 0.0, np.nan).astype(np.float32)

    def loss_fn(model, batch, rngs):
        logits = model(batch["tokens"])
        return pj.Loss(nll=logits[..., 0] ** 2 + batch["hole"], mask=batch["mask"])

    state = make_state(loss_fn=loss_fn, plan=only(groups=()), batch=batch)
    _, report = pj.monitored_train_step(state, batch)
    found = report.scalars()
    assert np.isfinite(found["loss/mean"])
    assert found["grad/nan_count"] == 0


def test_a_batch_without_a_valid_token():
    """L absent, gradient zero, the update applied as optax would, counted as an empty step."""
    batch = make_batch()
    empty = {**batch, "mask": np.zeros_like(batch["mask"])}
    state = make_state(plan=only(scan_every=1))
    state, _ = pj.monitored_train_step(state, batch)
    before = np.array(state.params["head"]["kernel"])
    state, report = pj.monitored_train_step(state, empty)
    found = report.scalars()
    assert "loss/mean" not in found
    assert not [name for name in found if name.startswith(("loss/shard", "loss/worst", "loss/group"))]
    assert found["grad/norm"] == 0
    assert found["data/tokens"] == 0
    assert found["data/empty_steps"] == 1
    assert found["update/norm"] > 0  # Adam's momentum and decay still move
    assert not np.array_equal(before, state.params["head"]["kernel"])


@pytest.mark.parametrize("microbatches", [1, 2])
def test_skip_empty_leaves_the_state_alone(microbatches):
    batch = make_batch()
    empty = {**batch, "mask": np.zeros_like(batch["mask"])}
    state = make_state(plan=only(groups=("a", "b"), scan_every=1, skip_empty=True), microbatches=microbatches)
    state, _ = pj.monitored_train_step(state, batch)
    before = np.array(state.params["head"]["kernel"])
    state, report = pj.monitored_train_step(state, empty)
    assert report.scalars()["data/empty_steps"] == 1
    assert report.scalars()["update/norm"] == 0
    np.testing.assert_array_equal(before, state.params["head"]["kernel"])


def test_logits_that_cannot_be_found_are_absent_with_a_reason():
    def loss_fn(model, batch, rngs):
        logits = model(batch["tokens"])
        model(batch["tokens"])  # two outputs of the same width
        return pj.Loss(nll=logits[..., 0] ** 2)

    state = make_state(loss_fn=loss_fn, plan=only("logits", groups=()))
    _, report = pj.monitored_train_step(state, make_batch())
    assert not [name for name in report.scalars() if name.startswith("logits/")]
    assert any(name == "logits" and "Loss(logits=...)" in why for name, why in report.coverage.missing)


def test_an_optimizer_that_needs_more_is_refused_by_name():
    """It runs in a loop of the user's own, which `pj.Monitor` measures."""
    tx = optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(5))
    with pytest.raises(TypeError, match=r"tx cannot be called as .*value_fn"):
        make_state(tx=tx)
    params = {"w": jnp.ones(3)}
    monitor = pj.Monitor.create(tx=tx, params=params)
    before = tx.init(params)
    loss = lambda p: jnp.sum(p["w"] ** 2)  # noqa: E731
    value, gradients = jax.value_and_grad(loss)(params)
    updates, after = tx.update(gradients, before, params, value=value, grad=gradients, value_fn=loss)
    _, report = monitor.measure(value, gradients, params, optax.apply_updates(params, updates), before, after)
    assert report.scalars()["grad/norm"] == pytest.approx(np.sqrt(12))


@pytest.mark.parametrize(("microbatches", "scale"), [(1, None), (2, 8.0)])
def test_the_optimizer_is_given_the_loss(microbatches, scale):
    """`value=` is the loss that was optimized, extra terms included, unscaled: what reduce_on_plateau looks at."""

    def loss_fn(model, batch, rngs):
        nll = model(batch["tokens"])[..., 0] ** 2
        return pj.Loss(nll=nll, mask=batch["mask"], extra={"z": jnp.float32(0.5)})

    class Seen(NamedTuple):
        value: jax.Array

    keep = optax.GradientTransformationExtraArgs(
        lambda params: Seen(jnp.float32(0.0)), lambda updates, state, params=None, *, value, **_: (updates, Seen(value))
    )
    state = make_state(
        loss_fn=loss_fn,
        plan=only(groups=()),
        tx=pj.chain(("sgd", optax.sgd(0.1)), ("seen", keep), ("plateau", optax.contrib.reduce_on_plateau())),
        microbatches=microbatches,
        loss_scale=scale,
    )
    state, report = pj.monitored_train_step(state, make_batch())
    assert float(state.opt_state.stages[1].value) == pytest.approx(report.scalars()["loss/mean"] + 0.5, rel=1e-5)


def test_a_model_called_inside_a_transform_needs_its_variables():
    from tests.step.small import Model

    def checkpointed(model, batch, rngs):
        return jax.checkpoint(lambda tokens: model(tokens).mean())(batch["tokens"])

    with pytest.raises(ValueError, match="variables="):
        make_state(loss_fn=checkpointed, plan=only(groups=()))
    variables = Model().init(jax.random.key(0), make_batch()["tokens"])
    state = make_state(loss_fn=checkpointed, plan=only(groups=()), variables=variables)
    state, report = pj.monitored_train_step(state, make_batch())
    assert report.scalars()["grad/norm"] > 0
    assert report.coverage.missing  # what the transform hides is named


@pytest.mark.parametrize(
    ("plan", "microbatches"),
    [
        ({}, 1),
        ({"guard": pj.Guard(nonfinite=False, co_spike=True)}, 2),
        ({"skip_empty": True}, 1),
        ({"skip_empty": True}, 2),
    ],
)
def test_a_nan_among_the_weights_is_no_empty_batch(plan, microbatches):
    batch = make_batch(masked=False)
    batch["mask"][0, 0] = np.nan
    state = make_state(plan=only(**plan), microbatches=microbatches)
    _, report = pj.monitored_train_step(state, batch)
    found = report.scalars()
    assert np.isnan(found["loss/mean"])
    assert found["data/empty_steps"] == 0
    assert found["loss/spike/score"] == np.inf
    assert found["alert/nonfinite_steps"] == 1


def test_the_mask_is_a_constant_of_the_loss():
    """Numerator and denominator alike: the gradient of sum(m * nll) / sum(m) at constant m, in any microbatches."""

    def soft(model, batch, rngs):
        logits = model(batch["tokens"])
        return pj.Loss(nll=logits[..., 0] ** 2, mask=jax.nn.softplus(logits[..., 1]))

    def by_definition(params):
        logits = Model().apply({"params": params}, make_batch()["tokens"])
        mask = jax.lax.stop_gradient(jax.nn.softplus(logits[..., 1]))
        return (mask * logits[..., 0] ** 2).sum() / mask.sum()

    for microbatches in (1, 4):
        state = make_state(
            loss_fn=soft, plan=only(groups=()), tx=optax.sgd(1.0), microbatches=microbatches, donate=False
        )
        wanted = jax.grad(by_definition)(state.params)
        after, _ = pj.monitored_train_step(state, make_batch())
        jax.tree.map(
            lambda a, b, g: np.testing.assert_allclose(a - b, g, rtol=1e-3, atol=1e-6),
            state.params,
            after.params,
            wanted,
        )


@pytest.mark.parametrize("microbatches", [1, 8])
def test_float16_gradients_do_not_grow_with_the_number_of_tokens(microbatches):
    """The gradient of a sum over 4,096 tokens overflows float16 where that of their mean does not."""

    def loss_fn(model, batch, rngs):
        return pj.Loss(nll=jnp.square(model(batch["x"])[..., 0] - 1.0))

    class Half(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, dtype=jnp.float16, param_dtype=jnp.float16, name="dense")(x)

    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(64, 64, 4)).astype(np.float16)}
    state = make_state(
        model=Half(),
        loss_fn=loss_fn,
        plan=only(groups=()),
        batch=batch,
        tx=optax.sgd(0.1),
        microbatches=microbatches,
        loss_scale=1024.0,
    )
    _, report = pj.monitored_train_step(state, batch)
    assert 0.1 < report.scalars()["grad/norm"] < 100


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"nll": None}, "Loss nll must be an array, got NoneType"),
        ({"extra": None}, "Loss extra must be a dict of scalars by name, got NoneType"),
        ({"extra": [1.0]}, "Loss extra must be a dict"),
        ({"extra": {"z": "a"}}, r"Loss extra\['z'\] must be an array, got str"),
        ({"extra": {"z": 1j}}, r"Loss extra\['z'\] must be a float, got complex"),
        ({"logits": 1.0}, r"Loss logits must be float \[..., classes\]"),
        ({"mask": "all"}, "Loss mask must be an array, got str"),
        ({"aux": "text"}, "Loss aux must hold arrays only, got str"),
    ],
)
def test_a_wrong_field_is_named(fields, words):
    with pytest.raises((TypeError, ValueError), match=words):
        check_loss(pj.Loss(**{"nll": ones(2, 3), **fields}), ())
