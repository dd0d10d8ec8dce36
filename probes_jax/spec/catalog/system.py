"""The host and the monitor itself."""

from probes_jax.spec.metric import Cadence, MetricSpec, Priority


def _metric(
    name: str, symbol: str, unit: str, definition: str, reduction: str, timing: str, catches: str
) -> MetricSpec:
    return MetricSpec(
        name, symbol, unit, Priority.P1, Cadence.EVERY_STEP, definition, reduction, timing, catches, "defined here"
    )


METRICS = (
    _metric(
        "sys/data_wait",
        "tau_data",
        "s",
        "host time spent waiting for the batch of this step",
        "this process",
        "before the step is dispatched",
        "an input pipeline that cannot keep up",
    ),
    _metric(
        "sys/monitor/records",
        "n_records",
        "count",
        "reports recorded so far",
        "this process",
        "when the record is written",
        "a monitor that went silent",
    ),
    _metric(
        "sys/monitor/dropped",
        "n_dropped",
        "count",
        "records so far that were dropped unread, refused or unreadable, or that a sink got in part or not at all",
        "this process",
        "when the record is written",
        "storage or a host that cannot keep up",
    ),
    _metric(
        "sys/monitor/failed",
        "n_failed",
        "count",
        "calls of a writer that raised",
        "this process",
        "when the record is written",
        "a full disk, a lost mount, revoked credentials",
    ),
    _metric(
        "sys/monitor/record_seconds",
        "tau_record",
        "s",
        "time that `record` took on the training thread",
        "this process",
        "on the training thread",
        "a monitor that slows training",
    ),
    _metric(
        "sys/monitor/points_seen",
        "n_seen",
        "count",
        "activations that the trace of the step came across",
        "static per program",
        "when the step is traced",
        "a model that changed",
    ),
    _metric(
        "sys/monitor/points_reported",
        "n_reported",
        "count",
        "activations whose statistics came back",
        "static per program",
        "when the step is traced",
        "probes lost inside a lifted transform",
    ),
)
