"""The one list of metrics, and the way from a reported name to its entry."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator

from probes_jax.spec.metric import MetricSpec


def _pattern(template: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", template)
    text = "".join(
        re.escape(part) if index % 2 == 0 else (".+" if part == "path" else "[^/]+") for index, part in enumerate(parts)
    )
    return re.compile(text)


class Registry:
    """Metric entries by name template. Iterates in the order of registration."""

    def __init__(self, specs: Iterable[MetricSpec] = ()) -> None:
        self._specs: dict[str, MetricSpec] = {}
        self._patterns: list[tuple[int, re.Pattern[str], MetricSpec]] = []
        self._cached_find = functools.lru_cache(maxsize=65536)(self._find)
        for spec in specs:
            self.add(spec)

    def add(self, spec: MetricSpec) -> None:
        """Registers an entry. Raises `ValueError` if the template is already taken."""
        if spec.name in self._specs:
            raise ValueError(f"metric {spec.name!r} is registered twice; give one of them another name")
        self._specs[spec.name] = spec
        if "{" in spec.name:
            literal = len(re.sub(r"\{\w+\}", "", spec.name))
            self._patterns.append((literal, _pattern(spec.name), spec))
            self._patterns.sort(key=lambda item: -item[0])  # the most literal template wins
        self._cached_find.cache_clear()

    def _find(self, name: str) -> MetricSpec | None:
        if name in self._specs:
            return self._specs[name]
        for _, pattern, spec in self._patterns:
            if pattern.fullmatch(name):
                return spec
        return None

    def find(self, name: str) -> MetricSpec | None:
        """The entry of a reported name, or None. The most literal template wins."""
        return self._cached_find(name)

    def __getitem__(self, name: str) -> MetricSpec:
        spec = self.find(name)
        if spec is None:
            raise KeyError(f"no metric is registered for {name!r}; `probes metrics` lists all templates")
        return spec

    def __iter__(self) -> Iterator[MetricSpec]:
        return iter(self._specs.values())

    def __len__(self) -> int:
        return len(self._specs)
