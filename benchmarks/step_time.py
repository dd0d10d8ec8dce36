"""Step time of the light and the full program against the unmonitored step, with an A/A row beside them."""

from __future__ import annotations

import jax
import numpy as np

import probes_jax as pj
from benchmarks.figure import Figure, bootstrap, interleave
from examples.decoder_linen import Decoder, DecoderConfig
from examples.demo import loss_fn, make_optimizer
from probes_jax.step.program import step_program

COMMAND = "python -m benchmarks.run step_time"
SHAPES = {"small": (8, 64), "demo": (16, 128)}


def _programs(shape: tuple[int, int]) -> dict[str, object]:
    """Freshly compiled steps that keep their own state: two plain ones, light, full."""
    batch_size, length = shape
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (batch_size, length)).astype(np.int32)
    batch = {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, axis=1),
        "mask": np.ones((batch_size, length), np.float32),
        "source": rng.integers(0, 3, batch_size).astype(np.int32),
    }
    plan = pj.Plan(groups=("code", "docs", "law"))
    state = pj.TrainState.create(
        model=Decoder(DecoderConfig()), tx=make_optimizer(1000), loss_fn=loss_fn, plan=plan, batch=batch
    )
    batch = jax.device_put(batch)
    runs = {}
    for name, program in (("A", "off"), ("A again", "off"), ("light", "light"), ("full", "full")):
        # A new function object, so that jit compiles it anew: one compile is one draw.
        step = jax.jit(
            lambda s, c, b, program=program: step_program(state.settings, program, s, c, b), donate_argnums=1
        )
        holder = {"core": jax.tree.map(lambda x: x.copy(), state.core), "step": 0}

        def run(step=step, holder=holder) -> None:
            core, report = step(np.int32(holder["step"]), holder["core"], batch)
            jax.block_until_ready((core, report.buffer))
            holder["core"], holder["step"] = core, holder["step"] + 1

        run()
        run()
        runs[name] = run
    return runs


def measure(rounds: int = 25, compiles: int = 3) -> list[Figure]:
    """Ratios to the unmonitored step, over several compiles and shapes."""
    figures = []
    for shape_name, shape in SHAPES.items():
        ratios: dict[str, list[np.ndarray]] = {"A again": [], "light": [], "full": []}
        base = []
        for index in range(compiles):
            taken = interleave(_programs(shape), rounds, seed=index)
            base.append(taken["A"])
            for name, values in ratios.items():
                values.append(taken[name] / taken["A"])
        titles = {"A again": "plain step against itself (A/A)", "light": "light step / plain step", "full": "full step / plain step"}
        for name, values in ratios.items():
            value, low, high = bootstrap(np.concatenate(values))
            target, met = ("<= 1.02", value <= 1.02) if name == "light" else ("none", None)
            figures.append(Figure(f"{titles[name]}, {shape_name} decoder {shape}", value, low, high, "ratio", target, met, COMMAND))
        light = np.concatenate(ratios["light"])
        full = np.concatenate(ratios["full"])
        value, low, high = bootstrap((99 * light + full) / 100)
        figures.append(
            Figure(f"mean step with a scan every 100, {shape_name} decoder {shape}", value, low, high, "ratio", "<= 1.03", value <= 1.03, COMMAND)
        )
        value, low, high = bootstrap(np.concatenate(base) * 1e3)
        figures.append(Figure(f"plain step, {shape_name} decoder {shape}", value, low, high, "ms", "none", None, COMMAND))
    return figures
