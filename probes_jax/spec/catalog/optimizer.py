"""Parameters, updates, learning rate, loss scale."""

from probes_jax.spec.metric import Cadence, MetricSpec, Priority

_SOURCE = "Deng 2026, Reading a Pretraining Run, section 6"
_VITAL = "Vital signs of large-model training, section 2"
_APPLIED = "dw = w_new - w_old in the parameter's dtype: what was really applied"
_SUMS = "sum of squares over elements and shards (replicas once), then the root"


def _metric(
    name: str,
    symbol: str,
    unit: str,
    cadence: Cadence,
    definition: str,
    reduction: str,
    timing: str,
    catches: str,
    source: str,
    priority: Priority = Priority.P1,
) -> MetricSpec:
    return MetricSpec(name, symbol, unit, priority, cadence, definition, reduction, timing, catches, source)


_MOMENT = "histogram of the nonzero elements by exponent and three bits of mantissa (at most 65,536 of a shard), summed"

# statistic, symbol, definition, reduction, what it catches
_SECOND_MOMENT = (
    (
        "spread",
        "log10(max / p50)",
        "decades between the median and the maximum of the second moment, within 0.027; NaN where it is not finite",
        _MOMENT,
        "a few directions with far larger gradients than the rest: one learning rate fits only some of them",
    ),
    *(
        (f"p{share}", f"p{share} v", f"{share} % quantile of the nonzero elements, within 6.25 %", _MOMENT, catches)
        for share, catches in (
            (10, "elements whose step is decided by eps"),
            (50, "the typical squared gradient that the optimizer remembers"),
            (90, "the upper end of the ordinary elements"),
            (99, "outliers that the maximum alone would not place"),
        )
    ),
    ("max", "max v", "the largest element: NaN if any is NaN, else inf if any is", "maximum over elements and shards",
     "one element that remembers a spike, and stands still while it does"),
    ("zero_fraction", "#{v == 0} / n", "elements that have never had a gradient", "exact counts, then divided",
     "dead parameters; underflow of squared gradients in the moment's dtype"),
)  # fmt: skip

# statistic, symbol, definition, reduction, what it catches
_STAGE = (
    ("norm", "||u||", "sqrt(sum u^2) over parameters that move, u the updates after the stage", _SUMS,
     "the stage at which an update becomes too large"),
    ("abs_max", "max |u|", "max |u|: NaN if any element is NaN, else inf if any is, else the maximum",
     "maximum over elements and shards", "one element that a stage blows up: a second moment near zero"),
    ("cosine", "cos(u, g)", "sum u g / (||u|| ||g||), g the gradient before any stage; absent if one is 0", _SUMS,
     "a stage that turns the update away from the gradient: stale momentum, decay that outweighs it"),
)  # fmt: skip

METRICS = (
    _metric(
        "param/norm",
        "||w||",
        "1",
        Cadence.EVERY_STEP,
        "sqrt(sum w^2) over trained parameters",
        _SUMS,
        "before the update: the weights this step's loss was measured at",
        "sudden growth: too large an update, overflow, a missing clip",
        _VITAL,
    ),
    _metric(
        "param/{path}/norm",
        "||w_layer||",
        "1",
        Cadence.EVERY_100,
        "sqrt(sum w^2) of one parameter tensor of one layer",
        _SUMS,
        "before the update",
        "which layer grows",
        _VITAL,
    ),
    _metric(
        "update/norm",
        "||dw||",
        "1",
        Cadence.EVERY_STEP,
        "sqrt(sum dw^2) over trained parameters",
        _SUMS,
        _APPLIED,
        "instability that shows in updates before loss and gradient norm",
        "public notes of a 32B run: update-norm spikes came first",
        Priority.P0,
    ),
    _metric(
        "update/{path}/norm",
        "||dw_layer||",
        "1",
        Cadence.EVERY_100,
        "sqrt(sum dw^2) of one parameter tensor of one layer",
        _SUMS,
        _APPLIED,
        "which layer is moved",
        _SOURCE,
    ),
    _metric(
        "update/{path}/ratio",
        "rho",
        "1",
        Cadence.EVERY_100,
        "||dw|| / ||w|| of one parameter tensor of one layer; absent when ||w|| = 0",
        "ratio of reduced norms",
        _APPLIED,
        "updates too small to matter, or large enough to damage",
        _SOURCE,
    ),
    _metric(
        "update/worst_ratio",
        "max rho",
        "1",
        Cadence.EVERY_100,
        "the largest update ratio over all parameter tensors, and which one it is",
        "maximum over layers",
        _APPLIED,
        "one tensor that is rewritten while the rest is calm",
        _SOURCE,
    ),
    _metric(
        "update/noop_fraction",
        "n_0 / n",
        "1",
        Cadence.EVERY_100,
        "#{u != 0 and w_new == w_old} / #{u != 0} over trained parameters, u the update that the optimizer asked for; "
        "absent where all u are 0 and where the update was skipped",
        "exact counts over elements and shards (replicas once), then divided",
        "at the update, in the parameter's dtype",
        "parameters in low precision that an update this small cannot move: training stands still",
        _VITAL,
    ),
    _metric(
        "update/{path}/noop_fraction",
        "n_0 / n of a layer",
        "1",
        Cadence.EVERY_100,
        "#{u != 0 and w_new == w_old} / #{u != 0} of one parameter tensor of one layer",
        "exact counts over elements and shards (replicas once), then divided",
        "at the update, in the parameter's dtype",
        "which layer an update this small cannot move",
        _VITAL,
    ),
    _metric(
        "opt/learning_rate",
        "eta",
        "1",
        Cadence.EVERY_STEP,
        "the learning rate that this step's update used; the largest, where groups of parameters have their own",
        "none",
        "at the update, before the schedule's count is raised",
        "a schedule that is off by one, restarted or stuck",
        "defined here",
    ),
    _metric(
        "opt/learning_rate/{group}",
        "eta^(g)",
        "1",
        Cadence.EVERY_STEP,
        "the learning rate of one group of parameters, by its label in optax.multi_transform; absent with one rate",
        "none",
        "at the update, before the schedule's count is raised",
        "a group that has the schedule of another, or none",
        "defined here",
    ),
    _metric(
        "opt/loss_scale",
        "S",
        "1",
        Cadence.EVERY_STEP,
        "the loss scale that this step's gradients were scaled by",
        "none",
        "during the backward pass",
        "gradient overflow: a falling scale",
        _VITAL,
    ),
    _metric(
        "opt/loss_scale_drops",
        "n_drop",
        "count",
        Cadence.EVERY_STEP,
        "drops of the loss scale so far",
        "running sum over steps",
        "after the step",
        "repeated overflow",
        _VITAL,
    ),
    *(
        _metric(
            f"opt/second_moment/{{path}}/{stat}",
            symbol,
            "1",
            Cadence.EVERY_100,
            definition,
            reduction,
            "after the update, of one parameter tensor of one layer (adafactor: of its rows and columns)",
            catches,
            _VITAL,
            Priority.P2,
        )
        for stat, symbol, definition, reduction, catches in _SECOND_MOMENT
    ),
    *(
        _metric(
            f"opt/stage/{{stage}}/{stat}",
            symbol,
            "1",
            Cadence.ON_DEMAND,
            definition,
            reduction,
            "at the update, after the stage; `applied`: what became of the parameters",
            catches,
            _SOURCE,
            Priority.P2,
        )
        for stat, symbol, definition, reduction, catches in _STAGE
    ),
)
