"""What each branch does to the residual stream, token by token."""

from probes_jax.spec.metric import Cadence, MetricSpec, Priority
from probes_jax.spec.sketch import QUANTILES

_SOURCE = "Deng 2026, Reading a Pretraining Run, section 8"
_TIMING = "forward pass of the step, at the sum stream + branch, of the two terms as the model computed them"
_TOKENS = "over the valid tokens of all microbatches and shards"
_STATS = {
    "mean": f"mean {_TOKENS}: a sum and a count, then divided",
    "max": f"maximum {_TOKENS}",
    **{
        name: f"quantile {share:g} {_TOKENS}: nearest rank from counts in log-spaced buckets, to 1 %"
        for name, share in QUANTILES.items()
    },
}
_P0 = ("stream_norm", "branch_norm", "ratio")
THETAS = (0.05, 0.1, 0.25)  # a channel of a gate is shut below

# column, symbol, definition, what it catches
_COLUMNS = (
    ("stream_norm", "N_s", "||s||_2 of a token", "a stream that grows until a branch cannot move it"),
    ("branch_norm", "N_b", "||b||_2 of a token", "a branch that explodes or dies"),
    ("ratio", "R_b", "||b||_2 / ||s||_2 of a token", "a branch that writes nothing, or overwrites the stream"),
    ("importance", "B", "1 - cos(s, s + b) of a token", "a block that could be left out"),
    ("angle", "A", "arccos(cos(s, s + b)) / pi of a token", "how far a block turns the stream"),
    (
        "noop",
        "bf16 no-op",
        "#{j: b_j != 0 and bf16(s_j + b_j) == bf16(s_j)} / d of a token",
        "updates of the stream that are lost in bfloat16",
    ),
    ("nonzero", "#{b_j != 0} / d", "#{j: b_j != 0} / d of a token", "what the no-op fraction is a part of"),
)


def _metrics() -> list[MetricSpec]:
    found = []
    for column, symbol, definition, catches in _COLUMNS:
        if column in _P0:
            found.append(
                MetricSpec(
                    f"residual/{column}", symbol, "1", Priority.P0, Cadence.EVERY_100,
                    f"the largest mean of {symbol} over all branches and layers, and which one it is",
                    "maximum over branches and layers", _TIMING, catches, _SOURCE,
                )
            )  # fmt: skip
        for stat, reduction in _STATS.items():
            found.append(
                MetricSpec(
                    f"residual/{{path}}/{column}/{stat}", symbol, "1", Priority.P1, Cadence.EVERY_100,
                    f"{stat} over tokens of {definition}", reduction, _TIMING, catches, _SOURCE,
                )
            )  # fmt: skip
    for stat, reduction in _STATS.items():
        found.append(
            MetricSpec(
                f"residual/{{path}}/saturation/{{theta}}/{stat}", "#{beta_j < theta} / d", "1", Priority.P1,
                Cadence.EVERY_100,
                f"{stat} over tokens of #{{j: sigmoid(g_j / T) < theta}} / d, theta one of {THETAS}", reduction,
                "forward pass of the step, of what pj.observe_gate is given", "a branch that its gate has shut off",
                _SOURCE,
            )
        )  # fmt: skip
    return found


METRICS = tuple(_metrics())
