"""Which metrics of a step go to the event files: every signal and group summary, and the worst few layers.

A model with 48 layers has thousands of per-layer series: those go to the store. Event files get a bounded number of
tags (`Plan.max_series`) whose names are the same in every run:

    loss/mean, grad/norm, act/abs_max, ...        everything whose name is not one of a family of layers or shards
    top/act/abs_max/1 .. top/act/abs_max/5        the five largest layers, worst first
    top/act/abs_max/layers                        text: which layers these are
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from probes_jax.spec.catalog import REGISTRY
from probes_jax.spec.online import for_store_only
from probes_jax.spec.plan import Plan
from probes_jax.spec.readings import Readings
from probes_jax.spec.registry import Registry

# Family of per-layer metrics, and the statistic it is ranked by: the first of these that a report has.
RANKED = (("act", ("abs_max",)), ("grad", ("abs_max", "norm")), ("update", ("abs_max", "ratio", "norm")))


@dataclasses.dataclass(frozen=True)
class Selected:
    """What event files get of one step: numbers and Markdown, by tag."""

    scalars: dict[str, float]
    texts: dict[str, str]


@dataclasses.dataclass(frozen=True)
class _Ranking:
    tag: str  # top/<family>/<stat>
    columns: np.ndarray  # columns of the family's layers
    layers: tuple[str, ...]  # their names


@dataclasses.dataclass(frozen=True)
class _Columns:
    names: tuple[str, ...]  # kept alive: it is the cache key
    group: np.ndarray
    rankings: tuple[_Ranking, ...]


def _ranking(family: str, stats: tuple[str, ...], many: Mapping[str, int]) -> _Ranking | None:
    for stat in stats:
        found = [name for name in many if name.startswith(f"{family}/") and name.endswith(f"/{stat}")]
        if found:
            layers = tuple(name[len(family) + 1 : -len(stat) - 1] for name in found)
            return _Ranking(f"top/{family}/{stat}", np.array([many[name] for name in found]), layers)
    return None


class Selection:
    """Chooses the event files' metrics of each step.

    Args:
        worst: How many layers of each family are shown.
        registry: Which names are families of layers.
        max_series: See `Plan.max_series`.

    Raises:
        ValueError: `worst` is negative.
    """

    def __init__(self, worst: int = 5, registry: Registry = REGISTRY, max_series: int = Plan.max_series) -> None:
        if worst < 0:
            raise ValueError(f"worst must be 0 (no layers) or more, got {worst}")
        self._worst, self._registry, self._max_series = worst, registry, max_series
        self._cache: dict[int, _Columns] = {}

    def __call__(self, readings: Readings) -> Selected:
        """Scalars and texts of one step; absent metrics are left out."""
        columns = self._columns(readings.names)
        values, present = readings.values, readings.present
        shown = columns.group[present[columns.group]]
        scalars = {columns.names[i]: value for i, value in zip(shown, values[shown].tolist(), strict=True)}
        texts: dict[str, str] = {}
        for ranking in columns.rankings:
            order = self._order(values[ranking.columns], present[ranking.columns])
            for place, index in enumerate(order, 1):
                scalars[f"{ranking.tag}/{place}"] = float(values[ranking.columns[index]])
            text = "\n".join(f"{place}. `{ranking.layers[index]}`" for place, index in enumerate(order, 1))
            if text:
                texts[f"{ranking.tag}/layers"] = text
        return Selected(scalars, texts)

    def _order(self, values: np.ndarray, present: np.ndarray) -> list[int]:
        """Positions of the worst: NaN, then infinite, then the largest; ties keep the model's order."""
        key = np.where(np.isnan(values), np.inf, values)
        order = np.lexsort((np.arange(values.size), -key, ~np.isnan(values), ~present))
        return order[: min(self._worst, int(present.sum()))].tolist()

    def _columns(self, names: tuple[str, ...]) -> _Columns:
        found = self._cache.get(id(names))  # one tuple object per layout: comparing thousands of names costs more
        if found is None:
            stored = for_store_only(names, self._max_series, self._registry)
            many = {name: i for i, name in enumerate(names) if name in stored.layers}
            left_out = stored.layers | stored.beyond
            group = np.array([i for i, name in enumerate(names) if name not in left_out], dtype=np.intp)
            rankings = (_ranking(family, stats, many) for family, stats in RANKED)
            if len(self._cache) >= 64:
                self._cache.clear()
            found = self._cache[id(names)] = _Columns(names, group, tuple(r for r in rankings if r is not None))
        return found
