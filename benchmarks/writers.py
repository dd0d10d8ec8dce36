"""Scalars per second of the event writers, with all values of a step in one call."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import probes_jax as pj
from benchmarks.figure import Figure, bootstrap

COMMAND = "python -m benchmarks.run writers"
SCALARS = 100
OURS, CLU = "EventWriter", "CLU's SummaryWriter"


def _rate(writer: Any, steps: int) -> float:
    """Scalars per second of interpreter time until everything is flushed."""
    values = {f"group/metric_{index}": float(index) for index in range(SCALARS)}
    writer.write_scalars(0, values)
    writer.flush()
    start = time.perf_counter()
    for step in range(1, steps):
        writer.write_scalars(step, values)
    writer.flush()
    return SCALARS * (steps - 1) / (time.perf_counter() - start)


def measure(rounds: int = 7) -> list[Figure]:
    """`pj.EventWriter` and, where TensorFlow is installed, CLU's `SummaryWriter`, interleaved."""
    makers: dict[str, tuple[Callable[[str], Any], int]] = {OURS: (lambda folder: pj.EventWriter(folder), 500)}
    try:
        from clu.metric_writers import SummaryWriter
    except ImportError:
        print("TensorFlow is not installed: CLU's SummaryWriter is not measured")
    else:
        makers[CLU] = (lambda folder: SummaryWriter(folder), 20)
    rates: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(rounds):
        for name, (make, steps) in makers.items():
            with tempfile.TemporaryDirectory() as folder:
                writer = make(folder)
                rates[name].append(_rate(writer, steps))
                writer.close()
    figures = [
        _figure(f"{name}: scalars per second", np.array(rate), "1/s", 5e5 if name == OURS else None)
        for name, rate in rates.items()
    ]
    if CLU in rates:  # what was measured side by side: a busy moment hits both
        ratio = np.array(rates[OURS]) / np.array(rates[CLU])
        figures.append(_figure(f"{OURS} over {CLU}: scalars per second", ratio, "ratio", 50))
    return figures


def _figure(title: str, samples: np.ndarray, unit: str, target: float | None) -> Figure:
    value, low, high = bootstrap(samples)
    wanted, met = ("", None) if target is None else (f">= {target:.0f}", value >= target)
    return Figure(title, value, low, high, unit, wanted, met, COMMAND)
