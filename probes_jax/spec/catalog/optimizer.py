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
)
