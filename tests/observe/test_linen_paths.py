"""Modules that share a path, have an odd one or none: each point has a name of its own, a value and a gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.observe.evaluate import assert_rows, evaluate_tapped, start
from tests.observe.linen_twin import squares

X = jnp.linspace(-1.0, 2.0, 12).reshape(3, 4)
TOKENS = jnp.arange(6).reshape(2, 3)


def check(module, batch, reference):
    """Compares with `reference(params, zeros)`: the loss, and the values by name with a zero added to each."""
    binding, parts = start(module, squares, (batch,))
    observed = evaluate_tapped(binding, squares, (batch,), parts)
    assert observed.captured.missing == {}
    shapes = jax.eval_shape(lambda: dict(reference(parts.params, None)[1]))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def run(zeros):
        output, values = reference(parts.params, zeros)
        return jnp.sum(jnp.square(output)), dict(values)

    (loss, values), gradients = jax.jit(jax.value_and_grad(run, has_aux=True))(dict(zeros))
    np.testing.assert_allclose(loss, observed.loss, rtol=1e-6)
    assert_rows(observed.rows, values)
    assert_rows(observed.backward, gradients)
    return list(observed.rows)


class Values(dict):
    """Values by name; each is handed on with its zero added."""

    def __init__(self, zeros):
        super().__init__()
        self.zeros = zeros or {}

    def keep(self, name, value):
        assert name not in self
        self[name] = value + self.zeros.get(name, 0.0)
        return self[name]


def dense(params, x):
    return x @ params["kernel"] + params["bias"]


class TiedHead(nn.Module):
    """A head by a nested `apply`: a fresh root with the path (), inside a checkpointed block."""

    made: bool

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(7, 4, name="embed")
        x = embed(tokens)
        return nn.remat(self.head)(self, embed.variables["params"]["embedding"], x)

    @staticmethod
    def head(module, table, x):
        embed = nn.Embed(7, 4, parent=None, name="embed" if not module.made else None)
        return embed.apply({"params": {"embedding": table}}, nn.Dense(4, name="last")(x), method="attend")


@pytest.mark.parametrize(("made", "name"), [(False, "embed.attend"), (True, "Embed.attend")])
def test_a_tied_head_in_a_checkpointed_block(made, name):
    def reference(params, zeros):
        values = Values(zeros)
        table = params["embed"]["embedding"]
        x = values.keep("embed", table[TOKENS])
        x = values.keep("last", dense(params["last"], x))
        x = values.keep(name, x @ table.T)
        return values.keep("output", x), values

    check(TiedHead(made), TOKENS, reference)


class Lora(nn.Module):
    """Adds to a layer in the layer's own scope."""

    layer: nn.Module

    def setup(self):
        nn.share_scope(self, self.layer)

    @nn.compact
    def __call__(self, x):
        a = self.param("a", nn.initializers.ones, (4, 2))
        return self.layer(x) + nn.Dense(4, name="up")(x @ a)


class UsesLora(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = Lora(nn.Dense(4, name=f"layer_{i}"))(x)
        return x


def test_modules_that_share_a_scope():
    def reference(params, zeros):
        values, x = Values(zeros), X
        for i in range(2):
            own = params[f"layer_{i}"]
            y = values.keep(f"layer[{i}]", dense(own, x))
            z = values.keep(f"layer[{i}]/up", dense(own["up"], x @ own["a"]))
            x = values.keep(f"layer[{i}]~Lora", y + z)
        return values.keep("output", x), values

    check(UsesLora(), X, reference)


class Half(nn.Module):
    """Gets a module of its parent's: by its attribute, in a list or in a dict."""

    given: nn.Module | Sequence[nn.Module] | Mapping[str, Any]

    @nn.compact
    def __call__(self, x):
        given = self.given
        given = given["layer"] if isinstance(given, Mapping) else given[0] if isinstance(given, Sequence) else given
        return nn.tanh(given(x)) + nn.Dense(4, name="own")(x)


class SharedByTwo(nn.Module):
    how: Callable[[Any], Any]

    @nn.compact
    def __call__(self, x):
        shared = nn.Dense(4, name="shared")
        x = shared(x)
        for i in range(2):
            x = Half(self.how(shared), name=f"half_{i}")(x)
        return x


@pytest.mark.parametrize("how", [lambda m: m, lambda m: [m], lambda m: {"layer": m}])
def test_a_module_called_under_two_parents(how):
    def reference(params, zeros):
        values = Values(zeros)
        x = values.keep("shared", dense(params["shared"], X))
        for i in range(2):
            y = values.keep(f"shared#{i + 1}", dense(params["shared"], x))
            z = values.keep(f"half[{i}]/own", dense(params[f"half_{i}"]["own"], x))
            x = values.keep(f"half[{i}]", jnp.tanh(y) + z)
        return values.keep("output", x), values

    check(SharedByTwo(how), X, reference)


class OddNames(nn.Module):
    """Dots, digits, slashes, brackets and blanks, and pairs that a careless rule would make equal."""

    names: tuple[str, ...] = ("h.1", "h_1", "h/1", "0", "a b", "x[0]", "x_0", "1.2_3", "layer~Dense", "=1")

    @nn.compact
    def __call__(self, x):
        for name in self.names:
            x = Outer(name=name)(x)
        return x


class Outer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="in.0")(x)


