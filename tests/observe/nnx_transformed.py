"""nnx models with a transform in each, and beside each the same function without one."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import checkpoint
from jax.lax import scan


def linear(rngs):
    return nnx.Linear(4, 4, rngs=rngs)


def dense(p, x):
    return x @ p["kernel"] + p["bias"]


def layer_of(p, index):
    return jax.tree.map(lambda x: x[index], p)


class OverSplitState(nnx.Module):
    """JAX's scan over the state of stacked layers. Its carry begins weakly typed: JAX traces the body twice."""

    def __init__(self, rngs):
        self.layers = nnx.vmap(linear)(rngs.split(3))

    def __call__(self, x):
        graphdef, state = nnx.split(self.layers)

        def body(carry, state):
            x, total = carry
            x = jnp.tanh(nnx.merge(graphdef, state)(x))
            return (x, total + x.sum()), None

        (x, total), _ = jax.lax.scan(body, (x, 0.0), state)
        return x + total

    @staticmethod
    def reference(p, x, note):
        total = 0.0
        for index in range(3):
            x = jnp.tanh(note(f"layers[{index}]", dense(layer_of(p["layers"], index), x)))
            total = total + x.sum()
        return x + total


class StateInCarry(nnx.Module):
    """JAX's scan over time steps, the state of a layer in its carry; imported by its own name."""

    def __init__(self, rngs):
        self.layer = linear(rngs)

    def __call__(self, x):
        graphdef, state = nnx.split(self.layer)

        def body(carry, _):
            x, state = carry
            layer = nnx.merge(graphdef, state)
            return (jnp.tanh(layer(x)), nnx.state(layer)), None

        (x, state), _ = scan(body, (x, state), None, length=3)
        nnx.update(self.layer, state)
        return x

    @staticmethod
    def reference(p, x, note):
        for _ in range(3):
            x = jnp.tanh(note("layer", dense(p["layer"], x)))
        return x


class ClosedOver(StateInCarry):
    """The layer is neither handed in nor out."""

    def __call__(self, x):
        return jax.lax.scan(lambda x, _: (jnp.tanh(self.layer(x)), None), x, None, length=3)[0]


class Cell(StateInCarry):
    """A module in the carry of nnx.scan: its structure may not change."""

    def __init__(self, rngs, **options):
        super().__init__(rngs)
        self.options = tuple(options.items())

    def __call__(self, x):
        def body(carry, _):
            layer, x = carry
            return (layer, jnp.tanh(layer(x))), None

        run = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0), **dict(self.options))
        return run((self.layer, x), jnp.zeros(3))[0][1]


class StrictFilters(nnx.Module):
    """A scan whose axes name each kind of variable: one more kind is an error."""

    def __init__(self, rngs):
        self.layers = nnx.vmap(linear)(rngs.split(2))
        self.good = linear(rngs)

    def __call__(self, x):
        axes = nnx.StateAxes({nnx.Param: 0})
        run = nnx.scan(lambda layer, x: jnp.tanh(layer(x)), in_axes=(axes, nnx.Carry), out_axes=nnx.Carry)
        return self.good(run(self.layers, x))

    @staticmethod
    def reference(p, x, note):
        for index in range(2):
            x = jnp.tanh(note(f"layers[{index}]", dense(layer_of(p["layers"], index), x)))
        return note("good", dense(p["good"], x))


class Checkpointed(nnx.Module):
    """Closed over; merged inside and not handed back; under another name; nnx's own in its call."""

    def __init__(self, rngs):
        self.layers = nnx.List([linear(rngs) for _ in range(4)])

    def __call__(self, x):
        x = jax.checkpoint(lambda x: jnp.tanh(self.layers[0](x)))(x)
        graphdef, state = nnx.split(self.layers[1])
        x = jax.checkpoint(lambda state, x: jnp.tanh(nnx.merge(graphdef, state)(x)))(state, x)
        x = checkpoint(lambda x: jnp.tanh(self.layers[2](x)), policy=jax.checkpoint_policies.dots_saveable)(x)
        return nnx.remat(lambda layer, x: jnp.tanh(layer(x)), graph_updates=False)(self.layers[3], x)

    @staticmethod
    def reference(p, x, note):
        for index in range(4):
            x = jnp.tanh(note(f"layers[{index}]", dense(p["layers"][str(index)], x)))
        return x


class Mapped(nnx.Module):
    """Over examples closed over, over examples handed in, over experts, and by JAX's map."""

    def __init__(self, rngs):
        self.closed, self.shared, self.last = linear(rngs), linear(rngs), linear(rngs)
        self.experts = nnx.vmap(linear)(rngs.split(2))

    def __call__(self, x):
        x = jnp.tanh(jax.vmap(self.closed)(x))
        x = jnp.tanh(nnx.vmap(lambda layer, x: layer(x), in_axes=(None, 0))(self.shared, x))
        x = nnx.vmap(lambda expert, x: expert(x), in_axes=(0, None))(self.experts, x).sum(0)
        return jax.lax.map(lambda x: self.last(x), x)

    @staticmethod
    def reference(p, x, note):
        x = jnp.tanh(note("closed", dense(p["closed"], x)))
        x = jnp.tanh(note("shared", dense(p["shared"], x)))
        x = sum(note(f"experts[{index}]", dense(layer_of(p["experts"], index), x)) for index in range(2))
        return note("last", dense(p["last"], x))


