"""One metric: name, symbol, unit, priority, cadence, reduction, timing, what it catches."""

from __future__ import annotations

import dataclasses
import enum


class Priority(enum.IntEnum):
    """Who looks at a metric, and what is dropped last when the host falls behind."""

    P0 = 0  # alert: may page somebody
    P1 = 1  # diagnose: opened when a P0 moves
    P2 = 2  # forensics: one investigation


class Cadence(enum.Enum):
    """When a metric is measured. `LIGHT` is every step, `FULL` adds the tensor scans."""

    EVERY_STEP = "every step"
    EVERY_1_10 = "every 1-10 steps"
    EVERY_100 = "every 100 steps"
    EVERY_EVALUATION = "every 0.5-2 % of training"
    ON_DEMAND = "on demand"


@dataclasses.dataclass(frozen=True)
class MetricSpec:
    """The registry's entry for one metric, or for one family of metrics.

    A name is a template: `{path}` stands for one or more segments (a module or parameter path),
    any other `{word}` for exactly one segment. `act/{path}/rms` covers `act/block[3]/mlp/rms`.

    Attributes:
        name: Template of the reported name.
        symbol: The symbol used in the definition, for example `G_2`.
        unit: Unit of the value; `1` for a ratio, `count` for a count.
        priority: See `Priority`.
        cadence: Default cadence.
        definition: The formula, in one line.
        reduction: Over what it is reduced, and how.
        timing: At which point of the step the quantity is taken.
        catches: The failure it helps to see.
        source: Where the definition comes from.
    """

    name: str
    symbol: str
    unit: str
    priority: Priority
    cadence: Cadence
    definition: str
    reduction: str
    timing: str
    catches: str
    source: str

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) in ("", None):
                raise ValueError(
                    f"MetricSpec {self.name!r}: field {field.name!r} is empty; every field must be filled in"
                )
