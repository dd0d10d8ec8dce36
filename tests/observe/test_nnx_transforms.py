"""The table of nnx transforms in docs/guide.md, row by row: what is reported, what is named, and nothing is changed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.observe.evaluate import assert_same, evaluate_tapped, observed_and_plain
from tests.observe.nnx_transformed import linear

X = jnp.linspace(-1.0, 2.0, 12).reshape(3, 4)
ONE = jax.make_mesh((1,), ("one",))
P = jax.sharding.PartitionSpec
FEW = {"graph_updates": False}


def squares(model, batch, rngs):
    return jnp.sum(jnp.square(model(batch)))


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = linear(rngs), linear(rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def call(part, x):
    return part(x)


def total(part, x):
    return part(x).sum()


def ones_like(tree):
    return jax.tree.map(jnp.ones_like, tree)


def ruled(function=call, **options):
    """As in Flax's docstring: the forward rule calls the function, the gradient has the structure that is known."""
    f = nnx.custom_vjp(function, **options)

    def gradient(part):
        return ones_like(nnx.clone(part) if options else nnx.state(part))

    def backward(part, g):
        return gradient(part), g if options else g[1]

    f.defvjp(lambda part, x: (f(part, x), part), backward)
    return f


def rule_of_jax(part, x):
    """A gradient written by hand for split state."""
    graphdef, state = nnx.split(part)
    f = jax.custom_vjp(lambda state, x: nnx.merge(graphdef, state)(x))
    dense = {"kernel": nnx.Param(jnp.ones((4, 4))), "bias": nnx.Param(jnp.ones(4))}
    gradient = nnx.State({"up": dense, "down": dense})
    f.defvjp(lambda state, x: (f(state, x), None), lambda _, g: (gradient, g))
    return f(state, x)


def rule_of_vjp(part, x):
    """The forward rule is that of `jax.vjp`."""

    def run(state, x):
        return nnx.merge(graphdef, state)(x)

    graphdef, state = nnx.split(part)
    f = jax.custom_vjp(run)
    f.defvjp(lambda state, x: jax.vjp(run, state, x), lambda pullback, g: pullback(g))
    return f(state, x)


def loop(part, x):
    carry = (part, x, 0)
    found = nnx.while_loop(lambda c: c[2] < 2, lambda c: (c[0], c[0](c[1]), c[2] + 1), carry)
    return jax.lax.stop_gradient(found[1])


THERE_AND_BACK = {
    "nnx.jit": lambda part, x: nnx.jit(call)(part, x),
    "nnx.jit, no updates": lambda part, x: nnx.jit(call, **FEW)(part, x),
    "nnx.cached_partial": lambda part, x: nnx.cached_partial(nnx.jit(call), part)(x),
    "nnx.remat": lambda part, x: nnx.remat(call)(part, x),
    "nnx.vmap": lambda part, x: nnx.vmap(call, in_axes=(None, 0))(part, x),
    "nnx.scan": lambda part, x: nnx.scan(call, in_axes=(None, 0), out_axes=0)(part, x),
    "nnx.shard_map": lambda part, x: nnx.shard_map(call, mesh=ONE, in_specs=(P(), P()), out_specs=P())(part, x),
    "nnx.cond": lambda part, x: nnx.cond(x[0, 0] > -9, call, lambda part, x: x, part, x),
    "nnx.cond, no updates": lambda part, x: nnx.cond(x[0, 0] > -9, call, lambda part, x: x, part, x, **FEW),
    "nnx.switch": lambda part, x: nnx.switch(0, [call, lambda part, x: x], part, x),
    "jax.lax.cond": lambda part, x: jax.lax.cond(x[0, 0] > -9, part, lambda x: x, x),
    "jax.checkpoint": lambda part, x: jax.checkpoint(part)(x),
}
VALUES_ONLY = {
    "nnx.grad": lambda part, x: x + nnx.grad(total, argnums=1)(part, x),
    "nnx.grad, of a module": lambda part, x: x + nnx.grad(total)(part, x)["up"]["kernel"].sum(),
    "nnx.value_and_grad": lambda part, x: x + sum(nnx.value_and_grad(total, argnums=1)(part, x)),
    "nnx.vjp": lambda part, x: nnx.vjp(call, part, x, **FEW)[0],
    "nnx.vjp, back": lambda part, x: nnx.vjp(call, part, x, **FEW)[1](x)[1],
    "nnx.vjp, as a tree": lambda part, x: nnx.vjp(call, part, x, graph=False)[0],
}
# What mends it is part of the reason.
MISSING = {
    "nnx.jvp": (lambda part, x: nnx.jvp(call, (part, x), (part, x), **FEW)[1], "used in jax.jvp"),
    "nnx.while_loop": (loop, "make a loop a scan"),
    "nnx.fori_loop": (
        lambda part, x: nnx.fori_loop(0, 2, lambda _, c: (c[0], c[0](c[1])), (part, x))[1],
        "make a loop a scan",
    ),
    "nnx.custom_vjp": (ruled(), "used in nnx.custom_vjp"),
    "nnx.custom_vjp, no updates": (ruled(**FEW), "used in nnx.custom_vjp"),
    "nnx.custom_vjp, as a tree": (ruled(graph=False), "used in nnx.custom_vjp"),
    "nnx.custom_vjp in nnx.jit": (lambda part, x: nnx.jit(RULED)(part, x), "used in nnx.custom_vjp"),
    "nnx.custom_vjp in nnx.remat": (lambda part, x: nnx.remat(RULED)(part, x), "used in nnx.custom_vjp"),
    "nnx.custom_vjp, part in nnx.jit": (lambda part, x: RULED(part, nnx.jit(call)(part.up, x)), "nnx.custom_vjp"),
    "jax.custom_vjp": (rule_of_jax, "used in jax.custom_vjp"),
    "jax.custom_vjp of jax.vjp": (rule_of_vjp, "used in jax.custom_vjp"),
    "jax.jit": (lambda part, x: jax.jit(part)(x), "pass the module to nnx.jit"),
    "jax.grad": (lambda part, x: jax.grad(lambda x: total(part, x))(x), "pass the module to nnx.grad"),
    "jax.lax.fori_loop": (lambda part, x: jax.lax.fori_loop(0, 2, lambda _, x: part(x), x), "make it a jax.lax.scan"),
}
RULED = ruled()
WAYS = {**THERE_AND_BACK, **VALUES_ONLY, **{name: way for name, (way, _) in MISSING.items()}}
PARTS = ["part/up", "part/down", "part"]


