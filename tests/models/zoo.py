"""Models that this project did not write, at the size of a toy and with random weights, and how each is called."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

VOCAB, BATCH, LENGTH = 32, 4, 6
POSITIONS = np.broadcast_to(np.arange(LENGTH), (BATCH, LENGTH))
ONES = np.ones((BATCH, LENGTH), np.int32)
CAUSAL = np.broadcast_to(np.tril(np.ones((LENGTH, LENGTH), bool)), (BATCH, LENGTH, LENGTH))


@dataclasses.dataclass(frozen=True)
class RealModel:
    """One model.

    Attributes:
        name: Short name.
        title: Class, package, and what is special about it.
        make: Makes the module: nnx with its weights, linen without.
        logits: Calls a model, wrapped or plain, on a batch.
        points: How many points the trace of a step comes across.
        missing: Those that do not report.
        unused: Those whose value the loss does not depend on, so that they have no gradient.
        batch: Makes a batch.
    """

    name: str
    title: str
    make: Callable[[], Any]
    logits: Callable[[Any, Any], Any]
    points: int
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    batch: Callable[[int], dict[str, np.ndarray]] = lambda seed: text(seed)


def text(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {key: rng.integers(0, VOCAB, (BATCH, LENGTH)).astype(np.int32) for key in ("input", "target")}


def images(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    pixels = rng.normal(size=(BATCH, 8, 8, 3)).astype(np.float32)
    return {"input": pixels, "target": rng.integers(0, 3, (BATCH,)).astype(np.int32)}


# ---- transformers: linen ----


def gpt2() -> Any:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_flax_gpt2 import FlaxGPT2LMHeadModule

    return FlaxGPT2LMHeadModule(GPT2Config(vocab_size=VOCAB, n_positions=8, n_embd=8, n_layer=2, n_head=2))


def bert() -> Any:
    from transformers import BertConfig
    from transformers.models.bert.modeling_flax_bert import FlaxBertForMaskedLMModule

    return FlaxBertForMaskedLMModule(BertConfig(vocab_size=VOCAB, **_sizes()), gradient_checkpointing=True)


def bart() -> Any:
    from transformers import BartConfig
    from transformers.models.bart.modeling_flax_bart import FlaxBartForConditionalGenerationModule

    sides = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    widths = {"d_model": 8, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 8}
    return FlaxBartForConditionalGenerationModule(BartConfig(vocab_size=VOCAB, **widths, **sides))


def vit() -> Any:
    from transformers import ViTConfig
    from transformers.models.vit.modeling_flax_vit import FlaxViTForImageClassificationModule

    return FlaxViTForImageClassificationModule(ViTConfig(image_size=8, patch_size=4, num_labels=3, **_sizes()))


def _sizes() -> dict[str, int]:
    widths = {"hidden_size": 8, "intermediate_size": 16, "max_position_embeddings": 8}
    return {**widths, "num_hidden_layers": 2, "num_attention_heads": 2}


# ---- google-tunix: nnx ----

_TUNIX = {"num_layers": 2, "embed_dim": 8, "hidden_dim": 16, "num_heads": 2, "head_dim": 4, "num_kv_heads": 1}
_ROPE = {"vocab_size": VOCAB, "rope_theta": 10_000, "norm_eps": 1e-6}


def llama() -> Any:
    from flax import nnx
    from tunix.models.llama3.model import Llama3, ModelConfig

    return Llama3(ModelConfig(**_TUNIX, **_ROPE), rngs=nnx.Rngs(0))


def gemma() -> Any:
    from flax import nnx
    from tunix.models.gemma3.model import Gemma3, ModelConfig, RematConfig

    special = {"sliding_window_size": 4, "param_dtype": jnp.float32, "remat_config": RematConfig.DECODER}
    return Gemma3(ModelConfig(**_TUNIX | {"num_layers": 6}, num_embed=VOCAB, **special), rngs=nnx.Rngs(0))


def qwen() -> Any:
    from flax import nnx
    from tunix.models.qwen3.model import ModelConfig, Qwen3

    return Qwen3(ModelConfig(**_TUNIX, **_ROPE, num_experts=4, num_experts_per_tok=2), rngs=nnx.Rngs(0))


def _tunix_logits(model: Any, batch: Any) -> Any:
    return model(batch["input"], POSITIONS, None, CAUSAL)[0]


_BART_WEIGHTS = tuple(
    f"model/{place}:1"  # attention weights are handed out beside the output, and nobody reads them
    for layer in range(2)
    for place in (
        f"encoder/layers[{layer}]/self_attn",
        f"decoder/layers[{layer}]/self_attn",
        f"decoder/layers[{layer}]/encoder_attn",
    )
)

MODELS = (
    RealModel(
        "gpt2",
        "`FlaxGPT2LMHeadModule`, transformers (linen; the output layer is applied with the embedding's weights)",
        gpt2,
        lambda model, batch: model(batch["input"], ONES, POSITIONS).logits,
        points=35,
    ),
    RealModel(
        "bert",
        "`FlaxBertForMaskedLMModule`, transformers (linen; `nn.remat` around each layer)",
        bert,
        lambda model, batch: model(batch["input"], ONES, 0 * ONES, POSITIONS, None).logits,
        points=54,
    ),
    RealModel(
        "bart",
        "`FlaxBartForConditionalGenerationModule`, transformers (linen; encoder and decoder, a shared embedding)",
        bart,
        lambda model, batch: model(batch["input"], ONES, batch["target"], ONES, POSITIONS, POSITIONS).logits,
        points=101,
        unused=(*_BART_WEIGHTS, "model:encoder_last_hidden_state", "output:encoder_last_hidden_state"),
    ),
    RealModel(
        "vit",
        "`FlaxViTForImageClassificationModule`, transformers (linen; images, one label each)",
        vit,
        lambda model, batch: model(batch["input"]).logits,
        points=47,
        batch=images,
    ),
    RealModel("llama", "`Llama3`, google-tunix (nnx)", llama, _tunix_logits, points=39),
    RealModel(
        "gemma",
        "`Gemma3`, google-tunix (nnx; `nnx.remat` around each layer, tied embedding)",
        gemma,
        _tunix_logits,
        points=137,
    ),
    RealModel("qwen", "`Qwen3`, google-tunix (nnx; mixture of experts)", qwen, _tunix_logits, points=39),
)
