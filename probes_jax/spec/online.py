"""Which series of a report the online writers get: event files, or a CLU writer. The store gets every one."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

from probes_jax.spec.catalog import REGISTRY
from probes_jax.spec.layout import Layout
from probes_jax.spec.metric import Cadence, Priority
from probes_jax.spec.readings import decoder_of
from probes_jax.spec.registry import Registry

BESIDE = 64  # series kept free for P0 of scans, the worst layers, and what the recorder measures of itself
_MANY = ("{path}", "{index}")  # template words that stand for every layer, or every shard
_LAYERED = ("act/", "grad_act/", "grad/", "param/", "update/", "residual/", "router/")
_SELDOM = {Cadence.EVERY_100: 1, Cadence.EVERY_EVALUATION: 2, Cadence.ON_DEMAND: 3}  # the others: every step


def priority_of(name: str) -> Priority:
    """The registry's priority of a reported name; a name without an entry is P1."""
    entry = REGISTRY.find(name)
    return Priority.P1 if entry is None else entry.priority


def is_one_of_many(name: str, registry: Registry = REGISTRY) -> bool:
    """Whether a metric is that of one layer or shard, of which a model has any number.

    >>> is_one_of_many("act/block[3]/mlp/rms"), is_one_of_many("act/abs_max")
    (True, False)
    """
    spec = registry.find(name)
    if spec is not None:
        return any(word in spec.name for word in _MANY)
    return name.startswith(_LAYERED) and name.count("/") >= 2


class Stored(NamedTuple):
    """The series of a report that the online writers are not given.

    Attributes:
        layers: Those of single layers and shards.
        beyond: Others, for which there was no room.
    """

    layers: frozenset[str]
    beyond: frozenset[str]


def for_store_only(names: Iterable[str], most: int, registry: Registry = REGISTRY) -> Stored:
    """The series of a report that the online writers are not given.

    Those of single layers and shards never go there. The others go as long as there is room, family by family (one
    entry of the registry): P0 in any case, then P1, then P2; of one priority what is measured most often first, then
    the smallest family. So a series goes online in all reports or in none. `sys/...` always goes.

    Args:
        names: All metrics of a report.
        most: Series that the online writers get at most. `BESIDE` of them are for what not every report has.
        registry: Which names are families of layers.
    """
    layers, beyond, families = set[str](), set[str](), dict[tuple[Priority, int, str], list[str]]()
    for name in names:
        if is_one_of_many(name, registry):
            layers.add(name)
        elif not name.startswith("sys/"):
            families.setdefault(_family(name, registry), []).append(name)
    room = most - BESIDE
    for priority, seldom, template in sorted(families, key=lambda key: (*key[:2], len(families[key]), key[2])):
        family = families[priority, seldom, template]
        if priority is Priority.P0 and seldom:
            continue
        room -= len(family)
        if room < 0 and priority is not Priority.P0:
            beyond.update(family)
    return Stored(frozenset(layers), frozenset(beyond))


def _family(name: str, registry: Registry) -> tuple[Priority, int, str]:
    """Priority, how seldom it is measured, and the name that a whole family shares."""
    spec = registry.find(name)
    return (Priority.P1, 0, name) if spec is None else (spec.priority, _SELDOM.get(spec.cadence, 0), spec.name)


@functools.lru_cache(maxsize=64)
def stored_only(layout: Layout, most: int) -> Stored:
    """`for_store_only` of the reports of a layout, found once."""
    return for_store_only(decoder_of(layout).names, most)
