"""The call in the user's loop: picks the program by the step's number and runs it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from probes_jax.spec.switch import enabled
from probes_jax.stats.manual import manual_axes
from probes_jax.step.abstract import refuse_abstract
from probes_jax.step.alike import check_alike, switch
from probes_jax.step.batch import check_leaves
from probes_jax.step.pack import widen
from probes_jax.step.program import step_program
from probes_jax.step.report import Report
from probes_jax.step.settings import Settings
from probes_jax.step.state import TrainState

_LAST_STEP = 2**31 - 1  # steps are counted in int32; a run that gets there goes on without counting


def program_of(settings: Settings, step: int) -> str:
    """Which program a step runs: decided by its number alone, so the same on every process and after a resume."""
    if not enabled():
        return "off"
    return "full" if step % settings.plan.scan_every == 0 else "light"


def compiled(settings: Settings, program: str) -> Any:
    """The jitted program, made on first use."""
    if program not in settings.programs:

        def run(step: Any, core: Any, batch: Any) -> Any:
            return step_program(settings, program, step, core, batch)

        run.__name__ = f"monitored_train_step_{program}"
        settings.programs[program] = jax.jit(
            run,
            donate_argnums=(1,) if settings.donate else (),
            out_shardings=None if settings.shardings is None else (settings.shardings, None),
        )
    return settings.programs[program]


def monitored_train_step(state: TrainState, batch: Any) -> tuple[TrainState, Report]:
    """One train step with its probes.

    In a Python loop this picks the `light` or the `full` program by the step's number and returns at once. Inside the
    caller's own `jax.jit` or `jax.lax.scan` the choice becomes a `lax.cond`, and reports come in one layout; reports
    stacked by a scan are ordinary input to `Recorder.record`.

    Args:
        state: From `TrainState.create`, or the previous step. Its buffers are donated unless `donate=False`.
        batch: Arrays with the examples on axis 0.

    Returns:
        The state after the step, and the report.

    Raises:
        ValueError: The batch is empty, ragged, or does not divide into the microbatches; this is called inside of
            `jax.shard_map` or `jax.pmap`; the state holds shapes instead of arrays; or, at the first step of a job of
            several processes, a process is at another step than the others.
        TypeError: `state` is no `TrainState`, or a leaf of the batch is no array of numbers.
    """
    if not isinstance(state, TrainState):
        raise TypeError(f"state must be a pj.TrainState (TrainState.create(...)), got {type(state).__name__}")
    if manual_axes():
        raise ValueError(
            f"monitored_train_step is called inside of shard_map or pmap over {tuple(manual_axes())}, but it shards by "
            "itself: call it outside, with a sharded batch; or keep your step and measure it with "
            f"pj.Monitor.create(axis_names={tuple(manual_axes())}, ...)"
        )
    try:
        return _traced(state, batch) if isinstance(state.step, Tracer) else _run(state, batch)
    except TypeError:  # after the first step looked at only now: a state has hundreds of leaves
        refuse_abstract(state)
        check_leaves(batch)
        raise


def _run(state: TrainState, batch: Any) -> tuple[TrainState, Report]:
    if isinstance(state.key, jax.Array) and state.key.is_deleted():
        raise ValueError(
            "state was given to a step before, which reused its memory; use the state that the step returned, or "
            "create it with donate=False"
        )
    step = int(state.step)
    if not state.settings.programs:  # the first step: a process that restored another checkpoint is found here
        refuse_abstract(state)
        check_alike(state.settings.partition.mesh, {"PROBES_JAX": repr(switch()), "step": str(step)})
    run = compiled(state.settings, program_of(state.settings, step))
    # An explicit transfer, so that a loop under jax.transfer_guard goes on.
    after, report = run(jax.device_put(np.int32(step)), state.core, batch)
    later = np.array(min(step, _LAST_STEP - 1) + 1, np.int32)
    return TrainState.from_core(later, after, state.settings), report


def _traced(state: TrainState, batch: Any) -> tuple[TrainState, Report]:
    settings, step = state.settings, state.step
    if not enabled():
        core, report = step_program(settings, "off", step, state.core, batch)
        return TrainState.from_core(step + 1, core, settings), report
    _, shape = jax.eval_shape(lambda s, c, b: step_program(settings, "full", s, c, b), step, state.core, batch)

    def full(core: Any) -> Any:
        core, report = step_program(settings, "full", step, core, batch)
        return core, report.buffer, report.aux

    def light(core: Any) -> Any:
        core, report = step_program(settings, "light", step, core, batch)
        return core, widen(report.buffer, report.layout, shape.layout), report.aux

    scan = step % settings.plan.scan_every == 0
    core, buffer, aux = jax.lax.cond(scan, full, light, state.core)
    return TrainState.from_core(step + 1, core, settings), dataclasses.replace(shape, buffer=buffer, aux=aux)
