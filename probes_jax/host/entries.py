"""Reads the JSON entries of a run's folder: attempts, series, columns, events, coverage."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any

from probes_jax.host.damage import Damage
from probes_jax.host.store import Store
from probes_jax.spec.coverage import Coverage

_Fields = Mapping[str, type | UnionType]  # that an entry must have, and of which type


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One session of the run.

    Attributes:
        key: Its number as in the keys.
        end: Steps from this one on were done again by a later attempt; None when none were.
        entry: What the session wrote about itself; empty where that is damaged.
    """

    key: str
    end: int | None
    entry: dict[str, Any]

    def superseded(self, step: int) -> bool:
        return self.end is not None and step >= self.end


@dataclasses.dataclass(frozen=True)
class SeriesEntry:
    """What one program reported in one attempt with one list of columns, and where its arrays lie."""

    attempt: str
    program: str
    columns: str
    path: str


class Entries:
    """The entries of one run. Every call reads them anew, but for columns, which never change.

    An entry that is damaged is noted and left out: one that is no JSON object, lacks a key, or has something of another
    kind under it. Files that are not named as the run's own are are passed over.

    Args:
        store: Of the run's folder.
        damage: Where to note it.
    """

    def __init__(self, store: Store, damage: Damage) -> None:
        self._store = store
        self._damage = damage
        self.columns = functools.lru_cache(maxsize=None)(self._columns)

    def about(self) -> dict[str, Any] | None:
        """`entries/run.json`; None where there is none.

        Raises:
            ValueError: It is damaged.
        """
        about = self._store.read("entries/run.json")
        if not isinstance(about, dict | None):
            raise ValueError(f"it holds {about!r}, no object")
        return about

    def attempts(self) -> list[Attempt]:
        """Attempts in order; one ends where the earliest step of any later one begins."""
        out: list[Attempt] = []
        end: int | None = None
        for key in reversed(self._keys("entries/attempts/", "all attempts")):
            what = "the plan and the first step of an attempt"
            entry = self._entry(key, what, {"first_step": int | None}) or {}
            out.append(Attempt(_attempt(key), end, entry))
            first = entry.get("first_step")
            end = first if end is None else end if first is None else min(end, first)
        return out[::-1]

    def series(self) -> list[SeriesEntry]:
        """All series, in order."""
        known = [field.name for field in dataclasses.fields(SeriesEntry)[1:]]
        found = self._all("series", "a series", dict.fromkeys(known, str))
        return [SeriesEntry(attempt, *(entry[name] for name in known)) for attempt, entry in found]

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """(attempt, event) of all events, in order."""
        return list(self._all("events", "an event", {"step": int, "time": int | float, "kind": str, "payload": dict}))

    def coverage(self) -> list[dict[str, Any]]:
        """`attempt`, `program`, `layout` and `coverage` of every program of every attempt, in order."""
        out, what = [], "what of a program was seen"
        for key in self._keys("entries/coverage/", what):
            entry = self._entry(key, what, {"program": str, "layout": str, "points": list, "missing": list})
            if entry is None:
                continue
            try:
                found = {"attempt": int(_attempt(key)), "program": entry["program"], "layout": entry["layout"]}
                out.append(found | {"coverage": Coverage.from_json(entry)})
            except (KeyError, TypeError, ValueError) as error:
                self._damage.note(key, what, error)
        return out

    def metrics(self, columns: str) -> dict[str, Any]:
        """What the registry said about the metrics of some columns."""
        return self._columns_entry(columns).get("metrics", {})

    def _columns(self, columns: str) -> dict[str, int]:
        """Names of metrics and their places."""
        return {name: index for index, name in enumerate(self._columns_entry(columns).get("names", ()))}

    def _columns_entry(self, columns: str) -> dict[str, Any]:
        return self._entry(f"entries/columns/{columns}.json", "every series with these columns", {"names": list}) or {}

    def _all(self, kind: str, what: str, fields: _Fields) -> Iterator[tuple[str, dict[str, Any]]]:
        """(attempt, entry) of all entries of a kind that are whole."""
        for key in self._keys(f"entries/{kind}/", f"all {kind}"):
            entry = self._entry(key, what, fields)
            if entry is not None:
                yield _attempt(key), entry

    def _keys(self, prefix: str, what: str) -> list[str]:
        """Keys of entries, sorted; none, and a note, where a file stands in the folder's place."""
        try:
            return [key for key in self._store.keys(prefix) if _attempt(key).isdecimal()]
        except ValueError as error:  # tensorstore's, for everything
            self._damage.note(prefix, what, error)
            return []

    def _entry(self, key: str, what: str, fields: _Fields) -> dict[str, Any] | None:
        """A JSON entry that is there and has these fields, of these types; None, and a note, if it is damaged."""
        try:
            entry = dict(self._store.read(key))
            for name, kind in fields.items():
                if name not in entry:
                    raise ValueError(f"it has no {name!r}")
                if not isinstance(entry[name], kind):
                    raise ValueError(f"its {name!r} is {entry[name]!r}")
            return entry
        except (ValueError, TypeError) as error:
            self._damage.note(key, what, error)
            return None


def _attempt(key: str) -> str:
    """The number of the attempt in a key: `entries/<kind>/<attempt>/...` or `entries/attempts/<attempt>.json`."""
    return key.split("/")[2].removesuffix(".json")
