"""TensorBoard event files without TensorFlow, with the methods of CLU's `MetricWriter`."""

from __future__ import annotations

import collections
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from probes_jax.host.run_folder import check_folder
from probes_jax.host.writers.event_file import EventFile, event_files
from probes_jax.host.writers.media import audio_strings, histogram_buckets, image_strings
from probes_jax.host.writers.number import read_array, read_number, read_step
from probes_jax.host.writers.protos import (
    Event,
    SummaryMetadata,
    audio_metadata,
    histogram_metadata,
    hparams_event,
    image_metadata,
    make_tensor_proto,
    scalar_metadata,
    start_event,
    text_metadata,
)
from probes_jax.spec.catalog import REGISTRY

_log = logging.getLogger(__name__)

Item = tuple[str, Any, Any]  # tag, tensor, metadata or None


def describe_metric(tag: str) -> str:
    """What TensorBoard shows beside a chart: definition and unit from the registry; empty for an unknown name."""
    spec = REGISTRY.find(tag)
    return f"{spec.symbol} = {spec.definition} [{spec.unit}]; {spec.timing}" if spec else ""


class EventWriter:
    """Writes TensorBoard event files, as CLU's `SummaryWriter` does, but without TensorFlow.

    All values of one call travel in one event. Scalars are float32, as everywhere in TensorBoard; the run's store
    keeps them exact. One writer per folder: give an evaluation its own, or the curves of the two interleave.

    Args:
        logdir: Folder or URL (`gs://`, through fsspec). Created, like the file, by the first write: a process that
            writes nothing leaves nothing behind.
        filename_suffix: Appended to the name of the event file.
        resume_step: First step of a resumed run. Readers then hide what an earlier session wrote for this and later
            steps; the files keep both.
        flush_seconds: The first write this long after the last flush flushes what came before it.
        clock: Seconds since the epoch.
        describe: From a tag to the text shown beside its chart.

    Attributes:
        dropped: What could not be written, by kind.

    Raises:
        NotADirectoryError: The folder cannot be created. Nothing else fails before the first write.
        PermissionError: The folder cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     writer = EventWriter(folder)
    ...     writer.write_scalars(3, {"loss/mean": 2.5})
    ...     writer.close()
    """

    def __init__(
        self,
        logdir: str | os.PathLike[str],
        *,
        filename_suffix: str = "",
        resume_step: int | None = None,
        flush_seconds: float = 10.0,
        clock: Callable[[], float] = time.time,
        describe: Callable[[str], str] = describe_metric,
    ) -> None:
        self.logdir = os.fspath(logdir)
        check_folder(self.logdir, "logdir")
        self.dropped: collections.Counter[str] = collections.Counter()
        self._file = EventFile(self.logdir, filename_suffix, flush_seconds, clock)
        self._resume = None if resume_step is None else read_step(resume_step)
        self._clock, self._describe = clock, describe
        self._described: set[str] = set()
        self._started = self._closed = False
        self._lock = threading.RLock()

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Writes numbers of any type: all of them in one event, or none.

        Raises:
            TypeError: A value is no single real number; the message names its key.
        """
        numbers = [(tag, read_number(tag, value)) for tag, value in scalars.items()]
        event = Event(step=read_step(step))
        add = event.summary.value.add
        with self._lock:
            if not self._file.is_open:
                self._described.clear()
            new = [tag for tag, _ in numbers if tag not in self._described]
            for tag, number in numbers:
                add(tag=tag, simple_value=number)
            if new:
                self._add_metadata(event, set(new))
            self._append(event)
            self._described.update(new)

    def write_summaries(self, step: int, values: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> None:
        """Writes arrays as they are, for a plugin named by `metadata` (a proto or its bytes, by tag)."""
        items = []
        for tag, value in values.items():
            found = (metadata or {}).get(tag)
            data = found if isinstance(found, bytes) or found is None else found.SerializeToString()
            items.append((tag, _tensor_data(tag, value), data and SummaryMetadata.FromString(data)))
        self._write(step, items)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Writes Markdown."""
        self._write(step, [(tag, str(text), text_metadata()) for tag, text in texts.items()])

    def write_histograms(
        self, step: int, arrays: Mapping[str, Any], num_buckets: Mapping[str, int] | None = None
    ) -> None:
        """Writes distributions (default 30 buckets). Elements that are NaN or infinite have no bucket; their number
        is written beside it as `<tag>/nonfinite_count`.
        """
        items: list[Item] = []
        counts = {}
        for tag, value in arrays.items():
            array = read_array(tag, value)
            finite = array[np.isfinite(array)]
            if finite.size < array.size:
                counts[f"{tag}/nonfinite_count"] = array.size - finite.size
            tensor = histogram_buckets(finite, (num_buckets or {}).get(tag))
            items.append((tag, tensor, histogram_metadata()))
        self._write(step, items)
        if counts:
            self.write_scalars(step, counts)

    def write_images(self, step: int, images: Mapping[str, Any]) -> None:
        """Writes images `[N, H, W, C]` or `[H, W, C]`: uint8, bool, or floats in [0, 1]."""
        metadata = image_metadata()
        self._write(
            step, [(tag, image_strings(tag, read_array(tag, value)), metadata) for tag, value in images.items()]
        )

    def write_audios(self, step: int, audios: Mapping[str, Any], *, sample_rate: int) -> None:
        """Writes audio `[N, T, C]`, floats in [-1, 1], as 16-bit WAV."""
        metadata = audio_metadata()
        items = [
            (tag, audio_strings(tag, read_array(tag, value), sample_rate), metadata) for tag, value in audios.items()
        ]
        self._write(step, items)

    def write_videos(self, step: int, videos: Mapping[str, Any]) -> None:
        """Drops videos, as CLU's `SummaryWriter` does: TensorBoard shows none. Counted, and said once."""
        if not self.dropped["videos"]:
            _log.warning("event files hold no videos: %s dropped at step %s (said once)", sorted(videos), step)
        self.dropped["videos"] += len(videos)

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Writes hyper-parameters; nested ones get dotted names, unusual types their text. Call once."""
        event = hparams_event(hparams, self._clock())
        with self._lock:
            self._append(event, start=False)

    def restart(self, step: int) -> None:
        """Says that the run goes on from `step`: readers hide what was written before for this and later steps."""
        event = start_event(read_step(step))
        with self._lock:
            # Twice: one of TensorBoard's readers takes the first of a run for its beginning and hides nothing.
            self._append(event, start=False)
            self._append(event, start=False)
            self._started = True

    def continues(self) -> bool:
        """Whether an earlier session's files are in the folder and no `restart` was written after them."""
        return not self._started and self._resume is None and not self._file.is_open and bool(event_files(self.logdir))

    def flush(self) -> None:
        """Hands what was written to the operating system: it survives the death of the process."""
        with self._lock:
            self._file.flush()

    def close(self) -> None:
        """Flushes and closes. A second call does nothing; a write after it raises `ValueError`."""
        with self._lock:
            self._closed = True
            self._file.close()

    def _write(self, step: int, items: Iterable[Item]) -> None:
        event = Event(step=read_step(step))
        for tag, tensor, metadata in items:
            event.summary.value.add(tag=tag, tensor=make_tensor_proto(tensor), metadata=metadata)
        with self._lock:
            self._append(event)

    def _add_metadata(self, event: Any, new: set[str]) -> None:
        for value in event.summary.value:
            if value.tag in new:
                value.metadata.CopyFrom(scalar_metadata(self._describe(value.tag)))

    def _append(self, event: Any, start: bool = True) -> None:
        if self._closed:
            raise ValueError("this EventWriter is closed; make a new one to write more")
        if event.HasField("summary") and not event.summary.value:
            return
        if start and self._resume is not None and not self._started:
            self.restart(self._resume)
        self._file.append(event)


def _tensor_data(tag: str, value: Any) -> Any:
    if isinstance(value, (str, bytes)):
        return value
    array = np.asarray(value)
    return array if array.dtype.kind in "SUO" else read_array(tag, value)
