"""The decoder of `decoder_linen.py` in nnx, with the same module names. It knows nothing of its monitoring."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from decoder_linen import Config
from flax import nnx


class FeedForward(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(config.width, config.hidden, rngs=rngs)
        self.down = nnx.Linear(config.hidden, config.width, rngs=rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x_BxTxD)))


class Block(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(config.heads, config.width, decode=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.mlp = FeedForward(config, rngs=rngs)

    def __call__(self, x_BxTxD: jax.Array, mask: jax.Array) -> jax.Array:
        x_BxTxD += self.attention(self.attention_norm(x_BxTxD), mask=mask)
        return x_BxTxD + self.mlp(self.mlp_norm(x_BxTxD))


class TransformerLM(nnx.Module):
    """Tokens int32 `[B, T]` to logits float32 `[B, T, V]`; a position sees itself and what came before."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        c = config
        small = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(c.vocabulary, c.width, embedding_init=small, rngs=rngs)
        self.position_embed = nnx.Embed(c.length, c.width, embedding_init=small, rngs=rngs)
        self.block = nnx.List([Block(c, rngs=rngs) for _ in range(c.layers)])
        self.final_norm = nnx.LayerNorm(c.width, rngs=rngs)
        self.head = nnx.Linear(c.width, c.vocabulary, use_bias=False, kernel_init=small, rngs=rngs)

    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        x_BxTxD = self.embed(tokens_BxT) + self.position_embed(jnp.arange(tokens_BxT.shape[1]))
        mask = nnx.make_causal_mask(tokens_BxT)
        for block in self.block:
            x_BxTxD = block(x_BxTxD, mask)
        return self.head(self.final_norm(x_BxTxD))