def test_odd_names():
    texts = ["h.1", "h[1]", "h%2F1", "0", "a%20b", "x%5B0%5D", "x[0]", "1.2[3]", "layer%7EDense", "=1"]

    def reference(params, zeros):
        values, x = Values(zeros), X
        for name, text in zip(OddNames().names, texts):
            x = values.keep(f"{text}/in.0", dense(params[name]["in.0"], x))
            x = values.keep(text, x)
        return values.keep("output", x), values

    check(OddNames(), X, reference)


class Lists(nn.Module):
    """Modules as attributes that were never bound, in a list, a dict, and made in setup."""

    inner: nn.Module
    several: Sequence[nn.Module]
    named: Mapping[str, nn.Module]

    def setup(self):
        self.made = [nn.Dense(4), {"deep": nn.Dense(4)}]

    def __call__(self, x):
        x = self.inner(x)
        for layer in self.several:
            x = layer(x)
        x = self.named["a"](x)
        x = self.made[0](x)
        return self._helper(self._helper(self.made[1]["deep"](x)))

    def _helper(self, x):
        return nn.tanh(self.inner(x))


def test_modules_in_attributes_lists_and_dicts():
    module = Lists(nn.Dense(4), [nn.Dense(4), nn.Dense(4)], {"a": nn.Dense(4)})

    def reference(params, zeros):
        values, x = Values(zeros), X
        order = ["inner", "several_0", "several_1", "named_a", "made_0", "made_1_deep"]
        for name in order:
            text = name.replace("_0", "[0]").replace("several_1", "several[1]")
            x = values.keep(text, dense(params[name], x))
        for call in (1, 2):
            x = jnp.tanh(values.keep(f"inner#{call}", dense(params["inner"], x)))
        return values.keep("output", x), values

    check(module, X, reference)


class Chosen(nn.Module):
    """Methods that return other things than float arrays, or a part of them."""

    def setup(self):
        self.layer = nn.Dense(4)

    def __call__(self, x):
        scale, ids, nothing, function = self.width(), self.ids(x), self.nothing(), self.function()
        assert nothing is None
        pair = self.pair(x)
        return function(pair["y"][1] * scale) + ids[:, None]

    def width(self):
        return 4

    def ids(self, x):
        return jnp.arange(x.shape[0])

    def nothing(self):
        return None

    def function(self):
        return lambda x: jnp.tanh(x)

    def pair(self, x):
        return {"y": (self.ids(x), self.layer(x)), "name": "a string", "z": None, "n": 3, "f": 2.5}


def test_outputs_of_every_kind():
    def reference(params, zeros):
        values = Values(zeros)
        y = values.keep("layer", dense(params["layer"], X))
        y = values.keep("output.pair", y)
        return values.keep("output", jnp.tanh(y * 4) + jnp.arange(3)[:, None]), values

    check(Chosen(), X, reference)


class PassesModules(nn.Module):
    """Hands a bound module to a checkpointed method of another one, and to a scanned function."""

    @nn.compact
    def __call__(self, x):
        shared = nn.Dense(4, name="shared")
        x = shared(x)
        x = nn.remat(Takes)(name="takes")(shared, x)
        options = {"variable_broadcast": "params", "split_rngs": {"params": False}, "length": 2}
        return nn.scan(lambda module, x, _: (nn.tanh(module(x)), None), **options)(shared, x, None)[0]


class Takes(nn.Module):
    @nn.compact
    def __call__(self, module, x):
        return nn.Dense(4, name="own")(nn.tanh(module(x)))


def test_modules_that_are_arguments_of_transforms():
    def reference(params, zeros):
        values = Values(zeros)
        x = values.keep("shared", dense(params["shared"], X))
        x = jnp.tanh(values.keep("shared#1", dense(params["shared"], x)))
        x = values.keep("takes", values.keep("takes/own", dense(params["takes"]["own"], x)))
        zero, steps = values.zeros.get("shared#2", jnp.zeros((2, *x.shape))), []
        for step in range(2):
            steps.append(dense(params["shared"], x) + zero[step])
            x = jnp.tanh(steps[-1])
        values["shared#2"] = jnp.stack(steps)
        return values.keep("output", x), values

    check(PassesModules(), X, reference)
