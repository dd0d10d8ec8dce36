"""What a point is in a model: the words, the same for every architecture."""

ROLES = (
    "embedding",
    "query",
    "key",
    "value",
    "normalized_query",
    "normalized_key",
    "attention_output",
    "feed_forward",
    "router",
    "expert_input",
    "expert_output",
    "residual",
    "norm",
    "logits",
    "other",
)
