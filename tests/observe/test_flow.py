"""Marks against the values that a function really computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from probes_jax.observe.flow import trace_marks
from probes_jax.observe.marks import UNKNOWN, ZERO, Scaled, Uniform, join

X = jnp.float32([[1.5, -2.0, 3.0]])


def marks_of(function):
    return trace_marks(function, (X, jnp.float32(0.25)), [Scaled(0), Uniform("n")])


ZEROS = {
    "zeros": lambda x, n: jnp.zeros_like(x),
    "times": lambda x, n: x * 0.0,
    "over": lambda x, n: jnp.zeros(3) / (n + jnp.sum(x * x)),
    "chain": lambda x, n: jnp.sqrt(jnp.abs(-jnp.zeros(3)).astype(jnp.bfloat16)).reshape(3, 1).T[:, ::-1],
    "select": lambda x, n: jnp.where(x > 0, jnp.zeros_like(x), 0.0),
    "branch": lambda x, n: jax.lax.cond(n > 0, lambda y: jnp.zeros_like(y), lambda y: y * 0, x),
    "call": lambda x, n: jax.jit(jax.checkpoint(lambda y: jnp.zeros_like(y) * y))(x),
    "power": lambda x, n: jnp.zeros(3) ** 2 + jnp.square(jnp.zeros(3)),
    "constant": lambda x, n: np.zeros((2, 2), np.float32) * n,
    "product": lambda x, n: x @ jnp.zeros((3, 2)),
    "take": lambda x, n: jnp.zeros((4, 3))[jnp.int32(n)],
    "reduce": lambda x, n: jnp.sum(jnp.zeros((3, 3)), axis=0) + jnp.max(jnp.zeros(3)),
}
NOT_ZEROS = {
    "cos": lambda x, n: jnp.cos(jnp.zeros(3)),
    "ones": lambda x, n: jnp.ones(3),
    "minus": lambda x, n: x - x,  # zero for finite numbers, but not by its form
    "select": lambda x, n: jnp.where(x > 0, x, 0.0),
    "branch": lambda x, n: jax.lax.cond(n > 0, lambda y: y, lambda y: jnp.zeros_like(y), x),
    "scan": lambda x, n: jax.lax.scan(lambda c, y: (c, y + c), 1.0, jnp.zeros(3))[1],
    "power": lambda x, n: jnp.zeros(3) ** 0,
    "iota": lambda x, n: jnp.arange(3.0),
    "denominator": lambda x, n: n / (jnp.zeros(3) + 1),
    "constant": lambda x, n: np.float32([0.0, 1.0]) * n,
}


@pytest.mark.parametrize("name", ZEROS)
def test_zeros_are_found_and_are_zero(name):
    assert marks_of(ZEROS[name]) == [ZERO]
    for scale in (1.0, -3.0):
        np.testing.assert_array_equal(np.float32(ZEROS[name](X * scale, jnp.float32(0.25))), 0.0)


@pytest.mark.parametrize("name", NOT_ZEROS)
def test_what_is_not_sure_to_be_zero_is_not(name):
    assert ZERO not in marks_of(NOT_ZEROS[name])


def test_equal_factors_are_one_factor():
    first, second, third = marks_of(lambda x, n: (x * -(n + 1), x * -(n + 1), x * (n - 1)))
    assert isinstance(first, Scaled)
    assert first == second != third


def test_a_number_that_an_input_decides_is_not_a_factor():
    assert marks_of(lambda x, n: x * jnp.sum(x)) == [UNKNOWN]
    assert marks_of(lambda x, n: jax.lax.cond(jnp.sum(x) > 0, lambda y: y * 0.5, lambda y: y * 0.25, x)) == [UNKNOWN]
    assert marks_of(lambda x, n: jnp.where(x > 0, x * 0.5, x * 0.25)) == [UNKNOWN]


def test_branches_that_agree_are_one():
    half = marks_of(lambda x, n: x * 0.5)
    assert marks_of(lambda x, n: jax.lax.cond(n > 0, lambda y: y * 0.5, lambda y: y * 0.5, x)) == half
    assert marks_of(lambda x, n: jnp.where(x > 0, x * 0.5, x * 0.5)) == half


def test_captured_values_of_any_kind():
    key, half = jax.random.key(0), jnp.full((2,), 0.5, jnp.bfloat16)
    assert marks_of(lambda x, n: jax.random.normal(key, (3,)) * x) == [UNKNOWN]
    assert marks_of(lambda x, n: half * jnp.zeros((2,), jnp.bfloat16)) == [ZERO]
    assert marks_of(lambda x, n: x * half[0].astype(x.dtype)) == [UNKNOWN]


def test_custom_derivatives_are_walked_through():
    @jax.custom_vjp
    def halve(x):
        return 0.5 * x

    halve.defvjp(lambda x: (halve(x), None), lambda _, g: (g,))
    assert marks_of(lambda x, n: halve(x)) == marks_of(lambda x, n: 0.5 * x)
    assert marks_of(lambda x, n: jax.nn.relu(jnp.zeros_like(x))) == [ZERO]


def test_join():
    assert join(ZERO, ZERO) is ZERO
    assert join(ZERO, Scaled(0)) is UNKNOWN
    assert join(Scaled(0), Scaled(0)) == Scaled(0)
