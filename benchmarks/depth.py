"""Whether the light program's share of the step stays the same as a scanned decoder gets deeper."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import probes_jax as pj
from benchmarks.decoder import Config, Decoder, loss_fn, optimizer
from benchmarks.figure import Figure, bootstrap, interleave
from benchmarks.step_time import fresh_programs

COMMAND = "python -m benchmarks.run depth"
LAYERS = (6, 24, 96)
BATCH, LENGTH, WIDTH = 8, 64, 128


def measure(rounds: int = 20) -> list[Figure]:
    """Ratio of the light step to the plain one by the number of layers, and its growth from the least to the most."""
    figures, samples = [], {}
    for layers in LAYERS:
        config = Config(vocabulary=256, width=WIDTH, layers=layers, heads=4, dtype=jnp.float32)
        tokens = np.random.default_rng(0).integers(0, 256, (BATCH, LENGTH)).astype(np.int32)
        batch = {"tokens": tokens, "targets": np.roll(tokens, -1, axis=1), "mask": np.ones((BATCH, LENGTH), np.float32)}
        state = pj.TrainState.create(
            model=Decoder(config), tx=optimizer(), loss_fn=loss_fn, plan=pj.Plan(), batch=batch
        )
        taken = interleave(fresh_programs(state, jax.device_put(batch), {"A": "off", "light": "light"}), rounds)
        samples[layers] = taken["light"] / taken["A"]
        title = f"light step / plain step, {layers} scanned layers of {WIDTH}, batch {BATCH} x {LENGTH}"
        figures.append(Figure(title, *bootstrap(samples[layers]), "ratio", "", None, COMMAND))
    value, low, high = bootstrap(samples[LAYERS[-1]] / np.median(samples[LAYERS[0]]))
    title = f"light ratio at {LAYERS[-1]} layers / at {LAYERS[0]}"
    return [*figures, Figure(title, value, low, high, "ratio", "interval holds 1, or less", low <= 1, COMMAND)]
