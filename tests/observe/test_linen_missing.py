"""What cannot be observed in a linen model is named, with the reason, and the model runs as it would."""

from __future__ import annotations

import contextlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from probes_jax.observe.wrap import wrap
from probes_jax.stats.moments import summarize_magnitude
from tests.observe.evaluate import (
    assert_rows,
    backward_rows,
    evaluate_tapped,
    observed_and_plain,
    start,
)

X = jnp.linspace(-1.0, 2.0, 12).reshape(3, 4)


def mean_output(model, batch, rngs):
    return jnp.sum(jnp.square(model(batch)))


class Branches(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer, other = nn.Dense(4, name="layer"), nn.Dense(4, name="other")
        both = layer(x) + other(x)  # so that the parameters exist before the branches

        def first(module, x):
            return layer(x)

        def second(module, x):
            return nn.tanh(other(layer(x)))

        return both + nn.cond(x[0, 0] > 0, first, second, self, x)


class Looped(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(4, name="layer")
        x = layer(x)
        carry = (0, x)
        return nn.while_loop(
            lambda m, c: c[0] < 2, lambda m, c: (c[0] + 1, nn.Dense(4, name="layer")(c[1])), self, carry
        )[1]


def names(captured):
    return [str(point) for point in captured.points], {str(p): reason for p, reason in captured.missing.items()}


def test_branches_are_named_and_the_rest_reports():
    observed, _, _ = observed_and_plain(Branches(), mean_output, X)
    present, missing = names(observed.captured)
    assert present == ["layer", "other", "output"]
    assert set(missing) == {"layer#1", "other#1"}  # the layer is in both branches, and runs in one
    assert "nn.cond" in missing["layer#1"]
    assert "move the module out" in missing["layer#1"]


class Unseen(nn.Module):
    """A layer used outside of a transform, and then inside of it."""

    kind: str

    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(4, name="layer")
        return x + getattr(self, self.kind)(layer, layer(x))

    @nn.nowrap
    def switch(self, layer, x):
        branches = [lambda module, x: nn.tanh(module(x)), lambda module, x: module(x), lambda module, x: x]
        return nn.switch(jnp.int32(x[0, 0] > 0), branches, layer, x)

    @nn.nowrap
    def custom_vjp(self, layer, x):
        def forward(module, x):
            y, pullback = nn.vjp(lambda module, x: module(x), module, x)
            return y, pullback

        def backward(pullback, gradient):
            of_params, *rest = pullback(gradient)
            return (jax.tree.map(jnp.sign, of_params), *rest)

        return nn.custom_vjp(lambda module, x: module(x), forward, backward)(layer, x)


@pytest.mark.parametrize("kind", ["switch", "custom_vjp"])
def test_what_cannot_be_observed_is_named_with_the_transform_and_the_line_that_mends_it(kind):
    observed, binding, parts = observed_and_plain(Unseen(kind), mean_output, X)
    present, missing = names(observed.captured)
    assert present == ["layer", "output"]
    assert set(missing) - {"layer#2"} == {"layer#1"}  # a branch, or a rule, is one more call
    for reason in missing.values():
        assert f"inside nn.{kind}" in reason
        assert f"observe what nn.{kind} returns: pj.observe(name, x)" in reason
    loss, grads, rows = backward_rows(binding, mean_output, X, parts)
    assert set(rows) == {"layer", "output"}
    np.testing.assert_allclose(loss, observed.loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), grads, observed.grads)


def test_a_loop_of_unknown_length_is_named():
    binding, parts = start(Looped(), mean_output, X)
    bound = binding.bind(parts.params, {}, measure=summarize_magnitude)
    np.testing.assert_array_equal(bound(X), Looped().apply({"params": parts.params}, X))
    present, missing = names(bound.finish())
    assert present == ["layer", "output"]
    assert set(missing) == {"layer#1"}
    assert "nn.while_loop" in missing["layer#1"]


class Derivative(nn.Module):
    """A layer inside a derivative that the model itself takes."""

    kind: str

    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(4, name="layer")
        y = nn.tanh(layer(x))
        if self.kind == "vjp":
            z, pullback = nn.vjp(lambda module, x: nn.tanh(module(x)), layer, y)
            return z + pullback(jnp.ones_like(z))[1]
        if self.kind == "jvp":
            return sum(nn.jvp(lambda module, x: nn.tanh(module(x)), layer, (y,), (jnp.ones_like(y),), {}))
        energy, (force,) = nn.value_and_grad(lambda module, x: nn.tanh(module(x)).sum(), layer, y)
        return energy + force


@pytest.mark.parametrize("kind", ["vjp", "jvp", "value_and_grad"])
def test_values_inside_a_derivative_are_seen_and_their_gradients_are_named(kind):
    observed, binding, parts = observed_and_plain(Derivative(kind), mean_output, X)
    first = np.asarray(X @ parts.params["layer"]["kernel"])
    second = np.asarray(np.tanh(first) @ parts.params["layer"]["kernel"])
    output = Derivative(kind).apply({"params": parts.params}, X)
    assert_rows(observed.rows, {"layer": first, "layer#1": second, "output": output})
    assert observed.captured.missing == {}
    tapped = evaluate_tapped(binding, mean_output, X, parts)
    np.testing.assert_allclose(tapped.loss, observed.loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), tapped.grads, observed.grads)
    assert {name for name, row in tapped.backward.items() if row["count"]} == {"layer", "output"}
    _, missing = names(tapped.captured)
    assert set(missing) == {"grad_act/layer#1"}
    assert f"observe what nn.{kind} returns" in missing["grad_act/layer#1"]


