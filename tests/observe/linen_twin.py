"""What linen itself captures of an unrolled model, by the names the library should give."""

from __future__ import annotations

import collections
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from probes_jax.observe.names import label_params
from probes_jax.observe.rngs import Rngs
from tests.observe.evaluate import (
    KEY,
    assert_rows,
    backward_rows,
    make_step,
    observed_and_plain,
)

TOKENS = jnp.arange(6).reshape(2, 3)


def is_public(module, method):
    return method == "__call__" or not (method.startswith("_") or method == "setup")


def capture(module, variables, *args, method=None, mutable=(), name=lambda path: "/".join(path), **kwargs):
    """Name to array, for every float leaf that `capture_intermediates` keeps."""
    streams = Rngs(KEY).streams(("params", "dropout"))
    output, kept = jax.jit(
        lambda variables, streams, *args: module.apply(
            variables,
            *args,
            rngs=streams,
            method=method,
            mutable=[*mutable, "intermediates"],
            capture_intermediates=is_public,
            **kwargs,
        )
    )(variables, streams, *args)
    arrays = {}

    def walk(tree, path):
        for key, value in tree.items():
            if isinstance(value, dict):
                walk(value, (*path, key))
                continue
            for call, one in enumerate(value):
                leaves = [
                    (".".join(str(getattr(k, "key", getattr(k, "idx", None))) for k in keys), leaf)
                    for keys, leaf in jax.tree_util.tree_leaves_with_path(one)
                    if jnp.issubdtype(leaf.dtype, jnp.floating)
                ]
                for leaf_name, leaf in leaves:
                    text = name(path) or "output"
                    text += "" if key == "__call__" else f".{key}"
                    text += f"#{call}" if call else ""
                    text += f":{leaf_name}" if len(leaves) > 1 else ""
                    arrays[text] = leaf

    walk(kept["intermediates"], ())
    return output, arrays


def squares(model, batch, rngs):
    """A loss: the sum of the squares of all that the model returns."""
    return sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(model(*batch)))


def bracketed(path):
    """The library's name of a numbered path: `layers_0/mlp` is `layers[0]/mlp`."""
    return re.sub(r"_(\d+)(?=/|\Z)", r"[\1]", "/".join(path)) or "output"


def two_indices(label):
    """What is called `layers_0_1` in a twin has two layer axes."""
    return re.sub(r"_(\d)\[", r"[\1][", label)


def values_and_gradients(module, variables, batch, name, merge):
    """Every float leaf that a public method returns, and the gradient of the loss at it, by name.

    The gradient is that of zeros added to each of them. Calls to which `merge` gives one name are one long array.
    """
    streams = Rngs(KEY).streams(("params", "dropout"))

    def run(zeros):
        values, calls = {}, collections.Counter()

        def intercept(call, args, kwargs, context):
            output, method = call(*args, **kwargs), context.method_name
            if not is_public(context.module, method):
                return output
            text = name(context.module.path) + ("" if method == "__call__" else f".{method}")
            calls[text] += 1
            text += f"#{calls[text] - 1}" if calls[text] > 1 else ""
            leaves, structure = jax.tree_util.tree_flatten_with_path(output)
            floats = [i for i, (_, leaf) in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]
            shifted = [leaf for _, leaf in leaves]
            for i in floats:
                keys = ".".join(str(getattr(k, "key", getattr(k, "idx", None))) for k in leaves[i][0])
                label = text if len(floats) == 1 else f"{text}:{keys}"
                assert label not in values
                shifted[i] = shifted[i] + zeros[label] if zeros else shifted[i]
                values[label] = shifted[i]
            return jax.tree.unflatten(structure, shifted)

        def model(*args):
            with nn.intercept_methods(intercept):
                kept = [collection for collection in variables if collection != "params"]
                return module.apply(variables, *args, rngs=streams, mutable=kept)[0]

        return squares(model, batch, None), values

    def both():
        _, shapes = jax.eval_shape(lambda: run(None))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return jax.value_and_grad(run, has_aux=True)(zeros)

    (_, values), gradients = jax.device_get(jax.jit(both)())
    result = ({}, {})
    for arrays, into in zip((values, gradients), result):
        for label, array in arrays.items():
            into.setdefault(merge(label), []).append(np.ravel(array))
    return tuple({label: np.concatenate(parts) for label, parts in into.items()} for into in result)


def own(module):
    """The step of `make_step`, of a module that is not wrapped."""

    def step(params, state, batch, key):
        def objective(params):
            kept = {}

            def model(*args):
                streams = Rngs(key).streams(("params", "dropout"))
                output, kept["state"] = module.apply(
                    {"params": params, **state}, *args, rngs=streams, mutable=list(state)
                )
                kept["output"] = output
                return output

            return squares(model, batch, None), ([], kept["state"], [kept["output"]])

        return jax.value_and_grad(objective, has_aux=True)(params)

    return step


