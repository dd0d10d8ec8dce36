"""What `TrainState.create` refuses, before a model is initialized."""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import probes_jax as pj
from probes_jax.step.loss import check_loss_fn
from tests.step.small import VOCAB, Model, NNXModel, loss_fn, make_batch, make_state, only


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"wrt": "("}, r"wrt is not a regular expression, got '\('"),
        ({"wrt": 3}, "wrt must be a regular expression or a function"),
        ({"tx": 3}, r"tx must be an optimizer such as optax.adam\(1e-3\) .* got 3"),
        ({"tx": optax.adam}, "tx must be an optimizer"),
        ({"loss_fn": 3}, r"loss_fn must be a function \(model, batch, rngs\) -> pj.Loss, got 3"),
        ({"donate": "no"}, "donate must be True or False, got 'no'"),
        ({"microbatches": 1.5}, "microbatches must be an integer of at least 1, got 1.5"),
        ({"microbatches": True}, "microbatches"),
        ({"microbatches": 0}, "microbatches"),
        ({"plan": "full"}, "plan must be a pj.Plan, got str"),
        ({"loss_scale": float("nan")}, "LossScale initial must be a positive number, got nan"),
        ({"loss_scale": jax.numpy.float32(2.0)}, "loss_scale must be None, a positive number"),
    ],
)
def test_a_mistake_names_itself_before_anything_is_computed(settings, match, monkeypatch):
    monkeypatch.setattr("probes_jax.step.state.make_core", lambda *args: pytest.fail("the model was initialized"))
    with pytest.raises((ValueError, TypeError), match=match):
        make_state(**settings)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"dynamic": "no"}, "LossScale dynamic must be True or False, got 'no'"),
        ({"dynamic": 1}, "LossScale dynamic"),
        ({"factor": "2"}, "LossScale factor must be a positive number, got '2'"),
        ({"maximum": 2.0**127}, r"LossScale maximum must be a positive number up to 2\*\*126"),
        ({"growth_interval": True}, "LossScale growth_interval must be an integer of at least 1, got True"),
    ],
)
def test_the_settings_of_a_loss_scale_name_themselves(settings, match):
    with pytest.raises(ValueError, match=match):
        pj.LossScale(**settings)


def test_complex_parameters_are_refused_by_name_and_may_be_left_out():
    class Complex(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            phase = self.param("phase", lambda key: jnp.ones((VOCAB,), jnp.complex64))
            return nn.Dense(VOCAB, name="head")(jax.nn.one_hot(tokens, VOCAB) * jnp.abs(phase))

    with pytest.raises(ValueError, match="parameter phase is complex64; only real parameters"):
        make_state(model=Complex())
    state = make_state(model=Complex(), wrt="head")
    assert list(state.frozen) == ["phase"]


def test_everything_lies_where_a_batch_on_one_device_lies():
    device = jax.devices()[3]
    batch = jax.device_put(make_batch(), device)
    state, report = pj.monitored_train_step(make_state(batch=batch), batch)
    assert {x.device for x in jax.tree.leaves(state.core)} == {device}
    assert report.scalars()["loss/mean"] > 0


def make_state_with(module, weights, key):
    return pj.TrainState.create(
        model=module,
        tx=optax.sgd(0.1),
        loss_fn=loss_fn,
        plan=only(),
        batch=make_batch(),
        variables=weights,
        rngs=key,
    )


@pytest.mark.parametrize("key", [jax.random.key, jax.random.PRNGKey])
def test_donation_takes_nothing_that_is_the_caller_s(key):
    """One key for two states, and an nnx state given as variables: both outlive the steps."""
    mine = key(3)
    module = NNXModel(nnx.Rngs(0))
    weights = nnx.state(NNXModel(nnx.Rngs(1)), nnx.Param)
    for _ in range(2):
        state = make_state_with(module, weights, mine)
        pj.monitored_train_step(state, make_batch())
    assert jax.random.uniform(mine) >= 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(nnx.to_pure_dict(weights)))


def test_the_last_step_that_int32_counts_is_no_end():
    state = dataclasses.replace(make_state(donate=False), step=np.array(2**31 - 2, np.int32))
    for _ in range(3):
        state, report = pj.monitored_train_step(state, make_batch())
    assert int(state.step) == 2**31 - 1
    assert report.scalars()["loss/mean"] > 0
    with pytest.raises(ValueError, match=r"Plan scan_every must be below 2\*\*31"):
        pj.Plan(scan_every=2**40)


