"""The name of the transform that a value is inside of."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import get_opaque_trace_state
from jax.sharding import PartitionSpec as P

from probes_jax.observe.hiding import UNKNOWN, hiding

ONE = jax.make_mesh((1,), ("one",))


def custom(f, x):
    function = jax.custom_vjp(f)
    function.defvjp(lambda x: (function(x), None), lambda _, g: (jnp.full((2, 3), g),))
    return function(x)


def loop(f, x):
    return jax.lax.while_loop(lambda c: c < 1, lambda c: c + 1 + 0 * f(x), 0.0)


TRANSFORMS = {
    "jax.vmap": lambda f, x: jax.vmap(f)(x),
    "jax.jit": lambda f, x: jax.jit(f)(x),
    "jax.grad": lambda f, x: jax.grad(f)(x),
    "jax.jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jax.checkpoint": lambda f, x: jax.checkpoint(f)(x),
    "jax.shard_map": lambda f, x: jax.shard_map(f, mesh=ONE, in_specs=P(), out_specs=P())(x),
    "jax.lax.scan": lambda f, x: jax.lax.scan(lambda c, y: (c, f(y)), 0.0, x),
    "jax.lax.fori_loop": lambda f, x: jax.lax.fori_loop(0, 2, lambda i, c: c + f(x), 0.0),
    "jax.lax.while_loop": loop,
    "jax.lax.cond": lambda f, x: jax.lax.cond(x.sum() > 0, f, f, x),
    "jax.lax.switch": lambda f, x: jax.lax.switch(jnp.int32(x.sum()), [f, f, f], x),
    "jax.custom_vjp": custom,
}


@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_each_has_its_name_in_a_plain_and_in_a_differentiated_step(name, differentiated):
    found = []

    def step(x):
        here = get_opaque_trace_state(convention="flax")
        TRANSFORMS[name](lambda x: [found.append(hiding(here)), jnp.sum(x)][1], x)
        return jnp.sum(x)

    jax.eval_shape(jax.grad(step) if differentiated else step, jnp.ones((2, 3)))
    assert set(found) == {name}


def test_of_several_the_outermost_is_named():
    found = []

    def step(x):
        here = get_opaque_trace_state(convention="flax")
        jax.jit(jax.vmap(lambda x: [found.append(hiding(here)), x][1]))(x)

    step(jnp.ones(2))
    assert found == ["jax.jit"]


def test_what_is_not_inside_of_anything_has_no_name():
    assert hiding(get_opaque_trace_state(convention="flax")) == UNKNOWN
