"""A small pre-norm decoder in linen. It knows nothing of its monitoring."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the decoder.

    Attributes:
        vocabulary: Number of tokens, V.
        length: Longest sequence, T.
        width: Features of the residual stream, D.
        layers: Number of blocks.
        heads: Attention heads; divides `width`.
        hidden: Features inside the feed-forward network.
        scan: One block that is scanned over the layers and computed again on the way back, instead of one a layer: it
            compiles once, and keeps only what it was given.
    """

    vocabulary: int = 256
    length: int = 128
    width: int = 192
    layers: int = 4
    heads: int = 6
    hidden: int = 768
    scan: bool = False

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width ({self.width}) must be a multiple of heads ({self.heads})")


class FeedForward(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        h_BxTxF = nn.gelu(nn.Dense(self.config.hidden, name="up")(x_BxTxD))
        return nn.Dense(self.config.width, name="down")(h_BxTxF)


class Block(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, mask: jax.Array) -> jax.Array:
        h_BxTxD = nn.LayerNorm(name="attention_norm")(x_BxTxD)
        x_BxTxD += nn.MultiHeadDotProductAttention(self.config.heads, name="attention")(h_BxTxD, mask=mask)
        h_BxTxD = nn.LayerNorm(name="mlp_norm")(x_BxTxD)
        return x_BxTxD + FeedForward(self.config, name="mlp")(h_BxTxD)


class TransformerLM(nn.Module):
    """Tokens int32 `[B, T]` to logits float32 `[B, T, V]`; a position sees itself and what came before."""

    config: Config

    @nn.compact
    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        c = self.config
        small = nn.initializers.normal(0.02)
        positions_T = jnp.arange(tokens_BxT.shape[1])
        x_BxTxD = nn.Embed(c.vocabulary, c.width, embedding_init=small, name="embed")(tokens_BxT)
        x_BxTxD += nn.Embed(c.length, c.width, embedding_init=small, name="position_embed")(positions_T)
        mask = nn.make_causal_mask(tokens_BxT)
        if c.scan:
            layer = nn.remat(lambda block, x, mask: (block(x, mask), None), prevent_cse=False)
            stack = nn.scan(
                layer, {"params": 0}, split_rngs={"params": True}, in_axes=nn.broadcast, length=c.layers
            )  # parameters [layers, ...]
            x_BxTxD, _ = stack(Block(c, name="block"), x_BxTxD, mask)
        else:
            for layer in range(c.layers):
                x_BxTxD = Block(c, name=f"block_{layer}")(x_BxTxD, mask)
        x_BxTxD = nn.LayerNorm(name="final_norm")(x_BxTxD)
        return nn.Dense(c.vocabulary, use_bias=False, kernel_init=small, name="head")(x_BxTxD)