def program(step, parts, batch):
    """The text of a traced step, without addresses in memory."""
    return re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(step)(parts.params, parts.state, batch, KEY)))


def assert_twin(
    module, twin, batch, convert=lambda variables: variables, *, merge=lambda label: label, cut=(), mapped=False
):
    """A model with transforms has the points, values and gradients of its plain twin, and is not changed by it.

    Args:
        module: The model that is observed.
        twin: The same computation without transforms, its layers numbered: `layers_0`.
        batch: Arguments of both.
        convert: From the variables of the model to those of the twin.
        merge: From a label of the twin (`cell#3`) to the label of the row it is part of.
        cut: Labels that the loss does not depend on: they have no gradient.
        mapped: The model computes with other weights than its parameters.
    """
    observed, binding, parts = observed_and_plain(module, squares, batch)
    assert observed.captured.missing == {}
    assert program(make_step(binding, squares, measure=None)[0], parts, batch) == program(own(module), parts, batch)
    variables = convert({"params": parts.params, **parts.state})
    values, gradients = values_and_gradients(twin, variables, batch, bracketed, merge)
    assert_rows(observed.rows, values)
    loss, grads, rows = backward_rows(binding, squares, batch, parts)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)  # a tap may move the last bits
    jax.tree.map(close, (loss, grads), (observed.loss, observed.grads))
    seen = {label: row for label, row in rows.items() if row["count"]}
    assert set(rows) - set(seen) == set(cut)
    assert_rows(seen, gradients, set(gradients) - set(cut))
    if not mapped:
        assert_parameters(parts.params, observed.captured.stacks, variables["params"])
    return observed


def assert_parameters(params, stacks, twin):
    """Every layer of every parameter has the twin's name, and what is behind the name is the twin's."""

    def flat(tree):
        return {tuple(k.key for k in keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)}

    leaves, rows = flat(params), {}
    for path, (names, axes) in label_params({path: leaf.shape for path, leaf in leaves.items()}, stacks).items():
        axes = () if axes is None else (axes,) if isinstance(axes, int) else axes
        layers = jnp.moveaxis(leaves[path], axes, range(len(axes)))
        rows |= dict(zip(names, layers.reshape(len(names), *layers.shape[len(axes) :])))
    for path, leaf in flat(twin).items():
        name = two_indices(bracketed(path))
        assert name in rows, (name, sorted(rows))
        np.testing.assert_array_equal(rows[name], leaf)


class Block(nn.Module):
    """A pre-norm decoder block; scanned, it returns its carry and nothing."""

    width: int = 4
    scanned: bool = False

    @nn.compact
    def __call__(self, x, _=None):
        h = nn.LayerNorm()(x)
        h = nn.MultiHeadDotProductAttention(2, name="attn")(h, mask=nn.make_causal_mask(x[..., 0]))
        x = x + h
        h = nn.Dense(2 * self.width, name="up")(x)
        h = nn.Dropout(0.2, deterministic=False)(nn.relu(h))
        x = x + nn.Dense(self.width, name="down")(h)
        return (x, None) if self.scanned else x


class Decoder(nn.Module):
    depth: int = 2
    scan: bool = False
    remat: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(7, 4, name="embed")(tokens)
        block = nn.remat(Block) if self.remat else Block
        if self.scan:
            layers = nn.scan(block, {"params": 0}, split_rngs={"params": True, "dropout": True}, length=self.depth)
            x, _ = layers(scanned=True, name="blocks")(x, None)
        else:
            for layer in range(self.depth):
                x = block(name=f"blocks_{layer}")(x)
        return nn.Dense(7, name="head")(x)


@functools.cache
def decoder(**options):
    """The decoder, evaluated once for all tests."""
    return observed_and_plain(Decoder(**options), lambda model, batch, rngs: jnp.sum(jnp.square(model(batch))), TOKENS)


def decoder_names(path):
    """The library's names, written out for this model."""
    text = "/".join(path)
    for raw, name in (("blocks_0", "blocks[0]"), ("blocks_1", "blocks[1]"), ("_0", "[0]")):
        text = text.replace(raw, name)
    return text


def unrolled(params, axis=0, name="blocks"):
    """Parameters of a scanned stack as the unrolled model has them."""
    params = dict(params)
    blocks = params.pop(name)
    depth = jax.tree.leaves(blocks)[0].shape[axis]
    for layer in range(depth):
        params[f"{name}_{layer}"] = jax.tree.map(lambda x, layer=layer: jnp.take(x, layer, axis), blocks)
    return params
