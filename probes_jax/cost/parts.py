"""The parts of what a plan measures, each as the plan without it: a family of metrics, or a point."""

from __future__ import annotations

import dataclasses
import re

from probes_jax.observe.chosen import means
from probes_jax.spec.plan import FAMILIES, Plan

_ROWS = {  # the names that tell of a family, where they are not `<family>/<path>/{stat}`
    "param": "param/.*{stat}",
    "router": "router/",
    "logits": "logits/.*{stat}",
    "second_moment": "opt/second_moment/",
    "noise": "grad/microbatch_norm",
}


def parts_of(by: str | None, plan: Plan, names: list[str], points: str) -> dict[str, Plan]:
    """The plan without one part, for each part that one of these names is of.

    Args:
        by: `"family"`, `"point"`, or None for no parts.
        plan: The plan.
        names: What a program reports, `{stat}` for the statistic.
        points: For `"point"`, which of them: a regular expression, read as a word of `Plan.include` is.

    Raises:
        ValueError: There are points, and none of them is meant.

    Example:
        >>> names = ["act/block[0]/mlp/{stat}", "act/block[1]/mlp/{stat}", "act/head/{stat}"]
        >>> list(parts_of("point", Plan(), names, "block[*]"))
        ['block[*]/mlp']
    """
    if by == "family":
        rows = {f: _ROWS.get(f, rf"{f}/.+/{{stat}}") for f in FAMILIES}
        found = [family for family, row in rows.items() if any(re.match(row, name) for name in names)]
        return {family: dataclasses.replace(plan, without=(*plan.without, family)) for family in found}
    if by == "point":
        layers = _points(names)
        chosen = [point for point in layers if _is_meant(points, point, layers[point])]
        if layers and not chosen:
            raise ValueError(
                f"points={points!r} matches no observed point; there are {', '.join(list(layers)[:8])}, ..."
            )
        # A scanned model's point has the star in its name, an unrolled one's the number.
        written = {point: re.escape(point).replace(r"\[\*\]", r"\[(\*|\d+)\]") for point in chosen}
        return {p: dataclasses.replace(plan, exclude=(*plan.exclude, f"^{written[p]}$")) for p in chosen}
    return {}


def _points(names: list[str]) -> dict[str, list[str]]:
    """The points of `act/block[3]/mlp/{stat}` and so on, `block[*]/mlp` for all layers, each with its layers' names."""
    found: dict[str, list[str]] = {}
    for name in names:
        if name.startswith(("act/", "grad_act/")):
            layer = name.split("/", 1)[1].rsplit("/", 1)[0]
            found.setdefault(re.sub(r"\[\d+\]", "[*]", layer), []).append(layer)
    return found


def _is_meant(points: str, point: str, layers: list[str]) -> bool:
    """The layers of a point are left out together, so all of them have to be meant."""
    return means(points, point) or all(means(points, layer) for layer in layers)
