"""One program: a pure function of (step, state, batch) that trains and measures."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from probes_jax.observe.collect import Collector, collecting
from probes_jax.spec.layout import Layout
from probes_jax.step.accumulate import accumulate
from probes_jax.step.batch import check_batch
from probes_jax.step.measure import decide_early, finish, measure_before
from probes_jax.step.objective import Notes, Objective, Part
from probes_jax.step.report import Report
from probes_jax.step.select import join
from probes_jax.step.settings import Settings
from probes_jax.step.stages import measure_stages
from probes_jax.step.update import Core, apply_update, train_only

EMPTY = Layout("off", ())


def step_program(settings: Settings, program: str, step: jax.Array, core: Core, batch: Any) -> tuple[Core, Report]:
    """One train step.

    Args:
        settings: What does not change.
        program: `off` (plain training), `light` (every-step metrics) or `full` (tensor scans too).
        step: Number of this step, an integer scalar.
        core: State before the step.
        batch: Arrays with the examples on axis 0.

    Returns:
        State after the step and the report.
    """
    notes = Notes(missing=dict(settings.missing))
    value, gradients, part = _differentiate(settings, program, step, core, batch, notes)
    if program == "off":
        after = train_only(settings, core, value, gradients, part.state)
        return after, Report(jnp.zeros((0,), jnp.uint32), EMPTY, aux=part.aux)
    items = measure_before(settings, program, part, gradients, notes)
    skip, guard = decide_early(settings, program, core.monitor, items)
    collector = Collector() if program == "full" and settings.plan.stages else None
    with collecting(collector):
        after, requested = apply_update(settings, core, value, gradients, part.state, skip)
    if collector is not None:
        items = items + measure_stages(settings, collector, gradients, core, after, notes)
    monitor, report = finish(settings, program, step, core, after, requested, part, items, notes, skip, guard)
    return after._replace(monitor=monitor), report


def _differentiate(
    settings: Settings, program: str, step: jax.Array, core: Core, batch: Any, notes: Notes
) -> tuple[jax.Array, Any, Part]:
    check_batch(batch, settings.microbatches)
    objective = Objective(
        settings.binding,
        settings.loss_fn,
        settings.plan,
        settings.partition,
        scan=program == "full",
        probes=program != "off",
        routes=settings.routes and program != "off",
    )
    key = jax.random.wrap_key_data(core.key, impl=settings.key_impl)
    return accumulate(
        objective,
        core.params,
        lambda params: join(params, core.frozen),
        core.model_state,
        batch,
        jax.random.fold_in(key, step),
        None if settings.loss_scale is None else core.monitor.loss_scale.scale,
        settings.microbatches,
        notes,
        settings.infos,
    )
