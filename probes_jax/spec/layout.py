"""Where every number of a report lies in its one packed buffer.

    words [0, HEADER)   format, step, fresh, program
    then                all sum-leaves (float32 bits), all max-leaves (float32 bits), all raw words

The layout is static: it is known when the step is traced, travels beside the buffer, and is written once per run.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from typing import Any

from probes_jax.spec.summary import KINDS, Reduce

FORMAT = 1
HEADER = 4  # format, step, fresh (0: this program did not run on that step), program (index into PROGRAMS)
PROGRAMS = ("off", "light", "full")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One summary of the report.

    Attributes:
        kind: Key of `KINDS`.
        labels: One metric name per row, with `{stat}` where the statistic's name goes. A summary of a stack of
            layers has one row per layer.
        stats: Which statistics of the kind are reported; empty means all.
    """

    kind: str
    labels: tuple[str, ...]
    stats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"entry kind {self.kind!r} is unknown; known kinds: {', '.join(KINDS)}")
        if not self.labels:
            raise ValueError(f"entry of kind {self.kind!r} has no label; give one per row")
        unknown = set(self.stats) - set(KINDS[self.kind].stats)
        if unknown:
            raise ValueError(f"kind {self.kind!r} has no statistic {sorted(unknown)}; it has {KINDS[self.kind].stats}")

    @property
    def key(self) -> str:
        """Unique name of the entry inside a layout."""
        return self.labels[0]

    def names(self, stat: str) -> tuple[str, ...]:
        return tuple(label.replace("{stat}", stat) for label in self.labels)


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where the leaves of one entry and one reduction lie: one row per label, one column per number, from `offset`."""

    entry: int
    reduce: Reduce
    offset: int
    shape: tuple[int, int]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The entries of a report and where their leaves lie."""

    program: str
    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        if self.program not in PROGRAMS:
            raise ValueError(f"program {self.program!r} is unknown; known: {PROGRAMS}")
        keys = [entry.key for entry in self.entries]
        twice = {key for key in keys if keys.count(key) > 1} if len(set(keys)) < len(keys) else ()
        if twice:
            raise ValueError(f"two entries of one report share the name {sorted(twice)[0]!r}; names must be unique")

    def __hash__(self) -> int:
        return self._hash  # thousands of names: hashed once

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.program, self.entries))

    @functools.cached_property
    def slots(self) -> tuple[Slot, ...]:
        """All leaves in buffer order: sums, then maxima, then raw words."""
        slots, offset = [], HEADER
        for reduce in (Reduce.SUM, Reduce.MAX, Reduce.RAW):
            for index, entry in enumerate(self.entries):
                width = KINDS[entry.kind].width(reduce)
                if width:
                    slots.append(Slot(index, reduce, offset, (len(entry.labels), width)))
                    offset += slots[-1].size
        return tuple(slots)

    @functools.cached_property
    def size(self) -> int:
        """Number of 32-bit words of the buffer."""
        return self.slots[-1].offset + self.slots[-1].size if self.slots else HEADER

    def section(self, reduce: Reduce) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.slots if slot.reduce is reduce)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "program": self.program,
            "entries": [[e.kind, list(e.labels), list(e.stats)] for e in self.entries],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Layout:
        if data.get("format") != FORMAT:
            raise ValueError(f"report layout has format {data.get('format')!r}, this version reads {FORMAT}")
        return cls(
            data["program"], tuple(Entry(k, tuple(labels), tuple(stats)) for k, labels, stats in data["entries"])
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        """Twelve hex digits that change when any name, kind or order changes."""
        return hashlib.sha256(json.dumps(self.to_json()).encode()).hexdigest()[:12]
