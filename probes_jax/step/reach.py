"""How much of the model each extra term of the loss trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from probes_jax.observe.roles import role_of
from probes_jax.signals.parameters import ParameterInfo
from probes_jax.spec.plan import Plan
from probes_jax.step.objective import Notes
from probes_jax.step.select import Path

TRAINS_NOTHING = (
    "loss/extra/{0} trains nothing: its gradient reaches no trained parameter. It comes out of jax.lax.stop_gradient, "
    "argmax or counts, or is multiplied by 0; compute it from what the model returns, with its gradient, or hand it "
    "back as pj.Loss(aux=...)"
)


def reach_of_extra(
    notes: Notes, params: Mapping[Path, Any], infos: Mapping[Path, ParameterInfo], plan: Plan
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Share of the trained elements that each term's gradient reaches, and of those of routers; by the metric's name.

    Args:
        notes: What the trace of the model found out.
        params: Trained parameters, or their shapes. Those that the optimizer never moves do not count.
        infos: What is known of each.
        plan: Says which modules are routers, where their names do not.

    Returns:
        The shares, and a sentence for each term that trains nothing.
    """
    routers = {point.path for point in (*notes.seen, *notes.left_out) if role_of(point, plan.roles) == "router"}
    sizes = {path: leaf.size for path, leaf in params.items() if not infos[path].frozen}
    of_routers = {path: size for path, size in sizes.items() if any(path[: len(own)] == own for own in routers)}
    found, idle = {}, []
    for name in notes.extra:
        for stat, of in (("reach", sizes), ("router_reach", of_routers)):
            if of:
                reached = sum(size for path, size in of.items() if name in notes.reach[path])
                found[f"loss/extra/{name}/{stat}"] = reached / sum(of.values())
        if found.get(f"loss/extra/{name}/reach") == 0:
            idle.append(TRAINS_NOTHING.format(name))
    return found, tuple(idle)
