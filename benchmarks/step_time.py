"""Step time of the light and the full program against the unmonitored step, with an A/A row beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax

import probes_jax as pj
from benchmarks.figure import Figure, bootstrap, interleave
from examples.decoder_linen import Config, TransformerLM
from probes_jax.step.program import step_program

COMMAND = "python -m benchmarks.run step_time"
# name: (batch, length, model). Two CPU cores step through them in a tenth of a second, and in one or two.
SHAPES = {
    "4 layers of 128, batch 8 x 128": (8, 128, Config(width=128, layers=4, heads=4, hidden=512)),
    "6 layers of 512, batch 8 x 256": (8, 256, Config(length=256, width=512, layers=6, heads=8, hidden=2048)),
}


def loss_fn(model, batch, rngs):
    logits = model(batch["tokens"])
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return pj.Loss(nll=nll, mask=batch["mask"], group=batch["source"])


def _optimizer():
    return pj.chain(
        ("clip", optax.clip_by_global_norm(1.0)),
        ("adam", optax.scale_by_adam(b2=0.95)),
        ("decay", optax.add_decayed_weights(0.1)),
        ("lr", optax.scale_by_learning_rate(1e-3)),
    )


def make_state(
    batch_size: int, length: int, config: Config, **measured: Any
) -> tuple[pj.TrainState, dict[str, jax.Array]]:
    """The state before the first step of one of the shapes, and a batch on the device; `measured` goes to the plan."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (batch_size, length)).astype(np.int32)
    batch = {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, axis=1),
        "mask": np.ones((batch_size, length), np.float32),
        "source": rng.integers(0, 3, batch_size).astype(np.int32),
    }
    plan = pj.Plan(groups=("code", "docs", "law"), **measured)
    state = pj.TrainState.create(model=TransformerLM(config), tx=_optimizer(), loss_fn=loss_fn, plan=plan, batch=batch)
    return state, jax.device_put(batch)


def fresh_programs(state: pj.TrainState, batch: Any, programs: dict[str, str]) -> dict[str, Callable[[], None]]:
    """Freshly compiled steps that keep their own state, by the name of each and the program that it is."""
    runs = {}
    for name, program in programs.items():
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


PROGRAMS = {"A": "off", "A again": "off", "light": "light", "full": "full"}
TITLES = {
    "A again": "plain step against itself (A/A)",
    "light": "light step / plain step",
    "full": "full step / plain step",
}
TARGETS = {"light": 1.01, "full": 1.05, "mean": 1.01}  # upper ends of the intervals, for the larger shape


def measure(rounds: int = 20, compiles: int = 3) -> Iterator[Figure]:
    """Ratios to the unmonitored step, over several compiles and shapes. Ten minutes."""
    for name, shape in SHAPES.items():
        targets = TARGETS if shape[2].width == 512 else {}
        ratios: dict[str, list[np.ndarray]] = {key: [] for key in TITLES}
        base = []
        for index in range(compiles):
            taken = interleave(
                fresh_programs(*make_state(*shape), PROGRAMS),
                rounds if shape[2].width < 512 else rounds // 2,
                seed=index,
            )
            base.append(taken["A"])
            for key, values in ratios.items():
                values.append(taken[key] / taken["A"])
        yield Figure(f"plain step, {name}", *bootstrap(np.concatenate(base) * 1e3), "ms", "", None, COMMAND)
        for key, values in ratios.items():
            yield ratio(f"{TITLES[key]}, {name}", np.concatenate(values), targets.get(key))
        mean = (99 * np.concatenate(ratios["light"]) + np.concatenate(ratios["full"])) / 100
        yield ratio(f"mean step with a scan every 100, {name}", mean, targets.get("mean"))


def ratio(title: str, samples: np.ndarray, target: float | None, command: str = COMMAND) -> Figure:
    value, low, high = bootstrap(samples)
    wanted, met = ("", None) if target is None else (f"all <= {target}", high <= target)
    return Figure(title, value, low, high, "ratio", wanted, met, command)
