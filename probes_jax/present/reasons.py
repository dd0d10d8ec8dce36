"""Why a signal has no data, where the run knows."""

from __future__ import annotations

from collections.abc import Sequence

from probes_jax.present.coverage import RunCoverage, find_coverage
from probes_jax.present.first_screen import NOT_IN_EVERY_RUN, Signal
from probes_jax.present.state import History, State
from probes_jax.spec.plan import Plan

_CO_SPIKE = "alert/co_spike"
_ACTIVATIONS = ("act", "grad_act")
_WORST_OF = {"loss/worst_shard": "loss/shard"}  # what is behind it is what is missing


def find_reasons(run: History, signals: Sequence[Signal], plan: Plan) -> list[str]:
    """A line for each reason that the run's coverage knows, with the signals that it explains.

    Args:
        run: The record, from `probes_jax.open_run`.
        signals: The first screen.
        plan: The plan of the run.
    """
    try:
        found = find_coverage(run)
    except ValueError:  # the run does not say
        found = None
    empty = [signal.name for signal in signals if signal.state is State.NO_DATA]
    reasons: dict[str, list[str]] = {}
    for name in empty if len(empty) < len(signals) else ():
        reasons.setdefault(_reason(name, found, plan), []).append(name)
    shown, missing = {signal.name.split("/")[0] for signal in signals}, () if found is None else found.coverage.missing
    for family in (prefix.rstrip("/") for prefix in NOT_IN_EVERY_RUN):
        known = [why for name, why in missing if name.split("/")[0] == family]
        if known and family not in shown:
            reasons.setdefault(known[0], []).append(family)
    return [f"{', '.join(names)}: {reason}" for reason, names in reasons.items() if reason]


def _reason(name: str, found: RunCoverage | None, plan: Plan) -> str:
    if name == _CO_SPIKE:
        return f"there is one after {plan.min_history} steps with a loss and a gradient (Plan.min_history)"
    if found is None:
        return ""
    missing, family = dict(found.coverage.missing), name.split("/")[0]
    reason = missing.get(_WORST_OF.get(name, name), missing.get(family, ""))
    if not reason and not found.coverage.points and family in _ACTIVATIONS:
        return " ".join(found.notes)
    return reason
