"""Gradients, spikes, clipping, the guard."""

from probes_jax.spec.metric import Cadence, MetricSpec, Priority

_SOURCE = "Deng 2026, Reading a Pretraining Run, section 4"
_TIMING = "unscaled, accumulated over microbatches, before clipping"
_SUMS = "sums and counts over elements and shards (replicas once), then divided"
_MAX = "maximum over elements and shards"

_EACH = "unscaled, of each microbatch and accumulated, before clipping"
_NOISE = "McCandlish et al. 2018, An Empirical Model of Large-Batch Training, appendix A"

# statistic, symbol, unit, definition, reduction, what it catches
_GLOBAL = (
    ("abs_mean", "G_mean", "1", "sum(|g|) / P", _SUMS, "typical gradient scale, little moved by one outlier"),
    (
        "abs_max",
        "G_max",
        "1",
        "max |g|: NaN if any element is NaN, else inf if any is, else the maximum",
        _MAX,
        "one exploding element that the mean dilutes",
    ),
    (
        "finite_abs_max",
        "G_max finite",
        "1",
        "max |g| over the finite elements",
        _MAX,
        "the scale beside a non-finite maximum",
    ),
    ("zero_fraction", "Z_g", "1", "#{g == 0} / P", _SUMS, "dead paths, underflow, parameters getting no gradient"),
    (
        "nan_count",
        "#NaN",
        "count",
        "number of NaN gradient elements",
        "exact sum",
        "the step a NaN reaches the gradients",
    ),
    ("inf_count", "#inf", "count", "number of infinite gradient elements", "exact sum", "gradient overflow"),
)
_LAYER = (
    (
        "norm",
        "||g_layer||",
        "1",
        "sqrt(sum(g^2)) of one parameter tensor of one layer",
        _SUMS,
        "which layer a rising gradient norm comes from",
    ),
    *_GLOBAL,
)
_SPIKE = (
    ("u", "u_t", "nat", "ln(x_t + eps), eps = 1e-30", "the detector's input in log units"),
    ("median", "q_t", "nat", "median of the earlier u in the window", "a local baseline that a spike cannot inflate"),
    ("deviation", "D_t", "nat", "median of |u - q| over the window", "the local spread"),
    (
        "score",
        "z_t",
        "1",
        "0.6745 (u_t - q_t) / max(D_t, floor), signed; +inf for a non-finite x_t; absent for x_t <= 0 or few values",
        "spikes, without assuming a Gaussian",
    ),
)


def _layer(stat: str, symbol: str, unit: str, definition: str, reduction: str, catches: str) -> MetricSpec:
    return MetricSpec(
        name=f"grad/{{path}}/{stat}",
        symbol=symbol,
        unit=unit,
        priority=Priority.P1,
        cadence=Cadence.EVERY_100,
        definition=definition,
        reduction=reduction,
        timing=_TIMING,
        catches=catches,
        source=_SOURCE,
    )


def _global(
    name: str,
    symbol: str,
    unit: str,
    definition: str,
    reduction: str,
    catches: str,
    *,
    priority: Priority = Priority.P1,
    cadence: Cadence = Cadence.EVERY_STEP,
    timing: str = _TIMING,
    source: str = _SOURCE,
) -> MetricSpec:
    return MetricSpec(name, symbol, unit, priority, cadence, definition, reduction, timing, catches, source)