class OnlyParamsJit(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.jit(nn.Dense, variables="params")(4, name="layer")(x)


def test_a_transform_that_does_not_carry_new_variables():
    observed, _, _ = observed_and_plain(OnlyParamsJit(), mean_output, X)
    present, missing = names(observed.captured)
    assert present == ["output"]
    assert "variables=True" in missing["layer"]


class RawTransform(nn.Module):
    """A JAX transform inside the model, around a nested `apply` and around a bound submodule."""

    def setup(self):
        self.layer = nn.Dense(4)

    def __call__(self, x):
        x = self.layer(x)
        variables = self.layer.variables
        x = jax.checkpoint(lambda x: self.layer.apply(variables, x))(x)
        return jax.checkpoint(lambda x: self.layer(x))(x) if not self.is_initializing() else x


def test_a_raw_jax_transform_leaks_nothing_and_is_named():
    observed, _, _ = observed_and_plain(RawTransform(), mean_output, X)
    present, missing = names(observed.captured)
    assert present == ["layer", "output"]
    assert set(missing) == {"layer#1", "layer#2"}
    assert all("inside jax.checkpoint" in reason and "nn.remat" in reason for reason in missing.values())


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="layer")(x)


class Batched(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(x)


@pytest.mark.parametrize("transform", [jax.checkpoint, jax.vmap])
def test_a_model_called_inside_a_transform_in_the_loss_function(transform):
    def loss_fn(model, batch, rngs):
        return jnp.sum(model(batch)) + jnp.sum(transform(model)(batch))

    observed, _, _ = observed_and_plain(Plain(), loss_fn, X)
    present, missing = names(observed.captured)
    assert present == ["layer", "output"]
    assert set(missing) == {"layer#1", "output#1"}
    assert "loss_fn" in missing["output#1"]
    assert len(observed.outputs) == 1


def test_a_model_first_called_inside_a_transform_says_so():
    with pytest.raises(ValueError, match="first called inside jax.checkpoint in loss_fn"):
        wrap(Plain()).init(lambda model, batch, rngs: jnp.sum(jax.checkpoint(model)(batch)), X, jax.random.key(0))


def test_state_that_could_not_be_carried_is_an_error_of_flax_not_a_silent_loss():
    binding, parts = start(Batched(), mean_output, X)
    bound = binding.bind(parts.params, parts.state)
    with pytest.raises(Exception, match="immutable"):
        jax.checkpoint(bound)(X)


def test_values_lost_without_lift_s_inner_functions_are_still_named(monkeypatch):
    monkeypatch.setattr("probes_jax.observe.linen_lift.patched", lambda patches: contextlib.nullcontext())

    observed, _, _ = observed_and_plain(Scanned(), mean_output, X)
    present, missing = names(observed.captured)
    assert present == ["output"]
    assert {name.removesuffix("#1") for name in missing} == {"layers", "layers/mlp"}  # traced twice


class Body(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(4, name="mlp")(x), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.scan(Body, {"params": 0}, split_rngs={"params": True}, length=2)(name="layers")(x, None)[0]
