"""What `record()` costs the training thread."""

from __future__ import annotations

import tempfile
import time

import jax
import numpy as np

import probes_jax as pj
from benchmarks.figure import Figure, bootstrap
from benchmarks.step_time import SHAPES, _optimizer, loss_fn
from examples.decoder_linen import TransformerLM

COMMAND = "python -m benchmarks.run record"


def measure(steps: int = 120) -> list[Figure]:
    """Microseconds of `record()` while a real model trains and a real run folder is written."""
    batch_size, length, config = next(iter(SHAPES.values()))
    tokens = np.random.default_rng(0).integers(0, 256, (batch_size, length)).astype(np.int32)
    batch = {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, axis=1),
        "mask": np.ones((batch_size, length), np.float32),
        "source": np.zeros(batch_size, np.int32),
    }
    plan = pj.Plan(groups=("code", "docs", "law"), scan_every=20)
    state = pj.TrainState.create(model=TransformerLM(config), tx=_optimizer(), loss_fn=loss_fn, plan=plan, batch=batch)
    batch, taken = jax.device_put(batch), []
    with tempfile.TemporaryDirectory() as folder, pj.Recorder(folder, plan) as recorder:
        for _ in range(steps):
            state, report = pj.monitored_train_step(state, batch)
            start = time.perf_counter()
            recorder.record(report)
            taken.append((time.perf_counter() - start) * 1e6)
            jax.block_until_ready(report.buffer)
    value, low, high = bootstrap(np.array(taken[10:]))
    return [Figure("record() on the training thread", value, low, high, "us", "<= 100", value <= 100, COMMAND)]
