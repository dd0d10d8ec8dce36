"""Tokens of several modalities, and the encoder of another one."""

from probes_jax.spec.metric import Cadence, MetricSpec, Priority

_SOURCE = "Deng 2026, Reading a Pretraining Run, section 9"
_SUMS = "sums and counts over valid tokens, microbatches and shards, then divided"

METRICS = (
    MetricSpec("media/{modality}/token_share", "pi^(mu)", "1", Priority.P0, Cadence.EVERY_STEP,
               "valid tokens of the modality / valid tokens", _SUMS, "forward pass, by Loss.modality",
               "a mixture that is not what was meant", _SOURCE),
    MetricSpec("media/{modality}/scale_ratio", "gamma", "1", Priority.P0, Cadence.EVERY_100,
               "RMS of the modality's embeddings / RMS of the text's, each over its own valid tokens; absent without "
               "a token of either", _SUMS, "forward pass, of what the first block is given",
               "an adapter whose output drowns the text, or drowns in it", _SOURCE),
    MetricSpec("media/encoder_gradient_share", "S_enc", "1", Priority.P1, Cadence.EVERY_100,
               "sum g^2 over the encoder's parameters / sum g^2 over all that are trained", _SUMS,
               "after accumulation and loss-scale removal, before clipping",
               "an encoder that does not train, or trains alone", _SOURCE),
    MetricSpec("media/encoder_parameter_share", "P_enc / P", "1", Priority.P1, Cadence.EVERY_100,
               "trained parameters of the encoder / all that are trained", "a constant of the model",
               "when the state is created", "what the gradient share is to be compared with", _SOURCE),
)  # fmt: skip
