"""One figure of docs/performance.md, and how a ratio of interleaved timings becomes one."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

RESULTS = Path(__file__).parent / "results.json"


@dataclasses.dataclass(frozen=True)
class Figure:
    """A measured value with its interval.

    Attributes:
        figure: What was measured.
        value: Median.
        low: Lower end of the 95 % bootstrap interval.
        high: Upper end.
        unit: Unit of the three.
        target: What was aimed at, as text.
        met: Whether the value reaches the target; None where there is none.
        command: How to measure it again.
    """

    figure: str
    value: float
    low: float
    high: float
    unit: str
    target: str
    met: bool | None
    command: str


def machine() -> str:
    """What the figures were measured on, in words."""
    cores = os.cpu_count()
    return f"{cores} CPU cores, {platform.machine()}, Python {platform.python_version()}, jax {jax.__version__}"


def save(figures: list[Figure]) -> None:
    """Replaces the figures of this machine's Python and jax in results.json, keeps the others."""
    here = machine()
    old = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    names = {figure.figure for figure in figures}
    kept = [row for row in old if row["machine"] != here or row["figure"] not in names]
    rows = kept + [{**dataclasses.asdict(figure), "machine": here} for figure in figures]
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


def bootstrap(samples: np.ndarray, rounds: int = 2000, seed: int = 0) -> tuple[float, float, float]:
    """Median and 95 % bootstrap interval of the median."""
    rng = np.random.default_rng(seed)
    medians = np.median(rng.choice(samples, (rounds, len(samples))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(np.median(samples)), float(low), float(high)


def interleave(runs: dict[str, Callable[[], None]], rounds: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Seconds of each run in each round; the order changes every round, so that drift hits all alike."""
    rng = np.random.default_rng(seed)
    names = list(runs)
    taken = {name: np.zeros(rounds) for name in names}
    for round_ in range(rounds):
        for name in rng.permutation(names):
            start = time.perf_counter()
            runs[name]()
            taken[name][round_] = time.perf_counter() - start
    return taken
