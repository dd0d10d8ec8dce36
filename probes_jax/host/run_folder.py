"""Names of everything in a run's folder, and its version. See `docs/run_folder.md`."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from probes_jax.host.run_reader import Run

FORMAT = 1  # raised when a reader of the old format would misread the new one


def is_url(path: str) -> bool:
    """Whether `path` is a URL such as `gs://bucket/run`, and not a local path."""
    return "://" in path


def check_folder(path: str, argument: str = "folder") -> None:
    """Fails now, with a clear message, where a local `path` could not be created later. Creates nothing.

    Raises:
        NotADirectoryError: Part of the path is a file.
        PermissionError: The nearest existing folder is not writable.
    """
    if is_url(path):
        return
    nearest = os.path.abspath(path)
    while not os.path.lexists(nearest):
        nearest = os.path.dirname(nearest)
    if not os.path.isdir(nearest):
        raise NotADirectoryError(f"{argument} {path!r} cannot be created: {nearest!r} is not a folder; choose another")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(f"{argument} {path!r} cannot be written: no permission in {nearest!r}; choose another")


def is_still_at(path: str | os.PathLike[str], descriptor: int) -> bool:
    """Whether an open file is the one that `path` names: nobody has deleted, moved or replaced it."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False


def runs_in(path: str) -> list[str]:
    """Folders of runs in a local folder, or in the folders in it, sorted."""
    signs = [f"{deep}/{name}" for deep in ("*", "*/*") for name in ("entries/run.json", "flight/process_0.bin")]
    return sorted({str(sign.parents[1]) for pattern in signs for sign in pathlib.Path(path).glob(pattern)})


def number_key(number: int, digits: int = 6) -> str:
    """A number as part of a key, so that keys sort like numbers."""
    return f"{number:0{digits}d}"


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Where things lie in a run's folder. Touches nothing.

    Attributes:
        root: Local path, or URL (`gs://`, `s3://`) of the folder.

    >>> RunFolder("runs/demo").events
    'runs/demo/events'
    """

    root: str

    def __post_init__(self) -> None:
        root = os.fspath(self.root)
        object.__setattr__(self, "root", root if is_url(root) and root.endswith("://") else root.rstrip("/") or "/")

    def join(self, *parts: str) -> str:
        return "/".join((self.root.rstrip("/"), *parts))

    @property
    def events(self) -> str:
        """TensorBoard event files."""
        return self.join("events")

    @property
    def series(self) -> str:
        """The zarr arrays: every metric of every step."""
        return self.join("series")

    @property
    def entries(self) -> str:
        """JSON: definitions, and what happened when."""
        return self.join("entries")

    @property
    def flight(self) -> str:
        """Flight records, one for each process."""
        return self.join("flight")


def open_run(path: str | os.PathLike[str]) -> Run:
    """A reader of the run in `path`, also while the run is being written.

    Raises:
        FileNotFoundError: There is no run in this folder.
        ValueError: The run was written in a format that this version does not read.
    """
    from probes_jax.host.run_reader import Run

    return Run(os.fspath(path))