class Both(nnx.Module):
    """Two time steps around two layers, and two layers around two time steps: only layers have rows."""

    def __init__(self, rngs):
        self.inner = nnx.vmap(linear)(rngs.split(2))
        self.outer = nnx.vmap(linear)(rngs.split(2))

    def __call__(self, x):
        graphdef, state = nnx.split(self.inner)

        def layers(x, _):
            return jax.lax.scan(lambda x, state: (jnp.tanh(nnx.merge(graphdef, state)(x)), None), x, state)[0], None

        def steps(layer, x):
            return jax.lax.scan(lambda x, _: (jnp.tanh(layer(x)), None), x, None, length=2)[0]

        x = jax.lax.scan(layers, x, None, length=2)[0]
        return nnx.scan(steps, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.outer, x)

    @staticmethod
    def reference(p, x, note):
        for _ in range(2):
            for index in range(2):
                x = jnp.tanh(note(f"inner[{index}]", dense(layer_of(p["inner"], index), x)))
        for index in range(2):
            for _ in range(2):
                x = jnp.tanh(note(f"outer[{index}]", dense(layer_of(p["outer"], index), x)))
        return x


class Decorated(nnx.Module):
    """Transformed where the class is written, long before it is observed."""

    def __init__(self, rngs):
        self.inner = linear(rngs)

    @nnx.remat
    def __call__(self, x):
        return jnp.tanh(self.inner(x))


@functools.partial(jax.checkpoint, static_argnums=0)
def merged(graphdef, state, x):
    return nnx.merge(graphdef, state)(x)


class Layers(nnx.Module):
    """Decorated layers in a scan, with a loop and a jitted function that take Variables of their own ways."""

    def __init__(self, rngs):
        self.layers = nnx.vmap(Decorated)(rngs.split(2))
        self.looped, self.jitted, self.lost = linear(rngs), linear(rngs), linear(rngs)

    def __call__(self, x):
        x = nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)
        x = nnx.fori_loop(0, 2, lambda _, carry: (carry[0], jnp.tanh(carry[0](carry[1]))), (self.looped, x))[1]
        x = nnx.jit(lambda layer, x: jnp.tanh(layer(x)))(self.jitted, x)
        return merged(*nnx.split(self.lost), x)

    @staticmethod
    def reference(p, x, note):
        for index in range(2):
            x = note(f"layers[{index}]/inner", dense(layer_of(p["layers"]["inner"], index), x))
            x = note(f"layers[{index}]", jnp.tanh(x))
        for _ in range(2):
            x = jnp.tanh(note("looped", dense(p["looped"], x)))
        x = jnp.tanh(note("jitted", dense(p["jitted"], x)))
        return note("lost", dense(p["lost"], x))


class Branches(nnx.Module):
    """The first of two branches, and the last of two; one layer is in three of the four."""

    def __init__(self, rngs):
        self.first, self.second = linear(rngs), linear(rngs)

    def __call__(self, x):
        x = nnx.cond(
            jnp.isfinite(x).all(), lambda a, b, x: a(x), lambda a, b, x: jnp.tanh(b(b(x))), self.first, self.second, x
        )
        return jax.lax.switch(1, [lambda x: self.second(x), lambda x: self.first(jnp.tanh(x))], x)


class Wrapper(nnx.Module):
    """A hand-written low-rank layer around another one."""

    def __init__(self, base, rngs):
        self.base = base
        self.a = nnx.LoRAParam(nnx.initializers.normal(1.0)(rngs.params(), (4, 2)))
        self.b = nnx.LoRAParam(jnp.ones((2, 4)))

    def __call__(self, x):
        return self.base(x) + x @ self.a[...] @ self.b[...]


class Odd(nnx.Module):
    """A wrapper, a kernel without its module, a module made in the call, a method that returns a function."""

    def __init__(self, rngs):
        self.lora = Wrapper(linear(rngs), rngs)
        self.direct, self.unused = linear(rngs), linear(rngs)

    def scaled_by(self, factor):
        return lambda x: factor * x

    def __call__(self, x):
        x = self.lora(x) @ self.direct.kernel[...]
        made = nnx.Linear(4, 4, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
        return made(self.scaled_by(2.0)(x))

    @staticmethod
    def reference(p, x, note):
        lora = p["lora"]
        x = note("lora", note("lora/base", dense(lora["base"], x)) + x @ lora["a"] @ lora["b"])
        return note("Linear", (2.0 * x @ p["direct"]["kernel"]) @ jnp.ones((4, 4)))


class Dropping(nnx.Module):
    def __init__(self, rngs):
        self.inner = linear(rngs)
        self.drop = nnx.Dropout(0.5)

    def __call__(self, x, rngs):
        return self.drop(jnp.tanh(self.inner(x)), rngs=rngs)


class RandomArgument(nnx.Module):
    """Random states come as an argument, through remat, scan and jit; the model is run again with other marks."""

    def __init__(self, rngs):
        self.one, self.layers = Dropping(rngs), nnx.vmap(Dropping)(rngs.split(2))

    def __call__(self, x, rngs):
        def run(layer, x, rngs):
            return layer(x, rngs)

        x = nnx.remat(run)(self.one, x, rngs)
        x = nnx.scan(run, in_axes=(0, nnx.Carry, 0), out_axes=nnx.Carry)(self.layers, x, rngs.split(2))
        return nnx.jit(run)(self.one, x, rngs)