def test_what_no_point_matches_is_refused():
    with pytest.raises(ValueError, match=r"include 'blokc' matches no point of this model; its points are embed,"):
        make_state(plan=only(include=("embed", "blokc")))


def test_a_word_of_exclude_that_means_no_point_is_named():
    state = make_state(plan=only("act", exclude=("blokc", "block[0..1]/up", "block/down", "block[7]")))
    _, report = pj.monitored_train_step(state, make_batch())
    idle = {name: why for name, why in report.coverage.missing if name.startswith("Plan exclude")}
    assert set(idle) == {"Plan exclude 'blokc'", "Plan exclude 'block[7]'"}
    assert all("matches no point of this model; its points are embed," in why for why in idle.values())
    assert "block[0]/norm" in report.coverage.reported
    assert not [name for name in report.coverage.seen if name.endswith(("/up", "/down"))]
    with pytest.raises(ValueError, match="exclude 'role:nrm' names no role; the roles are embedding,"):
        pj.Plan(exclude=("role:nrm",))
    assert pj.Plan(exclude=("role:mine",), roles=(("up$", "mine"),)).roles


def two(model, batch):
    return model(batch["tokens"]).mean()


def four(model, batch, rngs, alpha):
    return alpha * model(batch["tokens"]).mean()


def keyword(model, batch, *, rngs):
    return two(model, batch)


@functools.wraps(two)
def decorated(model, batch, rngs):
    return two(model, batch)


@pytest.mark.parametrize(("refused", "words"), [(two, "too many"), (four, "missing.* 'alpha'"), (keyword, "too many")])
def test_a_loss_function_of_other_arguments_is_refused_before_it_is_called(refused, words):
    params = {"w": jnp.ones(2)}
    match = rf"loss_fn must take .*\(model, batch, rngs\), and {refused.__name__}\(model, batch.*{words}"
    with pytest.raises(TypeError, match=match):
        make_state(loss_fn=refused)
    with pytest.raises(TypeError, match=match):
        pj.Monitor.create(tx=optax.sgd(0.1), params=params, model=Model(), loss_fn=refused, batch=make_batch())


TRANSFORMS = {
    "checkpoint": jax.checkpoint,
    "checkpoint twice": lambda f: jax.checkpoint(jax.checkpoint(f)),
    "remat": nnx.remat,
    "jit": jax.jit,
    "nnx.jit": nnx.jit,
    "named_call": jax.named_call,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_around_a_loss_function_takes_what_the_function_takes(name):
    refused = TRANSFORMS[name](two)
    match = r"loss_fn must take three arguments, loss_fn\(model, batch, rngs\), and two\(model, batch\) does not"
    with pytest.raises(TypeError, match=match):
        make_state(loss_fn=refused)
    check_loss_fn(TRANSFORMS[name](decorated))
    check_loss_fn(functools.wraps(refused)(lambda model, batch, rngs: refused(model, batch)))


@pytest.mark.parametrize(
    "taken",
    [functools.partial(four, alpha=2.0), decorated, lambda *args: two(*args[:2]), lambda m, b, r=None: two(m, b)],
)
def test_whatever_takes_the_three_is_taken(taken):
    assert make_state(loss_fn=taken).settings.loss_fn is taken


def test_an_error_of_the_loss_function_itself_stays_as_it_is():
    def broken(model, batch, rngs):
        return two(model, batch, rngs)

    with pytest.raises(TypeError, match=r"^two\(\) takes 2 positional arguments but 3 were given"):
        make_state(loss_fn=broken)


@pytest.mark.parametrize(
    ("returned", "match"),
    [(None, r"got None \(it ends without a return\); return pj.Loss"), ((1.0, {}), "got tuple.*aux=")],
)
def test_what_a_loss_function_returns_by_mistake(returned, match):
    def loss(model, batch, rngs):
        model(batch["tokens"])
        return returned

    with pytest.raises(TypeError, match=f"loss_fn must return pj.Loss or a float scalar, {match}"):
        make_state(loss_fn=loss)