class Model(nnx.Module):
    """A module with children in a transform, beside one that is in none."""

    def __init__(self, way, rngs):
        self.way = way
        self.part, self.head = Mlp(rngs), linear(rngs)

    def __call__(self, x):
        return self.head(WAYS[self.way](self.part, x))


def evaluated(model):
    """With taps; loss and gradients of the plain model are those of the observed one, bit for bit without taps."""
    observed, binding, parts = observed_and_plain(model, squares, X)

    def plain(params):
        return squares(binding.module(params, parts.state, copy=False), X, None)

    loss, grads = jax.device_get(jax.jit(jax.value_and_grad(plain))(parts.params))
    assert_same(loss, observed.loss)
    tapped = evaluate_tapped(binding, squares, X, parts)
    np.testing.assert_allclose(tapped.loss, loss, rtol=1e-6)
    for found in (tapped.grads, observed.grads):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, grads)
    reported = [str(point) for point in tapped.captured.points]
    return reported, {str(point): why for point, why in tapped.captured.missing.items()}, tapped.backward


@pytest.mark.parametrize("way", THERE_AND_BACK)
def test_values_and_gradients(way):
    reported, missing, backward = evaluated(Model(way, nnx.Rngs(0)))
    assert reported == [*PARTS, "head", "output"]
    assert missing == {}
    assert all(backward[name]["count"] == X.size for name in reported)


@pytest.mark.parametrize("way", VALUES_ONLY)
def test_values_alone(way):
    reported, missing, backward = evaluated(Model(way, nnx.Rngs(0)))
    assert reported == [*PARTS, "head", "output"]
    assert list(missing) == [f"grad_act/{name}" for name in PARTS]
    assert all("whose backward pass is its own" in reason for reason in missing.values())
    assert {name for name, row in backward.items() if row["count"]} == {"head", "output"}


@pytest.mark.parametrize("way", MISSING)
def test_what_is_named(way):
    reported, missing, backward = evaluated(Model(way, nnx.Rngs(0)))
    assert reported == ["head", "output"]
    assert {name.partition("#")[0] for name in missing} == set(PARTS)
    assert all(MISSING[way][1] in reason and "pj.observe(name, x)" in reason for reason in missing.values())
    assert set(backward) == {"head", "output"}


@nnx.custom_vjp
def up_of(model, x):
    return model.up(x)


up_of.defvjp(lambda model, x: (up_of(model, x), model), lambda model, g: (ones_like(nnx.state(model)), g[1]))


class Block(nnx.Module):
    """Hands itself to a rule that calls one part of it; another part is in `nnx.jit`."""

    def __init__(self, rngs):
        self.up, self.down = linear(rngs), linear(rngs)

    def __call__(self, x):
        return nnx.jit(call)(self.down, up_of(self, x))


class Blocks(nnx.Module):
    def __init__(self, rngs):
        self.block, self.jitted = Block(rngs), linear(rngs)

    def __call__(self, x):
        return nnx.jit(call)(self.jitted, self.block(x))


def test_a_rule_costs_only_the_module_that_it_is_handed():
    reported, missing, _ = evaluated(Blocks(nnx.Rngs(0)))
    assert reported == ["block", "jitted", "output"]
    assert set(missing) == {"block/up", "block/down"}
    assert all("used in nnx.custom_vjp" in reason for reason in missing.values())
