"""Backward gain: by how much a block makes the gradient larger on its way back."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp

from probes_jax.observe.point import Point
from probes_jax.step.pack import Scalars
from probes_jax.step.reduce import Reduced

_NUMBERED = re.compile(r"(.*)\[(\d+)\]")


def name_gains(blocks: list[tuple[Point, tuple[int, ...]]], reduced: Reduced) -> Scalars:
    """`||gradient at a block's input|| / ||gradient at its output||` of blocks that are numbered in a row.

    What a block is given is what the one before it returned, so nothing is measured again. The first block has none:
    what it is given is no module's output.

    Args:
        blocks: Points whose role is the residual stream and whose gradients were measured, with their layers.
        reduced: All merged leaves of the step.
    """
    squares: dict[str, jax.Array] = {}
    for point, layers in blocks:
        labels = [label.removesuffix("/{stat}") for label in point.labels(layers, "grad_act")]
        key = f"{labels[0]}/{{stat}}"
        total = reduced.leaf(key, "sq_hi") + reduced.leaf(key, "sq_lo") + reduced.leaf(key, "m2")
        squares |= {label: total[index] for index, label in enumerate(labels)}
    pairs = []
    for label in squares:
        found = _NUMBERED.fullmatch(label)
        before = f"{found[1]}[{int(found[2]) - 1}]" if found else ""
        if before in squares:
            pairs.append((label, before))
    if not pairs:
        return {}
    after, before = (jnp.stack([squares[pair[at]] for pair in pairs]) for at in (0, 1))
    gain = jnp.sqrt(before) / jnp.where(after > 0, jnp.sqrt(after), 1.0)
    return {tuple(f"{label}/gain" for label, _ in pairs): (gain, ~(after <= 0))}
