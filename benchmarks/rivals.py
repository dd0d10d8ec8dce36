"""The same metrics as people write them today, against the light and the full step, in one process.

Rivals are hand-written optax steps of the same decoder. Each computes what it can of what the monitored step beside it
reports: no rival has the gradients of activations, so they are off here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import probes_jax as pj
from benchmarks.decoder import Config, Decoder, loss_fn, optimizer
from benchmarks.figure import Figure, bootstrap, interleave
from probes_jax.step.program import step_program

COMMAND = "python -m benchmarks.run rivals"
CONFIG = Config(vocabulary=1024, width=256, layers=4, heads=4, scan=False, remat=False, dtype=jnp.float32)
BATCH, LENGTH = 8, 128
SHAPE = f"decoder of 4 layers of 256, batch {BATCH} x {LENGTH}"
MODEL = Decoder(CONFIG)
# rival: (what it is, the monitored step that reports the same)
RIVALS = {
    "sow": ("every activation captured, jnp statistics of each, and of each gradient", "full"),
    "second call": ("norms of each gradient, parameter and update in a second jitted call", "light"),
    "optax.monitor": ("norms of each gradient and update by optax.monitor", "light"),
    "float": ("norms of each gradient, parameter and update, and one float() each", "record"),
}
OURS = {"light": "light step", "full": "full step, gradients of activations off", "record": "light step and record()"}

Run = Callable[[], None]


def statistics(x: jax.Array) -> dict[str, jax.Array]:
    """What a full step reports of a tensor, one jnp reduction after another."""
    finite = jnp.isfinite(x)
    return {
        "abs_max": jnp.max(jnp.where(finite, jnp.abs(x), -jnp.inf)),
        "rms": jnp.sqrt(jnp.mean(jnp.square(x))),
        "abs_mean": jnp.mean(jnp.abs(x)),
        "zero_fraction": jnp.mean(x == 0),
        "nan_count": jnp.sum(jnp.isnan(x)),
        "inf_count": jnp.sum(jnp.isinf(x)),
        "mean": jnp.mean(x),
        "std": jnp.std(x),
        "min": jnp.min(x),
        "max": jnp.max(x),
    }


def _norms(*trees: Any) -> Any:
    return jax.tree.map(jnp.linalg.norm, jax.tree.map(jnp.ravel, trees))


def _chain(*around: optax.GradientTransformation) -> optax.GradientTransformation:
    """The decoder's optimizer in plain optax, with a first and a last stage where they are given."""
    first, last = around or (optax.identity(), optax.identity())
    return optax.chain(
        first,
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b2=0.95),
        optax.add_decayed_weights(0.1),
        optax.scale_by_learning_rate(3e-4),
        last,
    )


def _train(tx: Any, capture: bool, params: Any, opt_state: Any, batch: Any) -> tuple[Any, ...]:
    """One hand-written step: parameters, optimizer state, loss, gradients, updates, captured activations."""

    def loss(params: Any) -> tuple[jax.Array, Any]:
        logits, seen = MODEL.apply(
            {"params": params}, batch["tokens"], capture_intermediates=capture, mutable=["intermediates"]
        )
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.sum(batch["mask"] * nll) / jnp.sum(batch["mask"]), seen

    (value, seen), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    updates, opt_state = tx.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value, gradients, updates, seen


def _plain(tx: Any, params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any]:
    params, opt_state, value, *_ = _train(tx, False, params, opt_state, batch)
    return params, opt_state, value


def _sow(tx: Any, params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any]:
    new, opt_state, value, gradients, updates, seen = _train(tx, True, params, opt_state, batch)
    return new, opt_state, (value, jax.tree.map(statistics, (seen, gradients)), _norms(params, updates))


def _trees(tx: Any, params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any]:
    params, opt_state, _, gradients, updates, _ = _train(tx, False, params, opt_state, batch)
    return params, opt_state, (gradients, updates)


def _in_step(tx: Any, params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any]:
    new, opt_state, value, gradients, updates, _ = _train(tx, False, params, opt_state, batch)
    return new, opt_state, (value, _norms(gradients, params, updates))


def _hand_written(step: Callable[..., Any], params: Any, batch: Any, tx: Any, after: Callable[..., Any]) -> Run:
    """Runs one rival; `after(params, metrics)` is what its loop does with what the step returned."""
    jitted = jax.jit(lambda params, opt_state, batch: step(tx, params, opt_state, batch), donate_argnums=(0, 1))
    held = [jax.tree.map(jnp.copy, params), tx.init(params)]

    def run() -> None:
        held[0], held[1], metrics = jitted(*held, batch)
        jax.block_until_ready((held, after(held[0], metrics)))

    return run


