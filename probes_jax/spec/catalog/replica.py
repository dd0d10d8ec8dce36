"""Copies that must be the same: parameters and optimizer state on the devices that they are replicated over."""

from probes_jax.spec.metric import Cadence, MetricSpec, Priority


def _metric(name: str, symbol: str, unit: str, priority: Priority, definition: str, reduction: str) -> MetricSpec:
    return MetricSpec(
        name=name,
        symbol=symbol,
        unit=unit,
        priority=priority,
        cadence=Cadence.EVERY_100,
        definition=definition,
        reduction=reduction,
        timing="parameters and optimizer state before the step, as they lie in memory",
        catches="silent corruption of memory or arithmetic on one device, which the others then train against",
        source="defined here",
    )


METRICS = (
    _metric(
        "replica/divergent_tensors",
        "n_div",
        "count",
        Priority.P0,
        "number of tensors whose copies are not the same, bit for bit, and the first of them; absent where nothing has "
        "a copy",
        "count over tensors",
    ),
    _metric(
        "replica/{path}/diverged",
        "div",
        "1",
        Priority.P1,
        "1 when the 32-bit checksums of the copies of a tensor differ over a mesh axis that it is replicated over, "
        "else 0; a difference stays unseen with a chance of about 2^-32",
        "sum of the checksums of all copies, mod 2^32, with weights that add up to 0",
    ),
)
