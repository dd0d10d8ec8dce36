"""nnx models of the tests, and the slow form of what their modules return."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)
        self.bn = nnx.BatchNorm(width, momentum=0.5, rngs=rngs)

    def __call__(self, x):
        h = self.drop(nnx.relu(self.up(self.norm(x))))
        return self.bn(x + self.down(h))


def call(block, x):
    return block(x)


FORWARD = {
    "plain": call,
    "remat": nnx.remat(call),
    "no_updates": nnx.remat(call, graph_updates=False),
    "tree": nnx.remat(call, graph=False),
}


class Decoder(nnx.Module):
    def __init__(self, rngs, forward="plain", as_list=nnx.List):
        self.embed = nnx.Embed(7, 4, rngs=rngs)
        self.blocks = as_list([Block(4, rngs) for _ in range(2)])
        self.head = nnx.Linear(4, 7, rngs=rngs)
        self.forward = forward

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = FORWARD[self.forward](block, x)
        return self.head(x)


def by_hand(module, name, store, *args, call=None):
    """Calls a module whose children report to `store`; the module's own output too."""
    output = (call or module)(*args)
    store[name] = np.asarray(output)
    return output


def decoder_by_hand(model, tokens):
    """What each module of the plain decoder returns, called one by one outside of any step."""
    out = {}
    x = by_hand(model.embed, "embed", out, tokens)
    for i, block in enumerate(model.blocks):
        name = f"blocks[{i}]"
        h = by_hand(block.norm, f"{name}/norm", out, x)
        h = by_hand(block.up, f"{name}/up", out, h)
        h = by_hand(block.drop, f"{name}/drop", out, nnx.relu(h))
        h = by_hand(block.down, f"{name}/down", out, h)
        x = by_hand(block.bn, f"{name}/bn", out, x + h)
        out[name] = np.asarray(x)
    out["head"] = out["output"] = np.asarray(model.head(x))
    return out


def arrays(module):
    """All values of a module, copied."""
    state = nnx.split(module, graph=True)[1]
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in jax.tree.leaves(state)
    ]
