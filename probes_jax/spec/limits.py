"""Series and bytes of a report, by family, and what of them is more than the plan's limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from probes_jax.spec.layout import Layout
from probes_jax.spec.online import stored_only
from probes_jax.spec.plan import Plan
from probes_jax.spec.readings import decoder_of

_SHOWN = 3  # families that a line names


@dataclasses.dataclass(frozen=True)
class Share:
    """Of one family in one program.

    Attributes:
        series: Metrics in a report.
        payload: Bytes of a report that go to the host.
    """

    series: int
    payload: int


def shares(layout: Layout) -> dict[str, Share]:
    """The share of each family in a report; a family is the first part of a metric's name."""
    series = count_families(decoder_of(layout).names)
    payload = dict.fromkeys(series, 0)
    for slot in layout.slots:
        payload[_family(layout.entries[slot.entry].key)] += 4 * slot.size
    return {family: Share(series[family], payload[family]) for family in series}


def count_families(names: Iterable[str]) -> dict[str, int]:
    """How many of the names each family has.

    >>> count_families(("act/a/rms", "act/b/rms", "grad/a/norm"))
    {'act': 2, 'grad': 1}
    """
    found: dict[str, int] = {}
    for name in names:
        found[_family(name)] = found.get(_family(name), 0) + 1
    return found


def count_stored(layout: Layout, plan: Plan) -> dict[str, int]:
    """How many series of each family the online writers are not given."""
    stored = stored_only(layout, plan.max_series)
    return count_families(sorted(stored.layers | stored.beyond))


def exceeded(layout: Layout, plan: Plan) -> tuple[str, ...]:
    """A sentence for each limit of the plan that a full report exceeds: by what, and what to change."""
    if layout.program != "full":
        return ()
    found = []
    payload = {family: share.payload for family, share in shares(layout).items()}
    if (total := sum(payload.values())) > plan.max_payload:
        found.append(
            f"a full report is {total:,} bytes, more than Plan(max_payload={plan.max_payload:_}): {_largest(payload)}. "
            "Everything is still measured and written; Plan(without=...) and Plan(exclude=...) leave out what is not "
            "read, or raise max_payload"
        )
    stored = stored_only(layout, plan.max_series)
    online = len(decoder_of(layout).names) - len(stored.layers | stored.beyond)
    if stored.beyond:
        found.append(
            f"the online writers would get {online + len(stored.beyond):,} series, Plan(max_series="
            f"{plan.max_series:_}) leaves them {online:,}: {_largest(count_families(stored.beyond))} series less. "
            "Those are in the run folder's store only; raise max_series to see them online"
        )
    if online > plan.max_series:
        found.append(
            f"the online writers get {online:,} series, more than Plan(max_series={plan.max_series:_}), since P0 is "
            "never left out: name fewer groups, or raise max_series"
        )
    return tuple(found)


def _largest(sizes: Mapping[str, int]) -> str:
    names = sorted(sizes, key=lambda family: -sizes[family])
    text = ", ".join(f"{name} {sizes[name]:,}" for name in names[:_SHOWN])
    return f"{text}, ..." if len(names) > _SHOWN else text


def _family(name: str) -> str:
    return name.split("/")[0]
