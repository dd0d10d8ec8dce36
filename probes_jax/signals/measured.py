"""A summary with the names it is reported under."""

from __future__ import annotations

import dataclasses

from probes_jax.spec.layout import Entry
from probes_jax.stats.summary import Summary, merge_all


@dataclasses.dataclass(frozen=True)
class Measured:
    """One entry of a report before it is reduced over the mesh.

    Attributes:
        entry: Names and kind.
        parts: Summaries to be merged. They may be sharded over different mesh axes.
        gather: Keep the shards apart: the entry has one label per row instead of one per stacked layer.
        hidden: Reduced like the others and read in the graph, but no part of the report.
    """

    entry: Entry
    parts: tuple[Summary, ...]
    gather: bool = False
    hidden: bool = False


def measured(
    labels: str | tuple[str, ...],
    *parts: Summary,
    stats: tuple[str, ...] = (),
    gather: bool = False,
    hidden: bool = False,
) -> Measured:
    """Names one or more summaries of one kind; parts that are sharded alike are merged here."""
    by_axes: dict[tuple[str, ...], list[Summary]] = {}
    for part in parts:
        by_axes.setdefault(part.axes, []).append(part)
    merged = tuple(merge_all(group) for group in by_axes.values())
    names = (labels,) if isinstance(labels, str) else tuple(labels)
    return Measured(Entry(merged[0].kind, names, stats), merged, gather, hidden)
