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
        "records so far that were dropped unread, refused or unreadable, or that a sink got in part or not at all, "
        "apart from what the budget leaves out (sys/monitor/shed)",
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
        "sys/monitor/record_share",
        "rho_record",
        "1",
        "time that `record` took on the training thread, as a share of the wall time, over a window of a minute",
        "process 0",
        "at the record that ends the window",
        "a monitor that slows training",
    ),
    _metric(
        "sys/monitor/thread_share",
        "rho_threads",
        "1",
        "CPU time of the recorder's threads, as a share of the wall time, over the same window",
        "process 0",
        "at the record that ends the window",
        "a host that has no time to spare for decoding and writing",
    ),
    _metric(
        "sys/monitor/queue",
        "n_queue",
        "count",
        "reports that wait to be read",
        "this process",
        "when the record is read",
        "a host that falls behind",
    ),
    _metric(
        "sys/monitor/bytes",
        "n_bytes",
        "B",
        "bytes of the reports read so far",
        "this process",
        "when the record is read",
        "a report that grew",
    ),
    _metric(
        "sys/monitor/store_only",
        "n_store",
        "count",
        "series of this report that event files and CLU writers do not get: those of single layers and shards, and "
        "those beyond Plan.max_series; a run folder's store has them",
        "this report",
        "when the record is read",
        "a dashboard that shows less than was measured",
    ),
    _metric(
        "sys/monitor/scan_overhead",
        "rho_scan",
        "1",
        "(F - L) / (k L + F - L): F, L median time from a report to the next, that of a full or of a light step, where "
        "the host waited for both; k steps from scan to scan",
        "the last 8 full and 128 light steps that the host of process 0 saw arrive",
        "at a step that scans",
        "scans that cost more than they are worth",
    ),
    _metric(
        "sys/monitor/shed",
        "s",
        "1",
        "what the recorder's budget leaves out: 0 nothing; 1 layers and shards, in nine of ten full reports; 2 all of "
        "them, and P2; 3 everything but P0",
        "process 0",
        "when the record is read",
        "a record that is less than was planned",
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
