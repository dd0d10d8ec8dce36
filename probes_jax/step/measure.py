"""Everything after the gradients: name what was measured, decide, reduce once, watch, pack."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from probes_jax.detect.guard import GuardState, count_outcome, decide
from probes_jax.observe.clip import clip_threshold, clipped
from probes_jax.observe.held_back import held_back
from probes_jax.observe.learning_rate import learning_rates
from probes_jax.observe.roles import role_of
from probes_jax.signals.logits import name_logits
from probes_jax.signals.loss import name_loss
from probes_jax.signals.measured import Measured, measured
from probes_jax.signals.modality import name_modalities
from probes_jax.signals.parameters import measure_encoder, measure_gradients, measure_norms, measure_updates, subtract
from probes_jax.signals.together import find_groups, join_infos, join_tensors
from probes_jax.signals.tokens import name_spread
from probes_jax.spec.coverage import Coverage, SeenPoint
from probes_jax.spec.limits import count_stored, exceeded
from probes_jax.step.in_graph import read_in_graph
from probes_jax.step.loss_scale import update_loss_scale
from probes_jax.step.monitor import MonitorState
from probes_jax.step.noise import name_noise, watch_noise
from probes_jax.step.objective import Notes, Part
from probes_jax.step.pack import Counters, Scalars, pack_report
from probes_jax.step.reduce import reduce_measured
from probes_jax.step.replica import measure_copies, measure_own
from probes_jax.step.report import Report
from probes_jax.step.router_bias import measure_biases
from probes_jax.step.second_moment import NONE, find_second_moments, measure_second_moments, name_orders
from probes_jax.step.select import flatten
from probes_jax.step.settings import Settings
from probes_jax.step.update import Core
from probes_jax.step.watch import Values, is_co_spike, read_values, score, update_norm, watch

_DECISIVE = ("loss/mean", "loss/extra/", "grad/{stat}", "grad_frozen/{stat}")  # what must be known before the update


def measure_before(settings: Settings, program: str, part: Part, gradients: Any, notes: Notes) -> list[Measured]:
    """What is known before the update: loss, logits, activations, gradients."""
    items = name_loss(part.rows, settings.plan.groups, shards="loss/shard" not in notes.missing)
    items += [measured(f"loss/extra/{name}", rows) for name, rows in part.extra.items()]
    items += name_logits(part.rows) if "logits" in part.rows else []
    without = settings.plan.left_out
    for prefix, names, summaries in (
        ("act", part.names, part.points),
        ("grad_act", part.gradient_names, part.gradients),
    ):
        if prefix in without:
            continue
        for point, rows in zip(names, summaries, strict=True):
            items.append(measured(point.labels(rows.stack_shape(), prefix), rows))
    items += [item for spread in part.tokens for item in name_spread(spread)]
    items += name_modalities(part.rows, settings.plan.modalities)
    items += [loads.measured() for loads in part.loads]
    items += name_noise(part.noise)
    layers, tensors, infos = program == "full" and "grad" not in without, flatten(gradients), settings.infos
    if program == "full" and settings.partition.manual and "replica" not in without:
        items += measure_own("grad", tensors, infos)
    groups = find_groups(tensors, infos) if layers else None
    infos = infos if groups is None else join_infos(infos, groups)
    joined = join_tensors(tensors, groups)
    items += measure_gradients(joined, infos, layers=layers, precision=settings.plan.precision)
    return items + (measure_encoder(joined, infos) if program == "full" else [])


def decide_early(
    settings: Settings, program: str, monitor: MonitorState, items: list[Measured]
) -> tuple[jax.Array | None, GuardState | None]:
    """Whether to skip the update, where a guard wants to know: one early psum of a few sums. Else (None, None)."""
    if settings.plan.guard is None and not settings.plan.skip_empty and not settings.skips_overflow:
        return None, None
    decisive = [item for item in items if item.entry.key.startswith(_DECISIVE)]
    return _decide(
        settings, monitor, read_values(reduce_measured(decisive, program, settings.partition.mesh, maxima=False))
    )


def _decide(settings: Settings, monitor: MonitorState, values: Values) -> tuple[jax.Array, GuardState]:
    """From merged values, so the same decision on every device and process."""
    guard, co_spike = settings.plan.guard, jnp.bool_(False)
    if guard is not None and guard.co_spike:
        co_spike = is_co_spike(score(monitor.window, settings.plan, values, None)[1], settings.plan.theta)
    return decide(
        guard,
        monitor.guard,
        finite=values.finite,
        co_spike=co_spike,
        empty=~values.has_loss,
        skip_empty=settings.plan.skip_empty,
        overflow=~values.finite_gradient if settings.skips_overflow else None,
    )


def finish(
    settings: Settings,
    program: str,
    step: jax.Array,
    before: Core,
    after: Core,
    requested: Any,
    part: Part,
    items: list[Measured],
    notes: Notes,
    skip: jax.Array | None,
    guard: GuardState | None,
) -> tuple[MonitorState, Report]:
    """Measures the update, reduces everything once, runs the detectors and packs the report.

    Args:
        settings: What does not change.
        program: `light` or `full`.
        step: Number of this step.
        before: State before the update.
        after: State after it.
        requested: The update that the optimizer asked for, of the parameters' structure; None where it is not known.
        part: What the forward pass left behind, merged over microbatches.
        items: From `measure_before`.
        notes: What tracing found out.
        skip: Whether the update was skipped, or None without a guard.
        guard: Guard counters after the decision, or None to take it from the merged values.

    Returns:
        New monitor state and the report.
    """
    layers, mesh = program == "full", settings.partition.mesh
    old, new = flatten(before.params), flatten(after.params)
    without = settings.plan.left_out
    groups = find_groups(old, settings.infos) if layers else None
    infos = settings.infos if groups is None else join_infos(settings.infos, groups)
    if "param" not in without:
        items = items + measure_norms("param", join_tensors(old, groups), infos, layers=layers)
    applied, each = join_tensors(subtract(new, old), groups), layers and "update" not in without
    if each and requested is not None:
        items = items + measure_updates(applied, join_tensors(flatten(requested), groups), infos, skip)
    else:
        items = items + measure_norms("update", applied, infos, layers=each)
    if each and requested is None:
        notes.missing["update/noop_fraction"] = (
            "what the optimizer asked for is not known; measure(..., updates=updates)"
        )
    if layers and "second_moment" not in without:
        moments = list(find_second_moments(after.opt_state, old, settings.infos))
        items = items + measure_second_moments(moments)
        notes.missing |= {} if moments else {"opt/second_moment": NONE}
    if layers and "replica" not in without:
        if settings.partition.manual:
            items = items + measure_own("param", old, settings.infos)
        elif mesh is not None:
            items = items + measure_copies(before, settings.lies, mesh)
    if layers:
        items = items + measure_biases(settings, before, part.loads, notes)
    reduced = reduce_measured(items, program, mesh)
    values = read_values(reduced)
    if guard is None:
        _, guard = _decide(settings, before.monitor, values)
    update = update_norm(reduced)
    outcome = held_back(before.opt_state, after.opt_state, update)
    guard = count_outcome(
        guard,
        skip=jnp.bool_(False) if skip is None else skip,
        finite=values.finite,
        update_finite=jnp.isfinite(update),
        applied=outcome.applied,
        dropped=outcome.dropped,
    )
    clip = _was_clipped(settings, before.opt_state, values)
    monitor, scalars, counters = watch(before.monitor, guard, settings.plan, reduced, values, update, clip)
    monitor = _watch_loss_scale(settings, monitor, values, scalars, counters)
    _watch_optimizer(settings, before.opt_state, after.opt_state, skip, scalars)
    skipped = guard.skipped != before.monitor.guard.skipped  # not a left out empty step
    scalars["alert/guard/skipped"] = (skipped.astype(jnp.float32), True)
    scalars |= {name: (jnp.float32(share), True) for name, share in settings.reach.items()}
    scalars |= read_in_graph(settings, part, reduced, new, notes, scan=layers)
    noise, of_noise = watch_noise(monitor.noise, part.noise, reduced, values.gradient_norm)
    monitor = monitor._replace(noise=noise)
    scalars |= name_orders(reduced) | of_noise
    coverage = _coverage(settings, notes, part)
    if layers:
        scalars["sys/monitor/points_seen"] = (jnp.float32(len(coverage.seen)), True)
        scalars["sys/monitor/points_reported"] = (jnp.float32(len(coverage.reported)), True)
    buffer, layout = pack_report(reduced, scalars, counters, step)
    if mesh is not None and not settings.partition.manual:
        buffer = jax.lax.with_sharding_constraint(buffer, settings.replicated())
    coverage = dataclasses.replace(
        coverage,
        stored=tuple(count_stored(layout, settings.plan).items()),
        warnings=(*settings.warnings, *exceeded(layout, settings.plan)),
    )
    return monitor, Report(buffer, layout, coverage, part.aux, settings.plan.fingerprint)


def _was_clipped(settings: Settings, opt_state: Any, values: Values) -> jax.Array | None:
    if settings.clip is None:
        return None
    norm = values.all_gradient_norm if settings.clip.counts_frozen else values.gradient_norm
    return clipped(settings.clip, opt_state, norm)


def _watch_loss_scale(
    settings: Settings, monitor: MonitorState, values: Values, scalars: Scalars, counters: Counters
) -> MonitorState:
    if settings.loss_scale is None:
        return monitor
    scalars["opt/loss_scale"] = (monitor.loss_scale.scale, True)
    after = update_loss_scale(settings.loss_scale, monitor.loss_scale, values.finite_gradient)
    counters["opt/loss_scale_drops"] = after.drops
    return monitor._replace(loss_scale=after)


def _watch_optimizer(settings: Settings, before: Any, after: Any, skip: jax.Array | None, scalars: Scalars) -> None:
    for label, rate in learning_rates(before, after).items():  # a skipped update used no rate
        name = f"opt/learning_rate/{label}" if label else "opt/learning_rate"
        scalars[name] = (rate.value, rate.fresh if skip is None else rate.fresh & ~skip)
    if settings.clip is not None:
        scalars["grad/clip_threshold"] = (clip_threshold(settings.clip, before), True)


def _coverage(settings: Settings, notes: Notes, part: Part) -> Coverage:
    layers = {str(point): rows.stack_shape() for point, rows in zip(part.names, part.points, strict=True)}
    gradients = set(map(str, part.gradient_names))
    points = tuple(
        SeenPoint(
            name=str(point),
            role=role_of(point, settings.plan.roles),
            class_name=point.class_name,
            method=point.method,
            call=point.call,
            shape=point.shape,
            layers=layers.get(str(point), ()),
            through=point.through,
            reported=str(point) in layers,
            gradient=str(point) in gradients,
        )
        for point in notes.seen
    )
    return Coverage(points, tuple(sorted(notes.missing.items())))
