"""What each stage of the optimizer's chain makes of the gradient, where a plan asks for it."""

from __future__ import annotations

from typing import Any

from probes_jax.observe.collect import UNSEEN, Collector
from probes_jax.signals.measured import Measured, measured
from probes_jax.signals.parameters import subtract
from probes_jax.stats.explicit import summarize_where_it_lies
from probes_jax.stats.moments import summarize_direction
from probes_jax.step.objective import Notes
from probes_jax.step.select import flatten
from probes_jax.step.settings import Settings
from probes_jax.step.update import Core

APPLIED = "applied"


def measure_stages(
    settings: Settings, collector: Collector, gradients: Any, before: Core, after: Core, notes: Notes
) -> list[Measured]:
    """Norm, absolute maximum and cosine to the gradient, after every stage and of what was applied.

    Args:
        settings: What does not change.
        collector: What was collected while the optimizer ran.
        gradients: What the optimizer was given.
        before: State before the update.
        after: State after it.
        notes: Gets the reason for every stage that is missing.
    """
    raw = flatten(gradients)
    found = {name: _joined(trees) for name, trees in collector.stages.items()}
    applied = APPLIED if APPLIED not in found else f"{APPLIED}~2"
    found[applied] = subtract(flatten(after.params), flatten(before.params))
    items = []
    for name, updates in found.items():
        rows = [
            summarize_where_it_lies(summarize_direction, info.split, updates[path], raw[path])
            for path, info in settings.infos.items()
            if not info.frozen and path in updates
        ]
        if rows:
            items.append(measured(f"opt/stage/{name}/{{stat}}", *rows))
    missing = collector.missing if collector.stages or collector.missing else {"": UNSEEN}
    notes.missing.update({f"opt/stage/{name}".rstrip("/"): reason for name, reason in missing.items()})
    return items


def _joined(trees: list[Any]) -> dict[Any, Any]:
    """Groups of parameters with a stage of one name, together."""
    return {path: leaf for tree in trees for path, leaf in flatten(tree).items()}
