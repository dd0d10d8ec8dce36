"""The first screen: every signal (priority P0) of a run with its last value and its state."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from probes_jax.present.score import find_plan
from probes_jax.present.state import History, State, since, states, where
from probes_jax.spec.catalog import REGISTRY
from probes_jax.spec.metric import MetricSpec, Priority
from probes_jax.spec.plan import Plan
from probes_jax.spec.registry import Registry

OTHER = "loss/group/other/"  # tokens of no group of the plan; shown once there were any
NOT_IN_EVERY_RUN = ("replica/", "router/", "residual/", "media/")  # no copies, no experts: shown once there is a value
GUARD = "alert/guard/stopped"  # without a guard in the plan it is shown only when it is on


@dataclasses.dataclass(frozen=True)
class Signal:
    """One row of the first screen.

    Attributes:
        name: Name of the metric.
        value: The last value measured, or None.
        step: The step of that value, or None.
        unit: As in the registry, with the plan's word for a token.
        state: See `probes_jax.present.state`.
        since: First step of the state, or None.
        where: The layer or shard behind a worst-of signal, else empty.
        catches: What it helps to see.
    """

    name: str
    value: float | None
    step: int | None
    unit: str
    state: State
    since: int | None
    where: str
    catches: str


def first_screen(run: History, plan: Plan | None = None, registry: Registry = REGISTRY) -> list[Signal]:
    """The signals of a run, in the order of the registry.

    Args:
        run: The record, from `probes_jax.open_run`.
        plan: Thresholds; by default those that the run was recorded with.
        registry: What is a signal.
    """
    plan = find_plan(run.manifest()) if plan is None else plan
    names = run.names()
    found = [_signal(run, name, spec, plan) for name, spec in _signals(names, registry)]
    nobody = any(row.name == OTHER + "mean" and row.state is State.NO_DATA for row in found)
    if nobody:
        found = [row for row in found if not row.name.startswith(OTHER)]
    found = [row for row in found if not (row.state is State.NO_DATA and row.name.startswith(NOT_IN_EVERY_RUN))]
    if plan.guard is None:
        found = [row for row in found if row.name != GUARD or row.value != 0]
    return found


def _signals(names: list[str], registry: Registry) -> Iterator[tuple[str, MetricSpec]]:
    """Names of the signals; a family (loss by group) gives those that the run has."""
    for spec in registry:
        if spec.priority is not Priority.P0:
            continue
        if "{" in spec.name:
            yield from ((name, spec) for name in names if registry.find(name) is spec)
        else:
            yield spec.name, spec


def _signal(run: History, name: str, spec: MetricSpec, plan: Plan) -> Signal:
    steps, values, found = states(run, name, plan)
    unit = spec.unit.replace("token", plan.unit)
    if not steps.size:
        return Signal(name, None, None, unit, State.NO_DATA, None, "", spec.catches)
    return Signal(
        name=name,
        value=float(values[-1]),
        step=int(steps[-1]),
        unit=unit,
        state=State(int(found[-1])),
        since=since(steps, found),
        where=where(run, name, int(steps[-1])),
        catches=spec.catches,
    )


def format_value(value: float | None, unit: str) -> str:
    """A number as people read it: counts in full, everything else with four digits.

    >>> format_value(1234567.0, "count"), format_value(0.00123456, "1"), format_value(2.0, "nat/token")
    ('1,234,567', '0.001235', '2.000')
    """
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if unit == "count":
        return f"{value:,.0f}"
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 1e5 or size < 1e-4:
        return f"{value:.3e}"
    return f"{value:.{max(0, 3 - math.floor(math.log10(size)))}f}"