METRICS = (
    _global(
        "grad/norm",
        "G_2",
        "1",
        "sqrt(sum_j g_j^2); inf when the squares overflow float32",
        _SUMS,
        "numerical stability; moves before the loss",
        priority=Priority.P0,
    ),
    *(_global(f"grad/{stat}", *rest) for stat, *rest in _GLOBAL),
    _global(
        "grad/zero_fraction/embedding",
        "Z_g embed",
        "1",
        "#{g == 0} / P over embedding parameters",
        _SUMS,
        "tokens that get no gradient; sparsity is expected here, a change of it still matters",
    ),
    _global(
        "grad/zero_fraction/other",
        "Z_g other",
        "1",
        "#{g == 0} / P over all other parameters",
        _SUMS,
        "dead paths outside the embeddings",
    ),
    _global(
        "grad/clip_rate",
        "clip rate",
        "1",
        "(1/W') sum over the last W steps of 1[G_2 > c], W' = steps seen so far up to W",
        "mean over steps",
        "a clip threshold that no longer matches the run",
        priority=Priority.P0,
        timing="before clipping",
    ),
    _global(
        "grad/clip_threshold",
        "c",
        "1",
        "the norm that the clip stage allows",
        "none",
        "a clip threshold that was changed or turned off",
        timing="at the clip stage",
    ),
    _global(
        "grad_frozen/norm",
        "G_2 frozen",
        "1",
        "sqrt(sum g^2) over parameters that the optimizer never moves",
        _SUMS,
        "frozen weights whose gradients would inflate the norm and the clipping",
    ),
    *(_layer(*row) for row in _LAYER),
    _layer(
        "share",
        "share",
        "1",
        "sum(g^2) of the layer / sum(g^2) of all; shares add to 1",
        _SUMS,
        "layers whose share of the gradient grows",
    ),
    _global(
        "grad/worst_layer_norm",
        "max ||g_layer||",
        "1",
        "the largest per-layer gradient norm, and which layer it is",
        "maximum over layers",
        "the layer that dominates the gradient",
        cadence=Cadence.EVERY_100,
    ),
    _global(
        "grad/microbatch_norm",
        "sqrt(A)",
        "1",
        "sqrt(A), A = sum_k b_k |g_k|^2 / B, g_k the gradient of the mean loss of microbatch k, b_k its valid tokens, "
        "B = sum b_k; absent with one microbatch",
        "sums over elements, shards (replicas once) and microbatches, then divided",
        "far above grad/norm: the gradients of parts of a batch point in different directions",
        cadence=Cadence.EVERY_100,
        timing=_EACH,
        source=_NOISE,
    ),
    _global(
        "grad/noise/trace",
        "tr(S)",
        "token",
        "B (A - G_2^2) / (K - 1), K microbatches with a valid token: variance of one token's gradient, unbiased, so "
        "it can be negative",
        _SUMS,
        "the raw value behind the noise scale",
        cadence=Cadence.EVERY_100,
        timing=_EACH,
        source=_NOISE,
    ),
    _global(
        "grad/noise/square",
        "|G|^2",
        "1",
        "G_2^2 - tr(S) / B: squared norm of the gradient that all data would have, unbiased; can be negative",
        _SUMS,
        "the raw value behind the noise scale",
        cadence=Cadence.EVERY_100,
        timing=_EACH,
        source=_NOISE,
    ),
    _global(
        "grad/noise_scale",
        "B_noise",
        "token",
        "tr(S) / |G|^2, each an exponential mean over steps (0.9 of the old one at each measurement); absent while "
        "that of |G|^2 is not positive",
        "ratio of means over steps",
        "a batch far below it is mostly noise, far above it a waste of tokens; it grows as the loss falls",
        cadence=Cadence.EVERY_100,
        timing=_EACH,
        source=_NOISE,
    ),
    *(
        _global(
            f"{signal}/spike/{stat}",
            f"{symbol}({x})",
            unit,
            definition,
            "from the reduced value; one window for the whole job",
            catches,
            timing=timing,
        )
        for signal, x, timing in (
            ("loss", "L", "with the loss"),
            ("grad", "G_2", _TIMING),
            ("update", "||dw||", "the applied update"),
        )
        for stat, symbol, unit, definition, catches in _SPIKE
    ),
    _global(
        "alert/co_spike",
        "C_t",
        "1",
        "1 when z(L) > theta and z(G_2) > theta on the same step",
        "from reduced values",
        "loss and gradient spiking together: real instability",
        priority=Priority.P0,
    ),
    _global(
        "alert/co_spike/count",
        "sum C_t",
        "count",
        "co-spike steps so far",
        "running sum over steps",
        "repeated real instability",
        priority=Priority.P0,
    ),
    _global(
        "alert/co_spike/magnitude",
        "sum C_t min(z_L, z_G)",
        "1",
        "sum over co-spike steps of min(z_L, z_G), finite ones only",
        "running sum over steps",
        "how bad the co-spikes were",
    ),
    _global(
        "alert/co_spike/nonfinite_count",
        "#C_t = inf",
        "count",
        "co-spike steps whose score was infinite; counted, not added to the magnitude",
        "running sum over steps",
        "NaN or infinite loss and gradient together",
    ),
    _global(
        "alert/guard/skipped",
        "skip",
        "1",
        "1 when the guard or the loss scale skipped this update, else 0",
        "one decision from reduced values, the same on every process",
        "steps dropped",
    ),
    _global(
        "alert/guard/skipped_count",
        "n_skip",
        "count",
        "updates skipped so far",
        "running sum over steps",
        "steps dropped by the guard",
    ),
    _global(
        "alert/guard/consecutive",
        "n_consecutive",
        "count",
        "skips in a row up to this step",
        "running count",
        "a run that no longer learns",
    ),
    _global(
        "alert/guard/stopped",
        "stopped",
        "1",
        "1 once the guard has given up: every later update is skipped",
        "latched",
        "a run of bad steps that the guard refuses to accept",
        priority=Priority.P0,
    ),
    _global(
        "alert/nonfinite_steps",
        "n_nonfinite",
        "count",
        "steps so far whose loss, extra loss terms or gradient held a NaN or infinity",
        "running sum over steps",
        "numerical trouble, skipped or not",
    ),
    _global(
        "alert/nonfinite_accepted",
        "n_accepted",
        "count",
        "updates applied that were made from a NaN or infinite loss or gradient, or whose own norm is NaN or infinite",
        "running sum over steps",
        "parameters that are corrupt from here on",
        priority=Priority.P0,
    ),
    _global(
        "opt/steps_applied",
        "n_applied",
        "count",
        "updates applied so far: attempted steps less skips, less microsteps that optax.MultiSteps only gathers",
        "running sum over steps",
        "a schedule that counts skipped steps",
    ),
)