def _monitored(state: pj.TrainState, program: str, batch: Any, record: Callable[[Any], None]) -> Run:
    step = jax.jit(lambda s, c, b: step_program(state.settings, program, s, c, b), donate_argnums=1)
    held: list[Any] = [jax.tree.map(jnp.copy, state.core), 0]

    def run() -> None:
        held[0], report = step(np.int32(held[1]), held[0], batch)
        held[1] += 1
        record(report)
        jax.block_until_ready((held[0], report.buffer))

    return run


@contextmanager
def _programs() -> Iterator[dict[str, Run]]:
    """Freshly compiled steps, each with its own state."""
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocabulary, (BATCH, LENGTH)).astype(np.int32)
    mask = np.ones((BATCH, LENGTH), np.float32)
    batch = jax.device_put({"tokens": tokens, "targets": np.roll(tokens, -1, axis=1), "mask": mask})
    plan = pj.Plan(backward=False, exclude=(r"\.input$",))
    state = pj.TrainState.create(model=MODEL, tx=optimizer(), loss_fn=loss_fn, plan=plan, batch=batch)
    params = nn.unbox(jax.jit(MODEL.init)(jax.random.key(0), batch["tokens"])["params"])
    norms = jax.jit(_norms)
    monitored = _chain(optax.monitor({"gradients": _norms}), optax.monitor({"updates": _norms}))

    def keep(params: Any, metrics: Any) -> Any:
        return metrics

    def as_floats(params: Any, metrics: Any) -> Any:
        return [float(value) for value in jax.tree.leaves(metrics)]

    with tempfile.TemporaryDirectory() as folder, pj.Recorder(folder, plan) as recorder:
        runs = {
            "plain": _hand_written(_plain, params, batch, _chain(), keep),
            "A again": _hand_written(_plain, params, batch, _chain(), keep),
            "sow": _hand_written(_sow, params, batch, _chain(), keep),
            "second call": _hand_written(_trees, params, batch, _chain(), lambda p, m: norms(*m, p)),
            "optax.monitor": _hand_written(_plain, params, batch, monitored, keep),
            "float": _hand_written(_in_step, params, batch, _chain(), as_floats),
            "light": _monitored(state, "light", batch, lambda report: None),
            "full": _monitored(state, "full", batch, lambda report: None),
            "record": _monitored(state, "light", batch, recorder.record),
        }
        for run in runs.values():
            run()
            run()
        yield runs


def measure(rounds: int = 20, compiles: int = 1) -> list[Figure]:
    """Ratios to the unmonitored step, of ours and of each rival, and how many times cheaper ours is."""
    taken: dict[str, list[np.ndarray]] = {}
    for index in range(compiles):
        with _programs() as runs:
            seconds = interleave(runs, rounds, seed=index)
        for name, values in seconds.items():
            taken.setdefault(name, []).append(values / seconds["plain"])
    ratios = {name: np.concatenate(values) for name, values in taken.items()}
    figures = [_figure(f"plain step against itself (A/A), {SHAPE}", ratios["A again"])]
    figures += [_figure(f"{title} / plain step, {SHAPE}", ratios[name]) for name, title in OURS.items()]
    for name, (title, ours) in RIVALS.items():
        figures.append(_figure(f"{title} / plain step, {SHAPE}", ratios[name]))
        cheaper = _times_cheaper(ratios[name], ratios[ours])
        if cheaper is None:
            print(f"{OURS[ours]}: too little above the plain step to divide what {name!r} costs by it")
        else:
            figures.append(
                Figure(f"{OURS[ours]} costs so many times less, {name}", *cheaper, "times", "", None, COMMAND)
            )
    return figures


def _figure(title: str, samples: np.ndarray) -> Figure:
    return Figure(title, *bootstrap(samples), "ratio", "", None, COMMAND)


def _times_cheaper(rival: np.ndarray, ours: np.ndarray, rounds: int = 2000) -> tuple[float, float, float] | None:
    """Overhead of the rival over ours, with its 95 % bootstrap interval; None where ours may be no overhead at all."""
    at = np.random.default_rng(0).integers(0, len(ours), (rounds, len(ours)))
    below, above = np.median(ours[at], axis=1) - 1, np.median(rival[at], axis=1) - 1
    if np.quantile(below, 0.025) <= 0:
        return None
    low, high = np.quantile(above / below, [0.025, 0.975])
    return float((np.median(rival) - 1) / (np.median(ours) - 1)), float(low), float(high)
