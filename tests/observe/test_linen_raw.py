"""A linen module inside one of JAX's own transforms: nothing of it comes out, all of it is named, nothing leaks."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from probes_jax.observe.named import observe
from tests.observe.evaluate import assert_same, backward_rows, observed_and_plain

pytestmark = pytest.mark.slow  # together; the second pair of Python and JAX goes without

X = jnp.linspace(-1.0, 2.0, 12).reshape(3, 4)
ONE = jax.make_mesh((1,), ("one",))
P = jax.sharding.PartitionSpec


def squares(model, batch, rngs):
    return jnp.sum(jnp.square(model(batch)))


WAYS = {
    "jax.lax.cond": lambda f, x: jax.lax.cond(x[0, 0] > -9, f, lambda x: x, x),
    "jax.lax.switch": lambda f, x: jax.lax.switch(0, [f, lambda x: x], x),
    "jax.lax.scan": lambda f, x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "jax.lax.fori_loop": lambda f, x: jax.lax.fori_loop(0, 2, lambda _, x: f(x), x),
    "jax.checkpoint": lambda f, x: jax.checkpoint(f)(x),
    "jax.vmap": lambda f, x: jax.vmap(f)(x),
    "jax.jit": lambda f, x: jax.jit(f)(x),
    "jax.grad": lambda f, x: jax.grad(lambda x: jnp.sum(f(x)))(x),
    "jax.jvp": lambda f, x: jax.jvp(f, (x,), (x,))[1],
    "jax.shard_map": lambda f, x: jax.shard_map(f, mesh=ONE, in_specs=P(), out_specs=P())(x),
}


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="down")(observe("h", nn.tanh(nn.Dense(4, name="up")(x))))


MLP = ("/up", "/h", "/down", "")


class Deep(nn.Module):
    """A module in a module, made in `setup`."""

    def setup(self):
        self.mlp = Mlp()

    def __call__(self, x):
        return self.mlp(x)


class Step(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return Mlp(name="mlp")(x), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(nn.remat(Step), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return layers(name="layers")(x, None)[0]


class Lifted(nn.Module):
    """One of Flax's transforms around a module."""

    transform: str

    @nn.compact
    def __call__(self, x):
        if self.transform == "vmap":
            axes = {"variable_axes": {"params": None}, "split_rngs": {"params": False}}
            return nn.vmap(Mlp, **axes)(name="mlp")(x[None])[0]
        if self.transform == "vjp":
            return nn.vjp(lambda mlp, x: mlp(x), Mlp(name="mlp"), x)[0]
        return getattr(nn, self.transform)(Mlp)(name="mlp")(x)


class Inside(nn.Module):
    """Calls a module in a transform, perhaps outside of it as well."""

    part: nn.Module
    way: str
    before: bool = True

    @nn.compact
    def __call__(self, x):
        if self.is_initializing() or self.before:
            x = self.part(x)
        if not self.is_initializing():
            x = WAYS[self.way](lambda x: self.part(x), x)
        return nn.Dense(4, name="head")(x)


def assert_named(module, way, reported, missing):
    """What the transform hides is named, and nothing else is changed: loss and gradients are those of plain Flax.

    Args:
        module: The model.
        way: Name of the transform.
        reported: Names of the points that report.
        missing: Names of those that do not.
    """
    observed, binding, parts = observed_and_plain(module, squares, X)
    captured = observed.captured
    assert [str(point) for point in captured.points] == reported
    assert [str(point) for point in captured.missing] == missing
    for reason in captured.missing.values():
        assert reason.startswith(f"inside {way}")
        assert "pj.observe" in reason

    def plain(params):
        return jnp.sum(jnp.square(module.apply({"params": params}, X)))

    assert_same((observed.loss, observed.grads), jax.device_get(jax.jit(jax.value_and_grad(plain))(parts.params)))
    loss, grads, rows = backward_rows(binding, squares, X, parts)
    np.testing.assert_allclose(loss, observed.loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), grads, observed.grads)
    assert set(rows) == set(observed.rows)


def below(name, *parts, suffix=""):
    return [f"{name}{part}{suffix}" for part in parts]


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_module_with_children(way, before):
    seen = below("part", *MLP)
    missing = below("part", *MLP, suffix="#1" if before else "")
    assert_named(Inside(Mlp(), way, before), way, [*(seen if before else ()), "head", "output"], missing)


PARTS = {
    "made in setup": Deep(),
    **{name: Lifted(name) for name in ("jit", "fold_rngs", "remat", "vmap", "vjp")},
    "scan of remat": Scanned(),
}


@pytest.mark.parametrize("way", ["jax.checkpoint", "jax.lax.cond", "jax.vmap"])
@pytest.mark.parametrize("name", PARTS)
def test_deeper_ones_and_flax_s_transforms_inside_of_jax_s(name, way):
    if (name, way) == ("vmap", "jax.vmap"):
        pytest.skip("the same module, twice over examples: as deep as the others")
    points = [*below("part/mlp", *MLP), "part"]
    if name == "scan of remat":
        points = [*below("part/layers[*]/mlp", *MLP), "part/layers[*]", "part"]
    missing = [f"{point.replace('[*]', '')}#1" for point in points]
    assert_named(Inside(PARTS[name], way), way, [*points, "head", "output"], missing)


class Around(nn.Module):
    """Flax's scan and remat around a block that holds one of JAX's transforms."""

    way: str

    @nn.compact
    def __call__(self, x):
        def body(block, x, _):
            return block(x), None

        block = Inside(Mlp(parent=None), self.way, name="block")
        shared = {"variable_broadcast": "params", "split_rngs": {"params": False}}
        return nn.scan(nn.remat(body), **shared, length=2)(block, x, None)[0]


@pytest.mark.parametrize("way", ["jax.checkpoint", "jax.lax.cond", "jax.lax.scan"])
def test_jax_s_transforms_inside_of_flax_s(way):
    names = functools.partial(below, "block/part", *MLP)
    assert_named(Around(way), way, [*names(), "block/head", "block", "output"], names(suffix="#1"))


class Made(nn.Module):
    """A module whose children are made in a transform, and used outside of it afterwards."""

    def setup(self):
        self.mlp = Mlp()

    def __call__(self, x):
        if not self.is_initializing():
            x = jax.checkpoint(lambda x: self.mlp(x))(x)
        return self.mlp(x)


def test_a_module_first_used_in_a_transform_reports_outside_of_it():
    assert_named(Made(), "jax.checkpoint", [*below("mlp", *MLP, suffix="#1"), "output"], below("mlp", *MLP))


class Ruled(nn.Module):
    """A rule of derivation that runs the module once more, by a nested `apply`."""

    rule: str

    @nn.compact
    def __call__(self, x):
        x = Mlp(name="mlp")(x)
        if self.is_initializing():
            return x

        def run(params, x):
            return Mlp(parent=None, name="again").apply({"params": params}, x)

        f = getattr(jax, self.rule)(run)
        if self.rule == "custom_vjp":
            f.defvjp(lambda params, x: jax.vjp(run, params, x), lambda pullback, gradient: pullback(gradient))
        else:
            f.defjvp(lambda primals, tangents: jax.jvp(run, primals, tangents))
        return f(self.variables["params"]["mlp"], x)


@pytest.mark.parametrize("rule", ["custom_vjp", "custom_jvp"])
def test_a_rule_of_derivation(rule):
    way = "jax.custom_vjp or jax.custom_jvp"  # the rule runs beside the derivative: which of the two is not known
    assert_named(Ruled(rule), way, [*below("mlp", *MLP), "output"], below("again", *MLP))
