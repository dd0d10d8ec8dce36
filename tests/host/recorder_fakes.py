"""Reports made without a train step, and sinks that behave badly."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import numpy as np

from probes_jax.spec.layout import FORMAT, HEADER, PROGRAMS, Entry, Layout
from probes_jax.spec.summary import ABSENT_BITS, KINDS, Reduce

P0 = ("loss/mean", "loss/worst_shard", "grad/norm", "grad/clip_rate", "alert/co_spike", "logits/abs_max")


def light_layout(scalars=P0, counters=("alert/co_spike/count", "data/tokens_total")) -> Layout:
    entries = [Entry("scalar", (name,)) for name in scalars] + [Entry("counter", (name,)) for name in counters]
    return Layout("light", tuple(entries))


def full_layout(layers=3) -> Layout:
    rows = tuple(f"act/block[{i}]/mlp/{{stat}}" for i in range(layers))
    return Layout("full", (Entry("moments", rows), *light_layout().entries))


LIGHT = light_layout()
FULL = full_layout()
GUARDED = light_layout(counters=("alert/guard/stopped",))


@dataclasses.dataclass
class FakeReport:
    buffer: Any
    layout: Layout


def buffer_of(step: int, layout: Layout = LIGHT, values: dict[str, float | None] | None = None, fresh=True):
    """A packed buffer: scalars are `step` plus their place, unless given (None: absent)."""
    values = values or {}
    buffer = np.zeros(layout.size, np.uint32)
    buffer[:HEADER] = FORMAT, step, fresh, PROGRAMS.index(layout.program)
    for place, slot in enumerate(layout.slots):
        entry = layout.entries[slot.entry]
        value = values.get(entry.labels[0], float(step + place))
        words = slice(slot.offset, slot.offset + slot.size)
        if entry.kind == "scalar":
            buffer[words] = ABSENT_BITS if value is None else np.float32(value).view(np.uint32)
        elif entry.kind == "counter":
            buffer[words] = int(value) & 0xFFFFFFFF, int(value) >> 32
        else:
            block = np.ones(slot.shape, np.float32)
            if slot.reduce is Reduce.SUM and "count" in KINDS[entry.kind].columns:
                block[:, KINDS[entry.kind].columns["count"][1]] = 4, 0, 0, 0
            buffer[words] = block.view(np.uint32).ravel()
    return buffer


def report(step: int, layout: Layout = LIGHT, **values: float | None) -> FakeReport:
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return FakeReport(buffer_of(step, layout, named), layout)


class ListSink:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.readings, self.flushed, self.closed = [], 0, 0
        self.threads: set[threading.Thread] = set()

    def write(self, readings) -> None:
        self.threads.add(threading.current_thread())
        self.readings.append(readings)

    def flush(self) -> None:
        self.flushed += 1

    def close(self) -> None:
        self.closed += 1

    @property
    def steps(self) -> list[int]:
        return [readings.step for readings in self.readings]


class FailingSink(ListSink):
    """Raises from every call until `healed`."""

    def __init__(self) -> None:
        super().__init__()
        self.healed = False
        self.calls = 0

    def write(self, readings) -> None:
        self.calls += 1
        if not self.healed:
            raise OSError(28, "No space left on device")
        super().write(readings)

    def flush(self) -> None:
        if not self.healed:
            raise OSError(28, "No space left on device")
        super().flush()


class HangingSink(ListSink):
    """Never comes back from its first write until `release` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()
        self.entered = threading.Event()

    def write(self, readings) -> None:
        self.entered.set()
        self.release.wait(60)
        super().write(readings)


class DeviceBuffer:
    """A buffer whose computation is not finished until `ready` is set."""

    def __init__(self, array: np.ndarray, ready: threading.Event | None = None) -> None:
        self._array, self._ready = array, ready
        self.shape, self.dtype, self.nbytes = array.shape, array.dtype, array.nbytes
        self.is_fully_addressable = True
        self.copies = 0

    def copy_to_host_async(self) -> None:
        self.copies += 1

    def is_ready(self) -> bool:
        return self._ready is None or self._ready.is_set()

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        if self._ready is not None:
            self._ready.wait(60)
        return self._array


def wait_for(condition, seconds=20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()
