"""What of a run's folder could not be read: named, warned about once, left out; the rest is read all the same."""

from __future__ import annotations

import warnings

LOST = "is missing or damaged, or was never flushed"  # a store of which nothing can be read


class DamagedRun(UserWarning):
    """Part of a run's folder cannot be read, and is left out."""


class Damage:
    """What a reader came across.

    Args:
        root: The run's folder.

    Attributes:
        found: What was said, each text once.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self.found: list[str] = []

    def note(self, place: str, lost: str, error: Exception) -> None:
        """Warns that something in `place` cannot be read; of the same trouble only once.

        Args:
            place: A file, or the arrays of a series, below the run's folder.
            lost: What is left out because of it.
            error: Why.
        """
        text = (
            f"{place} of run {self._root!r} is damaged ({_reason(error)}). Left out: {lost}. "
            "Everything else can be read; put the file back from a copy of the run if there is one"
        )
        if text not in self.found:
            self.found.append(text)
            warnings.warn(text, DamagedRun, stacklevel=2)


def _reason(error: Exception) -> str:
    """An error's own words, without the open request that tensorstore appends.

    >>> _reason(ValueError("DATA_LOSS: Error reading 'c/1' [tensorstore_spec='...']"))
    "DATA_LOSS: Error reading 'c/1'"
    """
    return str(error).split(" [tensorstore_spec", 1)[0] or type(error).__name__
