"""A model with transforms in it against a plain unrolled function that names the same values."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np

from tests.observe.evaluate import assert_rows, assert_same, backward_rows, observed_and_plain


class Note:
    """`note(name, value)` returns the value. Values of one name are the iterations of one point."""

    def __init__(self, zeros=None):
        self.values = {}
        self._zeros = zeros
        self._count = collections.Counter()

    def __call__(self, name, value):
        key = name, self._count[name]
        self._count[name] += 1
        self.values[key] = value
        return value if self._zeros is None else value + self._zeros[key]


def together(values):
    """One flat array per name."""
    names = dict.fromkeys(name for name, _ in values)
    return {n: np.concatenate([np.ravel(x) for (name, _), x in values.items() if name == n]) for n in names}


def assert_as_unrolled(module, reference, batch, loss_fn=None, wanted=None):
    """Forward and backward values, counts and names are those of the reference; nothing else is touched.

    Args:
        module: The model.
        reference: `(params, batch, note) -> output`, written without any transform.
        batch: The input.
        loss_fn: By default the sum of the squared output.
        wanted: Names that the module lacks by design, with a word of the reason.

    Returns:
        What was observed, and the binding.
    """

    def square(model, batch, rngs):
        return jnp.sum(jnp.square(model(batch)))

    observed, binding, parts = observed_and_plain(module, loss_fn or square, batch)
    loss, grads, rows = backward_rows(binding, loss_fn or square, batch, parts)

    def run(params, zeros=None):
        note = Note(zeros)
        output = note("output", reference(params, batch, note))
        return jnp.sum(jnp.square(output)), note.values

    @jax.jit
    def by_hand(params):
        expected, values = run(params)
        zeros = jax.tree.map(jnp.zeros_like, values)
        return expected, values, jax.grad(lambda z: run(params, z)[0])(zeros), jax.grad(lambda p: run(p)[0])(params)

    expected, values, gradients, of_params = jax.device_get(by_hand(parts.params))
    missing = {str(point): reason for point, reason in observed.captured.missing.items()}
    assert missing.keys() == (wanted or {}).keys()
    assert all(word in missing[name] for name, word in (wanted or {}).items())
    values, gradients = ({k: v for k, v in x.items() if k[0] not in missing} for x in (values, gradients))
    assert_rows(observed.rows, together(values))
    assert_rows(rows, together(gradients))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert_same(loss, observed.loss)
    for found in (grads, observed.grads):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), found, of_params)
    return observed, binding
