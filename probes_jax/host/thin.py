"""What is left of a report that waits too long to be read: the words behind its P0 values."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from probes_jax.spec.layout import HEADER, Entry, Layout
from probes_jax.spec.metric import Priority
from probes_jax.spec.online import priority_of
from probes_jax.spec.readings import decoder_of
from probes_jax.spec.summary import KINDS, SummaryKind


class Thin(NamedTuple):
    """The P0 part of a report, a report itself.

    Attributes:
        buffer: uint32 `[layout.size]` or `[T, layout.size]`, on the host.
        layout: What is where in it.
    """

    buffer: np.ndarray
    layout: Layout


def thin(buffer: Any, layout: Layout) -> Thin | None:
    """Keeps the words of a report that its P0 values are made of. Decoded, they are the same values.

    It looks at every name of a layout once; then it copies words, which takes microseconds.

    Args:
        buffer: uint32 `[size]` or `[T, size]`, on the device or the host.
        layout: What is where in it.

    Returns:
        The P0 part; None where the device still computes the report, or has failed to.
    """
    try:
        if not getattr(buffer, "is_ready", _always)():
            return None
        kept = _kept(layout)
        return Thin(np.take(np.asarray(buffer), kept.words, axis=-1), kept.layout)
    except Exception:  # a failed computation, a deleted buffer: whatever device and runtime raise
        return None


def _always() -> bool:
    return True


class _Kept(NamedTuple):
    layout: Layout
    words: np.ndarray  # [layout.size], where each lies in the whole report


@functools.lru_cache(maxsize=64)
def _kept(layout: Layout) -> _Kept:
    decoder = decoder_of(layout)
    needed = decoder.measured_for(name for name in decoder.names if priority_of(name) is Priority.P0)
    entries, origins = [], []
    for index, entry in enumerate(layout.entries):
        kind = KINDS[entry.kind]
        stats = tuple(stat for stat in entry.stats or kind.stats if not needed.isdisjoint(entry.names(stat)))
        if stats:
            entries.append(Entry(_smallest(kind, stats).name, entry.labels, stats))
            origins.append(index)
    kept = Layout(layout.program, tuple(entries))
    places = {
        (slot.entry, slot.reduce): slot.offset + np.arange(slot.size).reshape(slot.shape) for slot in layout.slots
    }
    words = [np.arange(HEADER)]
    for slot in kept.slots:
        rows = places[origins[slot.entry], slot.reduce]
        columns = KINDS[layout.entries[origins[slot.entry]].kind].columns
        leaves = [leaf for leaf in KINDS[kept.entries[slot.entry].kind].leaves if leaf.reduce is slot.reduce]
        words.append(np.column_stack([rows[:, columns[leaf.name][1]] for leaf in leaves]).ravel())
    return _Kept(kept, np.concatenate(words))


def _smallest(kind: SummaryKind, stats: tuple[str, ...]) -> SummaryKind:
    """An absolute maximum alone needs a third of what the moments beside it need."""
    extreme = KINDS["extreme"]
    return extreme if {*extreme.columns} <= {*kind.columns} and {*stats} <= {*extreme.stats} else kind
