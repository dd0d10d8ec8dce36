"""JAX transforms in the loss function, around calls of the model: everything is seen, as without them."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import checkpoint as remat

import probes_jax as pj
from probes_jax.observe.evaluation import Evaluation
from probes_jax.observe.named import LossObserver, observing
from probes_jax.observe.record import slots_like
from probes_jax.stats.moments import summarize_magnitude
from tests.observe.evaluate import (
    assert_rows,
    assert_same,
    evaluate,
    evaluate_tapped,
    rows_of,
    start,
)

pytestmark = pytest.mark.slow  # together; the second pair of Python and JAX goes without

X = jnp.linspace(-1.0, 2.0, 24).reshape(6, 4)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + pj.observe("inner", jnp.tanh(nn.Dense(4, name="dense")(x))), None


class Linen(nn.Module):
    def setup(self):
        layers = nn.scan(nn.remat(Layer), {"params": 0}, split_rngs={"params": True}, length=2)
        self.encoder, self.layers, self.head = nn.Dense(4), layers(), nn.Dense(2)

    def __call__(self, x):
        return self.head(self.layers(self.encoder(x), None)[0])


class NNXLayer(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return x + pj.observe("inner", jnp.tanh(self.dense(x)))


class NNX(nnx.Module):
    def __init__(self, rngs):
        self.encoder, self.head = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)
        self.layers = nnx.split_rngs(splits=2)(nnx.vmap(NNXLayer))(rngs)

    def __call__(self, x):
        graph, layers = nnx.split(self.layers)
        x, _ = jax.lax.scan(lambda x, state: (nnx.merge(graph, state)(x), None), self.encoder(x), layers)
        return self.head(x)


MODELS = {"linen": Linen, "nnx": lambda: NNX(nnx.Rngs(0))}


def squares(model, x):
    return jnp.sum(jnp.square(model(x)))


def scanned(model, x):
    return jax.lax.scan(lambda total, x: (total + squares(model, x), None), 0.0, x.reshape(3, 2, 4))[0]


def nested(model, x):
    def half(x):
        return jax.lax.map(lambda x: jax.checkpoint(functools.partial(squares, model))(x), x.reshape(3, 1, 4))

    return jnp.sum(jax.vmap(half)(x.reshape(2, 3, 4)))


TRANSFORMS = {
    "vmap": lambda model, x: jnp.sum(jax.vmap(lambda x: squares(model, x))(x)),
    "vmap over another axis": lambda model, x: jnp.sum(jax.vmap(model, in_axes=1, out_axes=1)(x[:, None]) ** 2),
    "checkpoint": lambda model, x: jnp.sum(jnp.square(remat(model)(x))),
    "scan": scanned,
    "map": lambda model, x: jnp.sum(jax.lax.map(lambda x: squares(model, x), x, batch_size=2)),
    "nested": nested,
}
PREPARE = functools.cache(lambda name: start(MODELS[name](), lambda model, x, rngs: squares(model, x), X))


def unrolled(params, x):
    """The value of every point, and the gradient that comes back to it."""
    stack = params["layers"]["dense"]

    def run(added):
        values = {}

        def point(name, value):
            values[name] = value + added.get(name, 0.0)
            return values[name]

        h = point("encoder", x @ params["encoder"]["kernel"] + params["encoder"]["bias"])
        for layer in range(2):
            y = point(f"layers[{layer}]/dense", h @ stack["kernel"][layer] + stack["bias"][layer])
            h = point(f"layers[{layer}]", h + point(f"layers[{layer}]/inner", jnp.tanh(y)))
        h = point("head", h @ params["head"]["kernel"] + params["head"]["bias"])
        return jnp.sum(jnp.square(point("output", h))), values

    zeros = jax.tree.map(jnp.zeros_like, run({})[1])
    gradients, values = jax.grad(run, has_aux=True)(zeros)
    return values, gradients


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_every_point_has_the_values_and_gradients_of_one_call(name, transform):
    binding, parts = PREPARE(name)
    tapped = evaluate_tapped(binding, loss_of(transform), X, parts)
    assert not tapped.captured.missing
    values, gradients = unrolled(parts.params, X)
    assert_rows(tapped.rows, values)
    assert_rows(tapped.backward, gradients)
    assert not tapped.outputs


def loss_of(transform):
    return lambda model, batch, rngs: TRANSFORMS[transform](model, batch)


@pytest.mark.optimized
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("transform", ["vmap", "nested"])
def test_loss_and_gradients_do_not_differ_in_a_bit(name, transform):
    binding, parts = PREPARE(name)
    observed, plain = (evaluate(binding, loss_of(transform), X, parts, m) for m in (summarize_magnitude, None))
    assert_same((observed.loss, observed.grads, observed.state), (plain.loss, plain.grads, plain.state))
    assert len(observed.rows) == 9
    assert jax.tree.structure(observed.state) == jax.tree.structure(parts.state)


def mixed(model, x):
    """Outside, inside, a part of the model, what has nothing to observe in it, and a branch."""
    total = squares(model, x) + jax.lax.scan(lambda total, x: (total + jnp.sum(x), None), 0.0, x)[0]
    total += jnp.sum(jax.vmap(lambda x: jnp.sum(model.encoder(x) * model.encoder(2.0 * x)))(x))
    total += jax.lax.cond(x[0, 0] > 0, jnp.sum, lambda x: 2.0 * jnp.sum(x), x)
    return total + jax.lax.cond(x[0, 0] < 0, lambda x: jnp.sum(3.0 * model.encoder(x)), lambda x: squares(model, x), x)


@pytest.mark.parametrize("name", MODELS)
def test_calls_outside_and_inside_are_numbered_in_their_order(name):
    binding, parts = PREPARE(name)
    tapped = evaluate_tapped(binding, lambda model, batch, rngs: mixed(model, batch), X, parts)
    assert not tapped.captured.missing
    assert len(tapped.outputs) == 1
    values, _ = unrolled(parts.params, X)

    def encoder(x):
        return x @ parts.params["encoder"]["kernel"] + parts.params["encoder"]["bias"]

    more = {"encoder#1": encoder(X), "encoder#2": encoder(2.0 * X), "encoder#3": encoder(X)}
    assert_rows({name: row for name, row in tapped.rows.items() if row["count"]}, {**values, **more})
    gradients = {"encoder#1": encoder(2.0 * X), "encoder#2": encoder(X), "encoder#3": jnp.full((6, 4), 3.0)}
    assert_rows({name: tapped.backward[name] for name in gradients}, gradients)
    untaken = {name for name, row in tapped.rows.items() if not row["count"]}
    assert untaken == {name for name in tapped.rows if name.endswith(("#4", "#1", "#1[0]"))} - {"encoder#1"}


def measured(loss_fn, x, slots=()):
    evaluation = Evaluation(slots)
    own = LossObserver(summarize_magnitude, evaluation)
    with observing(own), evaluation.around(loss_fn):
        loss = loss_fn(x)
    return loss, evaluation.raw, own


def test_values_that_the_loss_function_names_inside():
    def loss_fn(x):
        def one(x):
            return jnp.sum(jax.checkpoint(lambda x: pj.observe("squared", x**2))(pj.observe("x", x)))

        return jnp.sum(jax.vmap(one)(x)) + jax.lax.scan(lambda total, x: (total + 5.0 * one(x), None), 0.0, x)[0]

    _, raw, own = measured(loss_fn, X)
    points = own.result().points
    rows = rows_of(points, points.values())
    assert_rows(rows, {f"loss_fn/{n}": v for n, v in (("x", X), ("squared", X**2), ("x#1", X), ("squared#1", X**2))})
    found = {}

    def tapped(slots):
        loss, _, found["own"] = measured(loss_fn, X, slots)
        return loss

    points = found["own"].backward(gradient) if (gradient := jax.grad(tapped)(slots_like(raw))) else {}
    ones = jnp.ones_like(X)
    expected = {"x": 2.0 * X, "squared": ones, "x#1": 10.0 * X, "squared#1": 5.0 * ones}
    assert_rows(rows_of(points, points.values()), {f"loss_fn/{name}": value for name, value in expected.items()})


@pytest.mark.parametrize("name", MODELS)
def test_what_does_not_come_out_is_named(name):
    binding, parts = PREPARE(name)
    before = jax.vmap

    def loss_fn(model, batch, rngs):
        return squares(model, batch) + jnp.sum(jax.jit(jax.vmap(model))(batch))

    observed = evaluate(binding, loss_fn, X, parts)
    values, _ = unrolled(parts.params, X)
    assert_rows(observed.rows, values)
    missing = {str(point): reason for point, reason in observed.captured.missing.items()}
    assert {name.removesuffix("#1") for name in missing} >= {"encoder", "head", "output"}
    assert all("apply jax.vmap, jax.checkpoint or jax.lax.scan in loss_fn itself" in why for why in missing.values())
    assert jax.vmap is before


class Counting(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.dropout = nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.dense(x))


def test_a_module_that_changes_inside_fails_as_without_observation():
    binding, parts = start(Counting(nnx.Rngs(0)), lambda model, x, rngs: squares(model, x), X)
    for measure in (summarize_magnitude, None):
        with pytest.raises(Exception, match="different trace level"):
            evaluate(binding, loss_of("vmap"), X, parts, measure)


def test_a_scan_without_an_iteration_measures_nothing():
    def loss(model, x, rngs):
        return squares(model, x) + jax.lax.scan(lambda total, x: (total + squares(model, x), None), 0.0, x[:0])[0]

    binding, parts = PREPARE("nnx")
    rows = evaluate(binding, loss, X, parts).rows
    assert (rows["output"]["count"], rows["output#1"]["count"]) == (12.0, 0.0)
