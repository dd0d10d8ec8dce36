"""Seconds until a step can run: tracing and compiling the plain, the light and the full program."""

from __future__ import annotations

import time

import jax
import numpy as np

from benchmarks.figure import Figure, bootstrap
from benchmarks.step_time import SHAPES, make_state
from probes_jax.step.program import step_program

COMMAND = "python -m benchmarks.run compile_time"
TITLES = {"off": "plain", "light": "light", "full": "full"}
# The first shape is the model of examples/demo.py, batch included.
MODELS = {name: f"{name}{' (make demo)' if place == 0 else ''}" for place, name in enumerate(SHAPES)}


def _seconds(state, batch, program: str) -> float:
    """One compile from nothing: neither JAX's own caches nor another program's traces help."""
    jax.clear_caches()
    step = jax.jit(lambda s, c, b: step_program(state.settings, program, s, c, b), donate_argnums=1)
    start = time.perf_counter()
    step.lower(np.int32(0), state.core, batch).compile()
    return time.perf_counter() - start


def measure(compiles: int = 5, seed: int = 0) -> list[Figure]:
    """Compile seconds of each program of each model, the programs in random order."""
    if jax.config.jax_compilation_cache_dir:
        raise SystemExit("compile_time measures compiles: unset JAX_COMPILATION_CACHE_DIR")
    rng = np.random.default_rng(seed)
    figures = []
    for shape, name in MODELS.items():
        state, batch = make_state(*SHAPES[shape])
        taken: dict[str, list[float]] = {program: [] for program in TITLES}
        for _ in range(compiles):
            for program in rng.permutation(list(TITLES)):
                taken[program].append(_seconds(state, batch, str(program)))
        for program, title in TITLES.items():
            value, low, high = bootstrap(np.array(taken[program]))
            figures.append(Figure(f"compiling the {title} program, {name}", value, low, high, "s", "", None, COMMAND))
    return figures
