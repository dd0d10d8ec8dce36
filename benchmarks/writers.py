"""Scalars per second of the event writers, with all values of a step in one call."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import numpy as np

import probes_jax as pj
from benchmarks.figure import Figure, bootstrap

COMMAND = "python -m benchmarks.run writers"
SCALARS = 100


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
    makers = {"EventWriter": (lambda folder: pj.EventWriter(folder), 500)}
    try:
        from clu.metric_writers import SummaryWriter
    except ImportError:
        print("TensorFlow is not installed: CLU's SummaryWriter is not measured")
    else:
        makers["CLU's SummaryWriter"] = (lambda folder: SummaryWriter(folder), 20)
    rates: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(rounds):
        for name, (make, steps) in makers.items():
            with tempfile.TemporaryDirectory() as folder:
                writer = make(folder)
                rates[name].append(_rate(writer, steps))
                writer.close()
    figures = []
    for name, values in rates.items():
        value, low, high = bootstrap(np.array(values))
        target, met = (">= 500000", value >= 5e5) if name == "EventWriter" else ("", None)
        figures.append(Figure(f"{name}: scalars per second", value, low, high, "1/s", target, met, COMMAND))
    return figures
