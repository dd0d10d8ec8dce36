"""One TensorBoard event file: made at the first event, named so that readers take the files of a folder in order."""

from __future__ import annotations

import itertools
import os
import re
import socket
import time
from collections.abc import Callable
from typing import Any

from probes_jax.host.run_folder import is_url
from probes_jax.host.writers.protos import version_event
from probes_jax.host.writers.record import RecordFile, gfile

_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\.")
_serial = itertools.count()


def event_files(logdir: str) -> list[str]:
    """Names of the event files in a folder, in the order in which readers take them."""
    try:
        names = gfile().listdir(logdir) if is_url(logdir) else os.listdir(logdir)
    except Exception:  # the folder does not exist yet; each file system says so in its own way
        return []
    return sorted(name for name in (os.path.basename(str(n)) for n in names) if _NAME.match(name))


class EventFile:
    """Appends `Event` protos; the file is created by the first of them.

    Args:
        logdir: Local folder or URL.
        suffix: Appended to the file name.
        flush_seconds: The first event this long after the last flush flushes what came before it.
        clock: Seconds since the epoch.
    """

    def __init__(self, logdir: str, suffix: str, flush_seconds: float, clock: Callable[[], float] = time.time) -> None:
        self._logdir = logdir if is_url(logdir) else os.path.abspath(logdir)  # the working directory may change
        self._suffix, self._flush_seconds, self._clock = suffix, flush_seconds, clock
        self._file: RecordFile | None = None
        self._flushed = 0.0

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def _path(self, earlier: list[str]) -> str:
        # Readers take files by name, which starts with the time in seconds: a session that resumes within a second,
        # or on a machine whose clock is behind, must still come after the files that are there.
        stamp = max([int(self._clock()), *(int(name.split(".")[3]) + 1 for name in earlier)])
        host = socket.gethostname()
        name = f"events.out.tfevents.{stamp:010d}.{host}.{os.getpid()}.{next(_serial)}{self._suffix}"
        return f"{self._logdir.rstrip('/')}/{name}"

    def _open(self) -> RecordFile:
        if is_url(self._logdir):
            gfile().makedirs(self._logdir)
        else:
            os.makedirs(self._logdir, exist_ok=True)
        file = RecordFile(self._path(event_files(self._logdir)))
        now = self._clock()
        file.append(version_event(now).SerializeToString())
        self._flushed = now
        return file

    def append(self, event: Any) -> None:
        """Writes one event, at the time of the clock.

        Raises:
            OSError: The file cannot be created or written.
        """
        event.wall_time = now = self._clock()
        if self._file is not None and now - self._flushed >= self._flush_seconds:
            self.flush()  # before the event is taken: a caller that tries a failed write again writes it once
        self._file = self._file or self._open()
        self._file.append(event.SerializeToString())

    def flush(self) -> None:
        """Hands what was written to the operating system.

        Raises:
            FileNotFoundError: The file was deleted or moved; the next event starts a new one.
        """
        self._flushed = self._clock()
        if self._file is not None:
            try:
                self._file.flush()
            except FileNotFoundError:
                self._file = None
                raise

    def close(self) -> None:
        """Flushes and closes. The next event would start a new file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
