"""The parts of a monitored step, for a loop that keeps its own step, state and optimizer call."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from probes_jax.observe.wrap import wrap
from probes_jax.signals.loss import measure_scalar_loss
from probes_jax.spec import check
from probes_jax.spec.plan import Plan
from probes_jax.spec.switch import enabled
from probes_jax.stats.manual import add_up
from probes_jax.step.accumulate import accumulate
from probes_jax.step.alike import check_alike, setting_facts, shape_facts
from probes_jax.step.batch import check_batch, check_leaves
from probes_jax.step.create import describe
from probes_jax.step.loss import check_loss_fn
from probes_jax.step.manual import check_place, check_shards, of_all_devices
from probes_jax.step.measure import finish, measure_before
from probes_jax.step.monitor import MonitorState, init_monitor
from probes_jax.step.noise import KEY
from probes_jax.step.objective import Notes, Objective, Part
from probes_jax.step.pack import widen
from probes_jax.step.partition import find_mesh, find_partition
from probes_jax.step.program import EMPTY
from probes_jax.step.report import Report
from probes_jax.step.settings import Settings
from probes_jax.step.update import Core

_ONE_NUMBER = "measure was given the loss as one number; Monitor.value_and_grad, of a monitor with a model, measures it"
_NOT_OF_ONE_NUMBER = ("act", "grad_act", "logits", "loss/shard")


@functools.partial(jax.tree_util.register_dataclass, data_fields=("state",), meta_fields=("settings",))
@dataclasses.dataclass(frozen=True)
class Monitor:
    """Measures a step that somebody else makes. A pytree: carry it through the jitted step, save it with the rest.

    Attributes:
        state: Detector windows, counters, cumulative tokens.
        settings: What was worked out once by `create` (static).

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> from probes_jax.step.own_loop import Monitor
        >>> tx, params = optax.sgd(0.5), {"w": jnp.array([3.0, 4.0])}
        >>> monitor, opt_state = Monitor.create(tx=tx, params=params), tx.init(params)
        >>> loss, gradients = jax.value_and_grad(lambda p: jnp.sum(p["w"] ** 2) / 2)(params)
        >>> updates, new_opt_state = tx.update(gradients, opt_state, params)
        >>> new_params = optax.apply_updates(params, updates)
        >>> monitor, report = monitor.measure(loss, gradients, params, new_params, opt_state, new_opt_state)
        >>> found = report.scalars()
        >>> found["loss/mean"], found["grad/norm"], found["update/w/ratio"]
        (12.5, 5.0, 0.5)
    """

    state: MonitorState
    settings: Settings

    @classmethod
    def create(
        cls,
        *,
        tx: Any,
        params: Any,
        plan: Plan | None = None,
        model: Any = None,
        loss_fn: Any = None,
        batch: Any = None,
        model_state: Any = None,
        axis_names: tuple[str, ...] = (),
    ) -> Monitor:
        """Works out what is measured.

        Args:
            tx: The optimizer.
            params: Trained parameters, any pytree (linen: `variables["params"]`, nnx: `nnx.state(model, nnx.Param)`).
            plan: What is measured.
            model: The linen or nnx module, unedited. Needed, with `loss_fn` and `batch`, for `loss` only.
            loss_fn: `loss_fn(model, batch, rngs)` returning `pj.Loss` or a float scalar.
            batch: An example batch.
            model_state: Everything else that the model carries, `{}` by default.
            axis_names: Mesh axes of the `jax.shard_map` or `jax.pmap` inside of which the step calls this monitor.
        """
        plan = Plan() if plan is None else plan
        axis_names = check.names("axis_names", axis_names)
        if (model is None) != (loss_fn is None) or (model is None) != (batch is None):
            raise ValueError("Monitor.create takes model, loss_fn and batch together, or none of them")
        if model is not None:
            check_loss_fn(loss_fn)
            check_leaves(batch)
        if plan.guard is not None or plan.skip_empty:
            raise ValueError("Monitor only measures: Plan guard and skip_empty need pj.monitored_train_step")
        partition = find_partition(plan, batch, find_mesh(batch, params), axis_names)
        partition = partition.with_features(params, plan.feature_axes)
        check_alike(partition.mesh, setting_facts(plan, axis_names=axis_names) | shape_facts("parameter", params))
        opt_state = jax.eval_shape(tx.init, params)
        core = Core(params, {}, {} if model_state is None else model_state, opt_state, None, init_monitor(plan, None))
        binding = None if model is None else wrap(model)
        settings = describe(binding, tx, loss_fn, plan, core, partition, batch, runs=False)
        place = settings.replicated()
        return cls(core.monitor if place is None else jax.device_put(core.monitor, place), settings)

    def loss(
        self, params: Any, batch: Any, key: jax.Array, *, scan: bool = False, model_state: Any = None
    ) -> tuple[jax.Array, Part]:
        """The mean loss, to differentiate with `has_aux=True`, and what the forward pass measured.

        For a loop that has other terms to add before it differentiates. `value_and_grad` does more for less.
        Under `shard_map` or `pmap` it is the mean over all devices; average the gradients with `jax.lax.pmean`.

        Args:
            params: Parameters, as given to `create`.
            batch: The batch.
            key: Random key of this step.
            scan: Observe activations (static).
            model_state: The model's state; `part.state` is the new one.

        Raises:
            ValueError: The monitor was made without a model.
        """
        objective, notes = self._objective(scan), Notes()
        total, weight, part = objective(params, {} if model_state is None else model_state, batch, key, notes)
        axes = self.settings.partition.apart(total, weight)
        weight = add_up(weight, axes)
        loss = jnp.where(weight != 0, total / jnp.where(weight != 0, weight, 1.0), 0.0)
        return add_up(loss, axes), _noted(part, notes)

    def value_and_grad(
        self,
        params: Any,
        batch: Any,
        key: jax.Array,
        *,
        scan: bool = False,
        model_state: Any = None,
        microbatches: int = 1,
    ) -> tuple[tuple[jax.Array, Part], Any]:
        """The mean loss with what was measured on the way there and back, and its gradients.

        Under `shard_map` or `pmap` both are those of all devices together, by their valid tokens: nothing is left to
        average.

        Args:
            params: Parameters, as given to `create`.
            batch: The batch.
            key: Random key of this step; microbatch `k` uses `fold_in(key, k)`.
            scan: Observe activations and their gradients (static).
            model_state: The model's state; `part.state` is the new one.
            microbatches: Splits axis 0 of the batch; gradients are those of the whole.

        Returns:
            As `jax.value_and_grad(..., has_aux=True)` does: `((loss, part), gradients)`.
        """
        state = {} if model_state is None else model_state
        check_batch(batch, microbatches)
        objective, notes = self._objective(scan), Notes()
        loss, gradients, part = accumulate(
            objective,
            params,
            lambda params: params,
            state,
            batch,
            key,
            None,
            microbatches,
            notes,
            self.settings.infos,
        )
        partition, infos = self.settings.partition, self.settings.infos
        loss = add_up(loss, partition.apart(loss))
        return (loss, _noted(part, notes)), of_all_devices(gradients, partition.apart(), infos)

    def _objective(self, scan: bool) -> Objective:
        check_place(self.settings.partition.manual)
        s, on = self.settings, enabled()
        if s.binding is None:
            raise ValueError("Monitor.loss needs a model: Monitor.create(model=..., loss_fn=..., batch=...)")
        return Objective(s.binding, s.loss_fn, s.plan, s.partition, scan=scan and on, probes=on, routes=s.routes and on)

    def measure(
        self,
        loss: Any,
        gradients: Any,
        params: Any,
        new_params: Any,
        opt_state: Any,
        new_opt_state: Any,
        *,
        updates: Any = None,
    ) -> tuple[Monitor, Report]:
        """Everything that is known once the update was made, as one report.

        Steps are counted in the state. Per-layer values are measured every `Plan.scan_every` steps (a `lax.cond`),
        and on every step where `loss` holds observed activations.

        Args:
            loss: The scalar loss, or the second value of `Monitor.loss`.
            gradients: What the optimizer was given, unscaled and accumulated.
            params: Parameters before the update.
            new_params: Parameters after it.
            opt_state: Optimizer state before the update.
            new_opt_state: Optimizer state after it.
            updates: What the optimizer asked for; then `update/noop_fraction` says how much of it rounding lost.

        Returns:
            The monitor for the next step, and the report to hand to `Recorder.record`. Under `shard_map` both are
            the same on all devices.
        """
        check_place(self.settings.partition.manual)
        check_shards(params, gradients, self.settings.infos)
        part = loss if isinstance(loss, Part) else _part_of_scalar(loss, self.settings.partition.manual)
        if not enabled():
            return self, Report(jnp.zeros((0,), jnp.uint32), EMPTY, aux=part.aux)
        before = Core(params, {}, None, opt_state, None, self.state)
        after = before._replace(params=new_params, opt_state=new_opt_state)
        step = self.state.guard.attempted

        def run(program: str) -> tuple[MonitorState, Report]:
            notes = Notes(part.seen, missing={**self.settings.missing, **dict(part.missing)})
            items = measure_before(self.settings, program, part, gradients, notes)
            if part.points and not part.gradients and self.settings.plan.backward:
                notes.missing["grad_act"] = "Monitor.loss takes no gradients of activations; use Monitor.value_and_grad"
            if program == "full" and self.settings.plan.stages:
                notes.missing["opt/stage"] = "the stages are seen where pj.monitored_train_step runs the optimizer"
            if program == "full" and part.noise is None and "noise" not in self.settings.plan.left_out:
                notes.missing.setdefault(
                    KEY, "it takes gradients of microbatches: Monitor.value_and_grad(microbatches=K)"
                )
            return finish(
                self.settings, program, step, before, after, updates, part, items, notes, skip=None, guard=None
            )

        if part.points:
            state, report = run("full")
            return dataclasses.replace(self, state=state), report
        _, shape = jax.eval_shape(lambda: run("full"))

        def light() -> tuple[MonitorState, jax.Array]:
            monitor, report = run("light")
            return monitor, widen(report.buffer, report.layout, shape.layout)

        def full() -> tuple[MonitorState, jax.Array]:
            monitor, report = run("full")
            return monitor, report.buffer

        state, buffer = jax.lax.cond(step % self.settings.plan.scan_every == 0, full, light)
        return dataclasses.replace(self, state=state), dataclasses.replace(shape, buffer=buffer, aux=part.aux)


def _noted(part: Part, notes: Notes) -> Part:
    return dataclasses.replace(part, seen=notes.seen, missing=tuple(notes.missing.items()))


def _part_of_scalar(loss: jax.Array, axes: tuple[str, ...]) -> Part:
    rows = measure_scalar_loss(jnp.asarray(loss), axes)
    missing = tuple((name, _ONE_NUMBER) for name in _NOT_OF_ONE_NUMBER)
    return Part(jnp.float32(1.0), rows, (), {}, None, None, (), missing=missing)
