"""The role of a point, from the names that Flax's layers and common models use."""

from __future__ import annotations

import pytest

from probes_jax.observe.point import INPUT, Point
from probes_jax.observe.roles import role_of, takes_input
from probes_jax.spec.roles import ROLES

CASES = [
    # Flax's own layers
    ("embed", "Embed", "embedding"),
    ("block_0/MultiHeadDotProductAttention_0/query", "DenseGeneral", "query"),
    ("block_0/attn/key", "LinearGeneral", "key"),
    ("block_0/attn/value", "LinearGeneral", "value"),
    ("block_0/attn/out", "DenseGeneral", "attention_output"),
    ("block_0/attn/query_ln", "LayerNorm", "normalized_query"),
    ("block_0/attn/key_ln", "LayerNorm", "normalized_key"),
    ("block_0/SelfAttention_0", "SelfAttention", "attention_output"),
    ("block_0/LayerNorm_1", "LayerNorm", "norm"),
    ("block_0", "Block", "residual"),
    # common models
    ("model/layers/3/self_attn/q_proj", "Dense", "query"),
    ("model/layers/3/self_attn/k_proj", "Dense", "key"),
    ("model/layers/3/self_attn/v_proj", "Dense", "value"),
    ("model/layers/3/self_attn/o_proj", "Dense", "attention_output"),
    ("model/layers/3/self_attn/q_norm", "RMSNorm", "normalized_query"),
    ("model/layers/3/mlp", "LlamaMLP", "feed_forward"),
    ("model/layers/3/mlp/down_proj", "Dense", "feed_forward"),
    ("model/layers/3/input_layernorm", "RMSNorm", "norm"),
    ("model/layers/3", "DecoderLayer", "residual"),
    ("transformer/wte", "Embed", "embedding"),
    ("transformer/h/0/attn/c_proj", "Conv1D", "attention_output"),
    ("transformer/h/0/mlp/c_fc", "Conv1D", "feed_forward"),
    ("lm_head", "Dense", "logits"),
    ("block/moe/router", "Dense", "router"),
    ("block/experts", "Experts", "expert_output"),
    ("block/Dropout_0", "Dropout", "other"),
    # of published models: the class has the last word where the name misleads
    ("layers/3/attention_norm", "RMSNorm", "norm"),
    ("layers/3/ffn_norm", "RMSNorm", "norm"),
    ("layers/3/self_attn_layer_norm", "LayerNorm", "norm"),
    ("encoder/layernorm_embedding", "LayerNorm", "norm"),
    ("layers/3/attn/_query_norm", "RMSNorm", "normalized_query"),
    ("layers/3/attn/attn_dropout", "Dropout", "other"),
    ("layers/3/self_attn/rotary_emb", "LlamaRotaryEmbedding", "other"),
    ("layers/3/encoder_attn/out_proj", "Dense", "attention_output"),
    ("layers/3/fc1", "Dense", "feed_forward"),
    ("layer/3/intermediate/dense", "Dense", "feed_forward"),
    ("layers/3/mlp", "MoELayer", "expert_output"),
    ("layers/3/block_sparse_moe", "MixtralSparseMoeBlock", "expert_output"),
    ("layers/3", "PreNormBlock", "residual"),
    ("classifier", "Dense", "logits"),
    ("", "Model", "logits"),
]


@pytest.mark.parametrize(("path", "class_name", "role"), CASES)
def test_known_names(path, class_name, role):
    point = Point(tuple(filter(None, path.split("/"))), class_name)
    assert role_of(point) == role
    assert role in ROLES


def test_an_embedding_used_as_the_output_layer():
    assert role_of(Point(("embed",), "Embed", "attend")) == "logits"
    assert role_of(Point(("embedder",), "Embedder", "decode")) == "logits"
    assert role_of(Point(("embedder",), "Embedder", "encode")) == "embedding"
    assert role_of(Point(("vae",), "VAE", "decode")) == "other"


def test_the_caller_s_map_goes_first_and_its_first_pair_wins():
    point = Point(("mixer_1", "in"), "Mixer")
    assert role_of(point, [("mixer", "query"), (r"mixer\[1\]", "key")]) == "query"
    assert role_of(point, [("other", "query")]) == "other"


def test_a_word_inside_a_name_is_no_role():
    assert role_of(Point(("keyboard",), "Dense")) == "other"
    assert role_of(Point(("block_0", "Dense_1"), "Dense")) == "other"


@pytest.mark.parametrize(
    ("path", "class_name", "role"),
    [
        ("block_0/ln_2", "LayerNorm", "residual"),
        ("model/layers/3/input_layernorm", "FlaxLlamaRMSNorm", "residual"),
        ("encoder/layer/0/output/LayerNorm", "LayerNorm", "residual"),
        ("block_0/experts", "Experts", "expert_input"),
        ("block_0/attn/query_ln", "LayerNorm", None),
        ("stem/bn", "BatchNorm", None),
        ("block_0/mlp", "MLP", None),
    ],
)
def test_what_is_read_at_the_input(path, class_name, role):
    module = tuple(path.split("/"))
    assert takes_input(Point(module, class_name)) is (role is not None)
    if role:
        assert role_of(Point(module, class_name, INPUT)) == role
        assert role in ROLES


def test_methods_of_one_s_own_are_no_output_layer():
    assert role_of(Point(("blocks", "0", "mix"), "Mixer", "attend")) != "logits"
    assert role_of(Point((), "Model", "encode")) != "logits"
