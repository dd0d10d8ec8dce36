"""What linen itself captures of an unrolled model, by the names the library should give."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from probes_jax.observe.rngs import Rngs
from tests.observe.evaluate import KEY, observed_and_plain

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


def unrolled(params, axis=0):
    """Parameters of a scanned decoder as the unrolled one has them."""
    params = dict(params)
    blocks = params.pop("blocks")
    depth = jax.tree.leaves(blocks)[0].shape[axis]
    for layer in range(depth):
        params[f"blocks_{layer}"] = jax.tree.map(lambda x, layer=layer: jnp.take(x, layer, axis), blocks)
    return params
