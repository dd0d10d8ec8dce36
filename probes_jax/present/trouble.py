"""One line of what was unusual, and what its rules read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from probes_jax.present.first_screen import format_value
from probes_jax.present.state import DETECTORS, History, read
from probes_jax.spec.plan import Plan

APART = 32  # steps between two movements that are two troubles


@dataclasses.dataclass(frozen=True)
class Unusual:
    """One kind of trouble.

    Attributes:
        what: What happened.
        steps: Where it happened, rising; empty if it has no place.
        detail: How bad.
        signals: Names of the signals that moved; empty for what is no signal's own movement.
    """

    what: str
    steps: tuple[int, ...] = ()
    detail: str = ""
    signals: tuple[str, ...] = ()

    def __str__(self) -> str:
        at = f" at {format_steps(self.steps)}" if self.steps else ""
        return f"{self.what}{at}{f' ({self.detail})' if self.detail else ''}"


def format_steps(steps: Sequence[int], most: int = 6) -> str:
    """Steps as stretches, no more than `most` of them.

    >>> format_steps([3, 7, 8, 9, 40])
    'steps 3, 7-9, 40'
    """
    stretches = split(steps, 1)
    shown = [f"{part[0]:,}" if len(part) == 1 else f"{part[0]:,}-{part[-1]:,}" for part in stretches[:most]]
    more = f" and {len(stretches) - most} more stretches" if len(stretches) > most else ""
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(shown)}{more}"


def split(steps: Sequence[int], apart: int) -> list[Sequence[int]]:
    """Rising steps in stretches: no two neighbours in one are more than `apart` steps from each other.

    >>> split([3, 7, 8, 40], 4)
    [[3, 7, 8], [40]]
    """
    if not steps:
        return []
    cuts = [i for i in range(1, len(steps)) if steps[i] > steps[i - 1] + apart]
    return [steps[a:b] for a, b in zip([0, *cuts], [*cuts, len(steps)], strict=True)]


def measured(run: History, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of one metric, where there is a measurement."""
    steps, values, present = read(run, name)
    return steps[present], values[present]


def numbers(steps: np.ndarray) -> tuple[int, ...]:
    """Steps as plain integers."""
    return tuple(int(step) for step in steps)


def rises(run: History, name: str) -> tuple[tuple[int, ...], str]:
    """Where a running count rose, and by how much in all; a resumed run may count from 0 again."""
    steps, values = measured(run, name)
    rise = np.maximum(np.diff(values, prepend=0.0), 0.0)
    return numbers(steps[rise > 0]), f"{format_value(float(rise.sum()), 'count')} in all"


def spiked(run: History, plan: Plan) -> list[int]:
    """Steps at which a detector's score exceeded `theta`, rising."""
    found: set[int] = set()
    for signal in DETECTORS.values():
        steps, scores = measured(run, f"{signal}/spike/score")
        found.update(numbers(steps[scores > plan.theta]))
    return sorted(found)
