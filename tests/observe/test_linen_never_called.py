"""A module that holds parameters and is never called is named: its absence must not read as a zero or as nothing."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from probes_jax.observe.census import NEVER_CALLED, find_uncalled
from probes_jax.observe.named import observe
from probes_jax.observe.wrap import wrap
from probes_jax.stats.moments import summarize_magnitude
from tests.observe.evaluate import KEY, make_step

X = jnp.linspace(-1.0, 2.0, 12).reshape(3, 4)


def loss_fn(model, batch, rngs):
    return jnp.sum(jnp.square(model(batch)))


def traced(module):
    """Names of what reported, and what is missing; nothing is computed."""
    binding = wrap(module)
    parts = jax.eval_shape(lambda key: binding.init(loss_fn, X, key), KEY)
    step, traces = make_step(binding, loss_fn)
    jax.eval_shape(step, parts.params, parts.state, X, KEY)
    captured = traces[-1]
    return {str(point) for point in captured.points}, {str(point): why for point, why in captured.missing.items()}


class Matrix(nn.Module):
    """Its kernel is used, its call is not."""

    def setup(self):
        self.kernel = self.param("kernel", nn.initializers.lecun_normal(), (4, 4))

    def __call__(self, x):
        return x @ self.kernel

    def _private(self, x):
        return x @ self.kernel


class Kernel(nn.Module):
    """Uses a submodule's kernel in one of several ways."""

    how: str

    def setup(self):
        self.used = nn.Dense(4)
        self.unused = Matrix()

    def __call__(self, x):
        x = self.used(x)
        if self.is_initializing():
            return self.unused(x)
        if self.how == "attribute":
            return x @ self.unused.kernel
        if self.how == "private":
            return self.unused._private(x)
        if self.how == "variables":
            return jax.checkpoint(lambda kernel: x @ kernel)(self.variables["params"]["unused"]["kernel"])
        if self.how == "observed":
            return observe("unused", x @ self.unused.kernel)
        return x


@pytest.mark.parametrize("how", ["attribute", "private", "variables", "nothing"])
def test_a_module_whose_kernel_is_used_directly_is_named(how):
    reported, missing = traced(Kernel(how))
    assert reported == {"used", "output"}
    assert missing == {"unused": NEVER_CALLED}
    assert "never called" in NEVER_CALLED
    assert "pj.observe" in NEVER_CALLED


def test_the_line_that_mends_it():
    assert traced(Kernel("observed")) == ({"used", "unused", "output"}, {})


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = nn.Dense(4, name=f"layers_{i}")(x)
        return x


class Halves(nn.Module):
    """Of a whole encoder nothing is called; of a decoder one layer is."""

    def setup(self):
        self.encoder = Inner()
        self.decoder = Pair()
        self.list = [nn.Dense(4), nn.Dense(4)]

    def __call__(self, x):
        if self.is_initializing():
            x = self.list[1](self.decoder(self.encoder(x)))
        return self.list[0](self.decoder.first(x))


class Pair(nn.Module):
    def setup(self):
        self.first, self.second = nn.Dense(4), nn.Dense(4)
        self.scale = self.param("scale", nn.initializers.ones, ())

    def __call__(self, x):
        return self.second(self.first(x)) * self.scale


def test_the_outermost_module_is_named():
    reported, missing = traced(Halves())
    assert set(missing) == {"encoder", "decoder", "decoder/second", "list[1]"}
    assert reported == {"decoder/first", "list[0]", "output"}


class Ordinary(nn.Module):
    """Parameters that belong to a module that was called, however they lie in the tree."""

    jit: bool = False

    @nn.compact
    def __call__(self, x):
        own = nn.jit(OwnParameters) if self.jit else OwnParameters
        for i in range(2):
            x = own(name=f"own_{i}")(x)
        x = nn.WeightNorm(nn.Dense(4), name="normed")(x)
        x = Lora(nn.Dense(4), name="lora")(x)
        x = nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(4)])(x)
        x = nn.scan(Iterated, {"params": 0}, split_rngs={"params": True}, length=2)(name="layers")(x, None)[0]
        table = nn.Dense(4, name="tied")
        x = table(x) if self.is_initializing() else x
        return nn.Dense(4, parent=None).apply({"params": self.variables["params"]["tied"]}, x)


class Iterated(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return OwnParameters(name="own")(x), None


class OwnParameters(nn.Module):
    """A parameter that is a tree, the parameters of a module made by hand, and a method that returns no array."""

    @nn.compact
    def __call__(self, x):
        tree = self.param("tree", lambda key: {"scale": jnp.ones(4), "more": {"bias": jnp.zeros(4)}})
        layer = nn.Dense(4, parent=None)
        weights = self.param("experts", lambda key: layer.init(key, x)["params"])
        x = layer.apply({"params": weights}, x) * tree["scale"] + tree["more"]["bias"]
        return Number(name="number").value() * x


class Number(nn.Module):
    @nn.compact
    def value(self):
        self.param("unused", nn.initializers.zeros, ())
        return 2


class Lora(nn.Module):
    layer: nn.Module

    def setup(self):
        nn.share_scope(self, self.layer)

    @nn.compact
    def __call__(self, x):
        return self.layer(x) + x @ self.param("a", nn.initializers.zeros, (4, 4))


@pytest.mark.parametrize("jit", [False, True])
def test_no_false_alarm(jit):
    assert traced(Ordinary(jit))[1] == {}


def test_a_loss_function_that_uses_one_half_of_a_model():
    class Coder(nn.Module):
        def setup(self):
            self.encoder, self.decoder = nn.Dense(3), nn.Dense(4)

        def encode(self, x):
            return self.encoder(x)

        def decode(self, z):
            return self.decoder(z)

    def both(model, batch, rngs):
        return jnp.sum(model.decode(model.encode(batch)))

    binding = wrap(Coder())
    parts = binding.init(both, X, KEY)
    bound = binding.bind(parts.params, parts.state, measure=summarize_magnitude)
    bound.encode(X)
    assert [str(point) for point in bound.finish().missing] == ["decoder"]


def test_what_is_below_a_block_that_was_not_traced_again_is_not_named():
    params = [("a", "w"), ("a", "inner", "w"), ("b", "tree", "w"), ("c", "d", "w")]
    assert find_uncalled(params, [("a",), ("b",)], {("a", "w")}, {(), ("a",)}) == [("a", "inner"), ("c",)]
    assert find_uncalled(params, [("a", "inner"), ("b",), ("c", "d")], {("a", "w")}, {()}) == [("a",)]
