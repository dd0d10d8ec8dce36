"""What norms and experts are given: the residual stream between two branches is no module's output."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from probes_jax.observe.rngs import Rngs
from tests.observe import nnx_models
from tests.observe.evaluate import KEY, assert_rows, backward_rows, observed_and_plain, start
from tests.observe.linen_twin import TOKENS, Decoder, decoder, decoder_names, unrolled

pytestmark = pytest.mark.slow  # together; the second pair of Python and JAX goes without


def given_to_norms(params):
    """By hand: the first argument of every LayerNorm of the unrolled decoder."""
    arrays = {}

    def look(call, args, kwargs, context):
        if isinstance(context.module, nn.LayerNorm) and context.method_name == "__call__":
            arrays[decoder_names(context.module.path) + ".input"] = np.asarray(args[0])
        return call(*args, **kwargs)

    with nn.intercept_methods(look):
        Decoder().apply({"params": params}, TOKENS, rngs=Rngs(KEY).streams(("params", "dropout")))
    return arrays


@pytest.mark.parametrize("options", [{}, {"remat": True}], ids=str)
def test_linen_norms_show_the_stream_before_each_branch(options):
    observed, _, parts = decoder(**options)
    assert_rows(observed.inputs, given_to_norms(parts.params))


def test_scanned_layers_have_the_names_of_unrolled_ones():
    observed, _, _ = decoder(scan=True)
    assert set(observed.inputs) == {f"blocks[{layer}]/LayerNorm[0].input" for layer in range(2)}


def test_the_first_layer_of_a_scan_is_given_the_embedding():
    observed, _, parts = decoder(scan=True)
    first = unrolled(parts.params)["embed"]["embedding"][TOKENS]
    assert_rows({"x": observed.inputs["blocks[0]/LayerNorm[0].input"]}, {"x": first})


@pytest.mark.parametrize("forward", ["plain", "remat", "no_updates"])
def test_nnx_norms_show_the_stream(forward):
    model = nnx_models.Decoder(nnx.Rngs(0), forward)
    observed = observed_and_plain(model, lambda m, batch, rngs: jnp.sum(jnp.square(m(batch))), TOKENS)[0]
    embedded = model.embed(TOKENS)
    assert set(observed.inputs) == {"blocks[0]/norm.input", "blocks[1]/norm.input"}
    assert_rows({"x": observed.inputs["blocks[0]/norm.input"]}, {"x": embedded})
    assert observed.inputs["blocks[1]/norm.input"] == observed.rows["blocks[0]"]


def test_an_input_has_no_tap():
    """What comes back through a norm is not the gradient of the stream, which goes past it too."""
    loss = lambda model, batch, rngs: jnp.sum(jnp.square(model(batch)))  # noqa: E731
    binding, parts = start(Decoder(), loss, TOKENS)
    rows = backward_rows(binding, loss, TOKENS, parts, inputs=True)[2]
    assert set(rows) == {f"blocks[{layer}]/LayerNorm[0].input" for layer in range(2)}
    assert all(row["count"] == 0 for row in rows.values())
