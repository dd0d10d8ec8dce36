"""From a report's buffer to named float64 values, on NumPy alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from probes_jax.spec.derive import derive
from probes_jax.spec.layout import FORMAT, HEADER, PROGRAMS, Layout
from probes_jax.spec.summary import KINDS, Reduce


@dataclasses.dataclass(frozen=True)
class Readings:
    """All metrics of one step.

    Attributes:
        step: The step they belong to.
        program: Which program measured them (`light` or `full`).
        names: Metric names; the same tuple object for every report of one layout.
        values: float64, one per name. NaN where absent and where NaN was measured; `present` tells them apart.
        present: Whether there is a measurement.
        which: For a worst-of metric, the label of the one that it is.
        wall_time: When the report reached the host, in seconds since the epoch; None where nobody looked at a clock.
    """

    step: int
    program: str
    names: tuple[str, ...]
    values: np.ndarray
    present: np.ndarray
    which: dict[str, str] = dataclasses.field(default_factory=dict)
    wall_time: float | None = None

    def items(self) -> Iterator[tuple[str, float]]:
        """(name, value) of every metric that was measured."""
        values = self.values.tolist()
        return ((self.names[i], values[i]) for i in np.flatnonzero(self.present))

    def scalars(self) -> dict[str, float]:
        return dict(self.items())

    def extended(
        self, names: tuple[str, ...], values: Sequence[float | None], wall_time: float | None = None
    ) -> Readings:
        """These readings and what the host measured for the same step.

        The joined names are again one tuple object for every report of a layout.

        Args:
            names: Names of the added metrics.
            values: One per name; None is absent.
            wall_time: When the report reached the host, in seconds since the epoch.

        Raises:
            ValueError: A name is already taken by the report, or the lengths differ.
        """
        if len(names) != len(values):
            raise ValueError(f"extended() got {len(names)} names and {len(values)} values; give one value per name")
        seen = np.array([value is not None for value in values], bool)
        added = np.array([np.nan if value is None else value for value in values], np.float64)
        return dataclasses.replace(
            self,
            names=_joined(self.names, names),
            values=np.concatenate([self.values, added]),
            present=np.concatenate([self.present, seen]),
            wall_time=self.wall_time if wall_time is None else wall_time,
        )


_JOINED: dict[tuple[int, tuple[str, ...]], tuple[tuple[str, ...], tuple[str, ...]]] = {}


def _joined(names: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
    """`names + more`, the same object each time, so that readers may cache on it."""
    key = (id(names), more)
    found = _JOINED.get(key)
    if found is None or found[0] is not names:
        taken = set(names) & set(more)
        if taken:
            raise ValueError(
                f"the report already holds a metric {sorted(taken)[0]!r}; the host measures it too: rename it"
            )
        if len(_JOINED) >= 256:
            _JOINED.clear()
        found = _JOINED[key] = (names, names + more)
    return found[1]


class Decoder:
    """Turns buffers of one layout into `Readings`. Build once per layout; `decoder_of` caches it."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        names: list[str] = []
        for entry in layout.entries:
            for stat in entry.stats or KINDS[entry.kind].stats:
                names.extend(entry.names(stat))
        self._measured = tuple(names)
        self._derived = derive(self._measured)
        self.names = self._measured + self._derived.names
        if len(set(self.names)) < len(self.names):
            seen: set[str] = set()
            twice = next(name for name in self.names if name in seen or seen.add(name))
            raise ValueError(f"two metrics of one report share the name {twice!r}; rename one of the modules or groups")

    def measured_for(self, names: Iterable[str]) -> set[str]:
        """The measured metrics that these metrics of the layout are, or are derived from."""
        derived, found = set(self._derived.names), set()
        for name in names:
            found |= {self._measured[c] for c in self._derived.sources(name)} if name in derived else {name}
        return found

    def decode(self, buffer: np.ndarray) -> Readings | None:
        """Readings of one buffer `[size]` of uint32, or None when no program ran on that step (stacked reports)."""
        buffer = np.ascontiguousarray(buffer, np.uint32)
        if buffer.shape != (self.layout.size,):
            raise ValueError(f"report buffer has shape {buffer.shape}, its layout says ({self.layout.size},)")
        version, step, fresh, program = (int(word) for word in buffer[:HEADER])
        if version != FORMAT:
            raise ValueError(f"report buffer has format {version}, this version reads {FORMAT}")
        if not fresh:
            return None
        leaves: list[dict[str, np.ndarray]] = [{} for _ in self.layout.entries]
        for slot in self.layout.slots:
            words = buffer[slot.offset : slot.offset + slot.size].reshape(slot.shape)
            block = words if slot.reduce is Reduce.RAW else words.view(np.float32)
            for name, (reduce, column) in KINDS[self.layout.entries[slot.entry].kind].columns.items():
                if reduce is slot.reduce:
                    leaves[slot.entry][name] = block[:, column]
        values, present = [], []
        for entry, found in zip(self.layout.entries, leaves, strict=True):
            with np.errstate(all="ignore"):  # what is not finite here was measured so
                columns = KINDS[entry.kind].finalize(found)
            for stat in entry.stats or KINDS[entry.kind].stats:
                value, seen = columns[stat]
                values.append(value)
                present.append(seen)
        flat = np.concatenate(values) if values else np.zeros(0)
        seen = np.concatenate(present) if present else np.zeros(0, bool)
        more, more_seen, which = self._derived.compute(flat, seen)
        flat, seen = np.concatenate([flat, more]), np.concatenate([seen, more_seen])
        return Readings(step, PROGRAMS[program], self.names, np.where(seen, flat, np.nan), seen, which)


@functools.lru_cache(maxsize=64)
def decoder_of(layout: Layout) -> Decoder:
    """The decoder of a layout, built once for each layout that is in use."""
    return Decoder(layout)
