"""What is worth a line in the log when a program reports for the first time."""

from __future__ import annotations

from typing import Any

from probes_jax.host.health import log
from probes_jax.spec.coverage import ONE_DEVICE, missing_lines
from probes_jax.spec.plan import Plan


def announce(report: Any, plan: Plan | None) -> None:
    """Says what of this program cannot be seen, and why; what is not as it should be; and a plan not the recorder's.

    Args:
        report: The first report of a layout. Only what is static in it is read.
        plan: The recorder's plan, or None.
    """
    its = getattr(report, "plan", "")
    if plan is not None and its and its != plan.fingerprint:
        log.warning(
            "the reports come from another plan than the recorder's, which the run folder names and whose thresholds "
            "its tables use; give both the same: Recorder(folder, plan), TrainState.create(plan=plan)"
        )
    coverage = getattr(report, "coverage", None)
    missing = [item for item in getattr(coverage, "missing", ()) if item[1] != ONE_DEVICE]
    scans = report.layout.program == "full" and (getattr(coverage, "seen", ()) or "act" in dict(missing))
    if report.layout.program == "full":  # the light program has the same
        for line in getattr(coverage, "warnings", ()):
            log.warning("%s", line)
    if missing and scans:  # the light program misses the same
        log.warning("not measured in this run:\n%s", "\n".join(missing_lines(missing)))
