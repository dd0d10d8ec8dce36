"""Reading an explosion: from the output inwards, the first layer whose gradient jumps; and where a NaN began."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np

from probes_jax.diagnose.order import forward_order
from probes_jax.spec.readings import Readings

JUMP = 10.0  # times its own median: what counts as a jump
LEAST = 3  # earlier values that a median is taken of

Earlier = Callable[[str], np.ndarray]  # metric name -> its earlier values, oldest first


@dataclasses.dataclass(frozen=True)
class Place:
    """One point on the way back.

    Attributes:
        point: Its name.
        value: Absolute maximum of its gradient.
        times: That over its own median; None without enough history, infinite for a value that is not finite.
    """

    point: str
    value: float
    times: float | None

    def __str__(self) -> str:
        if not math.isfinite(self.value):
            return f"grad_act/{self.point}: {self.value}"
        against = "" if self.times is None else f", {format_times(self.times)} its median"
        return f"grad_act/{self.point}: {self.value:.4g}{against}"


@dataclasses.dataclass(frozen=True)
class Walk:
    """What one scan tells about where a trouble began.

    Attributes:
        step: The step that was scanned.
        chain: The points from the output inwards.
        suspect: The first of them that jumps against its own history; None where none does.
        forward: The first point in forward order with a NaN or infinite element; None where all are finite.
        backward: The same of the gradients, from the output inwards.
    """

    step: int
    chain: tuple[Place, ...]
    suspect: Place | None
    forward: str | None
    backward: str | None

    def lines(self) -> list[str]:
        """What an engineer reads; empty where nothing is suspicious."""
        out = []
        if self.forward is not None:
            out.append(f"act/{self.forward}: first tensor with a NaN or infinity in the forward pass")
        if self.backward is not None:
            out.append(f"grad_act/{self.backward}: first tensor with a NaN or infinity in the backward pass")
        if self.suspect is not None and math.isfinite(self.suspect.value):
            out.append(f"{self.suspect}, first in the chain")
        return out


def walk(readings: Readings, earlier: Earlier | None = None, *, jump: float = JUMP) -> Walk:
    """Walks the gradients of one scan from the output inwards.

    Args:
        readings: A step that scanned activations (`report.readings()[0]`).
        earlier: Earlier values of a metric by name; without it nothing is a jump, a NaN is still found.
        jump: Times its own median from which a gradient counts as jumped.

    Raises:
        ValueError: The step did not scan activations.
    """
    values = readings.scalars()
    forward = forward_order(readings.names, "act")
    backward = forward_order(readings.names, "grad_act")[::-1]
    if not any(f"act/{point}/abs_max" in values for point in forward):
        raise ValueError(
            f"step {readings.step} measured no activations ({readings.program} program); take one that is a multiple "
            "of Plan.scan_every"
        )
    chain = tuple(_places(backward, values, earlier))
    suspect = next((place for place in chain if place.times is not None and place.times >= jump), None)
    return Walk(
        readings.step,
        chain,
        suspect,
        _first_nonfinite(forward, values, "act"),
        _first_nonfinite(backward, values, "grad_act"),
    )


def times_median(value: float, past: np.ndarray) -> float | None:
    """A value over the median of its past; infinite for one that is not finite, None where the past tells nothing.

    >>> times_median(41.0, np.array([1.0, 0.5, 2.0, np.nan])), times_median(41.0, np.ones(2))
    (41.0, None)
    """
    if not math.isfinite(value):
        return math.inf
    past = np.asarray(past, np.float64)
    past = past[np.isfinite(past)]
    if past.size < LEAST or not (median := float(np.median(past))):
        return None
    return value / median


def format_times(times: float) -> str:
    """How many times, as people read it.

    >>> format_times(0.0139), format_times(41.03), format_times(27000.4), format_times(3.3e32)
    ('0.0139x', '41x', '27,000x', '3.3e+32x')
    """
    return f"{times:,.0f}x" if 999.5 <= times < 1e9 else f"{times:.3g}x"


def is_jump(value: float, past: np.ndarray, jump: float = JUMP) -> bool:
    """Whether a value is out of proportion to its own past, or not finite."""
    times = times_median(value, past)
    return times is not None and times >= jump


def _places(points: list[str], values: Mapping[str, float], earlier: Earlier | None) -> list[Place]:
    found = []
    for point in points:
        name = f"grad_act/{point}/abs_max"
        if name in values:
            past = np.zeros(0) if earlier is None else earlier(name)
            found.append(Place(point, values[name], times_median(values[name], past)))
    return found


def _first_nonfinite(points: list[str], values: Mapping[str, float], family: str) -> str | None:
    bad = (point for point in points if not math.isfinite(values.get(f"{family}/{point}/abs_max", 0.0)))
    return next(bad, None)
