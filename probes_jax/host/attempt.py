"""One session of a run: its number in the folder, and the entries under that number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from probes_jax.host.health import log
from probes_jax.host.run_folder import FORMAT, number_key
from probes_jax.host.store import SeriesArrays, Store


class Attempt:
    """Claims the next free number of a run when the first entry is written.

    Args:
        store: Opens the run's folder.
        definition: What the attempt says about itself.
        clock: Seconds since the epoch.
        least: No lower number is claimed.

    Attributes:
        key: The number as in the keys; None until it is claimed.
        first_step: The first step of the attempt; None until there is one.
    """

    def __init__(
        self, store: Callable[[], Store], definition: Mapping[str, Any], clock: Callable[[], float], least: int
    ) -> None:
        self._store = store
        self._definition = definition
        self._clock = clock
        self._least = least
        self._told: int | None = None  # the first step that the entry says
        self._events = 0
        self.key: str | None = None
        self.first_step: int | None = None

    def claim(self) -> str:
        """The number of this attempt.

        Raises:
            ValueError: The run's format is another one.
        """
        store = self._store()
        if self.key is None:
            store.create("entries/run.json", {"format": FORMAT, "created": self._clock()})
            found = store.read("entries/run.json")["format"]
            if found != FORMAT:
                raise ValueError(
                    f"run {store.root!r} has format {found}, this version writes {FORMAT}; use another folder"
                )
            names = [key.rsplit("/", 1)[1].removesuffix(".json") for key in store.keys("entries/attempts/")]
            taken = max((int(name) for name in names if name.isdecimal()), default=0)  # others are not ours
            number = max(taken + 1, self._least)
            while not store.create(f"entries/attempts/{number_key(number)}.json", self._entry()):
                number += 1
            self.key, self._told = number_key(number), self.first_step
        elif self._told != self.first_step:  # events came before the first step
            store.write(f"entries/attempts/{self.key}.json", self._entry())
            self._told = self.first_step
        return self.key

    def save_event(self, event: Mapping[str, Any]) -> None:
        """Writes an event behind those before it."""
        self._store().write(f"entries/events/{self.claim()}/{number_key(self._events, 8)}.json", event)
        self._events += 1

    def superseded(self, first_step: int) -> dict[str, int]:
        """The last step that an attempt from `first_step` on supersedes; nothing where there is none. Says so."""
        store = self._store()
        try:
            reached = _reached(store, self.claim())
        except Exception as error:  # an older attempt that cannot be read must not keep this one from being written
            log.warning("the earlier attempts in %s could not be read (%s)", store.root, error)
            return {}
        if reached is None or reached < first_step:
            return {}
        log.warning("steps %d..%d of an earlier attempt in %s are superseded", first_step, reached, store.root)
        return {"superseded_through": reached}

    def _entry(self) -> dict[str, Any]:
        return {"created": self._clock(), "first_step": self.first_step, **self._definition}


def _reached(store: Store, before: str) -> int | None:
    """The last step that the attempts before one hold, without what they already did again."""
    reached: int | None = None
    for key in store.keys("entries/attempts/"):
        attempt = key.rsplit("/", 1)[1].removesuffix(".json")
        if attempt >= before:
            break
        first = store.read(key)["first_step"]
        steps = [] if reached is None else [reached if first is None else min(reached, first - 1)]
        for series in store.keys(f"entries/series/{attempt}/"):
            last = SeriesArrays(store, store.read(series)["path"]).last_step()
            steps += [] if last is None else [last]
        reached = max(steps, default=None)
    return reached
