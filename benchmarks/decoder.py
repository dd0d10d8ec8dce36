"""The decoder of the cost figures: bf16 compute, grouped blocks scanned or unrolled, with remat, cut over a mesh.

It knows nothing of its monitoring. Parameters carry partition metadata for a mesh with the axes `data` and `model`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import probes_jax as pj


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the decoder.

    Attributes:
        vocabulary: Number of tokens.
        width: Features of the residual stream.
        layers: Number of blocks.
        heads: Attention heads.
        scan: One scanned block instead of `layers` of them.
        remat: Compute each block again in the backward pass.
        dtype: What activations are computed in; parameters are float32.
        mesh: Where it runs, so that it can say how its activations lie; None on one device.
    """

    vocabulary: int = 32_768
    width: int = 2_048
    layers: int = 12
    heads: int = 16
    scan: bool = True
    remat: bool = True
    dtype: Any = jnp.bfloat16
    mesh: Mesh | None = None

    def lay(self, x: jax.Array, *spec: str | None) -> jax.Array:
        """`x`, lying so on the mesh; the first axis is always the batch."""
        if self.mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec("data", *spec)))


def _dense(features: int, spec: tuple[str | None, ...], config: Config, name: str) -> nn.Dense:
    init = nn.with_partitioning(nn.initializers.lecun_normal(), spec)
    return nn.Dense(features, use_bias=False, kernel_init=init, dtype=config.dtype, name=name)


class Block(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, _: Any) -> tuple[jax.Array, None]:
        c = self.config
        head = c.width // c.heads
        h_BxTxD = nn.RMSNorm(dtype=c.dtype, name="attention_norm")(x_BxTxD)
        q, k, v = (
            c.lay(_dense(c.width, ("data", "model"), c, name)(h_BxTxD), None, "model").reshape(
                *h_BxTxD.shape[:2], c.heads, head
            )
            for name in ("query", "key", "value")
        )
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(h_BxTxD.shape)
        x_BxTxD = c.lay(x_BxTxD + _dense(c.width, ("model", "data"), c, "out")(mixed))
        h_BxTxD = nn.RMSNorm(dtype=c.dtype, name="mlp_norm")(x_BxTxD)
        gate, up = (
            c.lay(_dense(4 * c.width, ("data", "model"), c, name)(h_BxTxD), None, "model") for name in ("gate", "up")
        )
        return c.lay(x_BxTxD + _dense(c.width, ("model", "data"), c, "down")(nn.silu(gate) * up)), None


class Decoder(nn.Module):
    """Tokens int32 `[B, T]` to logits float32 `[B, T, V]`."""

    config: Config

    @nn.compact
    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        c = self.config
        embed = nn.Embed(
            c.vocabulary,
            c.width,
            dtype=c.dtype,
            embedding_init=nn.with_partitioning(nn.initializers.normal(0.02), ("model", "data")),
            name="embed",
        )
        x_BxTxD = c.lay(embed(tokens_BxT))
        block = nn.remat(Block, prevent_cse=not c.scan) if c.remat else Block
        if c.scan:
            stack = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=c.layers,
                metadata_params={nn.PARTITION_NAME: None},
            )
            x_BxTxD, _ = stack(c, name="blocks")(x_BxTxD, None)
        else:
            for layer in range(c.layers):
                x_BxTxD, _ = block(c, name=f"block_{layer}")(x_BxTxD, None)
        x_BxTxD = nn.RMSNorm(dtype=c.dtype, name="final_norm")(x_BxTxD)
        return c.lay(_dense(c.vocabulary, ("data", "model"), c, "head")(x_BxTxD), None, "model").astype(jnp.float32)


def loss_fn(model: Any, batch: Any, rngs: Any) -> pj.Loss:
    logits = model(batch["tokens"])
    return pj.Loss(
        nll=optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]),
        mask=batch["mask"],
        logits=logits,
    )


def optimizer(rate: Callable[[Any], Any] | float = 3e-4) -> Any:
    return pj.chain(
        ("clip", optax.clip_by_global_norm(1.0)),
        ("adam", optax.scale_by_adam(b2=0.95)),
        ("decay", optax.add_decayed_weights(0.1)),
        ("lr", optax.scale_by_learning_rate(rate)),
    )


def batch_like(examples: int, length: int, sharding: Any = None) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a batch."""

    def shape(dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((examples, length), dtype, sharding=sharding)

    return {"tokens": shape(jnp.int32), "targets": shape(jnp.int32), "mask": shape(jnp.float32)}
