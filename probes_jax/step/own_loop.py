"""The parts of a monitored step, for a loop that keeps its own step, state and optimizer call."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from probes_jax.observe.wrap import wrap
from probes_jax.spec.plan import Plan
from probes_jax.step.create import describe
from probes_jax.step.measure import finish, measure_before
from probes_jax.step.monitor import MonitorState, init_monitor
from probes_jax.step.objective import Notes, Objective, Part
from probes_jax.step.partition import find_mesh, find_partition
from probes_jax.step.report import Report
from probes_jax.step.settings import Settings
from probes_jax.step.update import Core


@dataclasses.dataclass(frozen=True, eq=False)
class Monitor:
    """Measures a step that somebody else makes. Pure functions; hold it outside of the jitted step.

    Attributes:
        settings: What was worked out once by `create`.
    """

    settings: Settings

    @classmethod
    def create(
        cls,
        *,
        model: Any,
        params: Any,
        tx: Any,
        loss_fn: Any,
        batch: Any,
        plan: Plan | None = None,
        model_state: Any = None,
    ) -> Monitor:
        """Works out what is measured.

        Args:
            model: The linen or nnx module, unedited, or what `pj.wrap` returned.
            params: Trained parameters, nested dict (linen: `variables["params"]`).
            tx: The optimizer.
            loss_fn: `loss_fn(model, batch, rngs)` returning `pj.Loss` or a float scalar.
            batch: An example batch.
            plan: What is measured.
            model_state: Everything else that the model carries, `{}` by default.
        """
        plan = Plan() if plan is None else plan
        partition = find_partition(plan, batch, find_mesh(batch, params))
        opt_state = jax.eval_shape(tx.init, params)
        core = Core(
            params,
            {},
            {} if model_state is None else model_state,
            opt_state,
            jax.random.key_data(jax.random.key(0)),
            None,
        )
        return cls(describe(wrap(model), tx, loss_fn, plan, core, partition, batch))

    def init(self) -> MonitorState:
        """State of the detectors before the first step; carry it beside your own state."""
        return init_monitor(self.settings.plan, None)

    def scans(self, step: int) -> bool:
        """Whether this step scans the tensors. Decide it outside of jit and pass it in as a static argument."""
        return step % self.settings.plan.scan_every == 0

    def loss(
        self, params: Any, batch: Any, key: jax.Array, *, scan: bool, model_state: Any = None
    ) -> tuple[jax.Array, Part]:
        """The mean loss to differentiate with `has_aux=True`, and what the forward pass measured.

        Args:
            params: Parameters, as given to `create`.
            batch: The batch.
            key: Random key of this step.
            scan: Observe activations.
            model_state: The model's state; `part.state` is the new one.
        """
        s = self.settings
        objective = Objective(s.binding, s.loss_fn, s.plan, s.partition, scan=scan, probes=True)
        total, weight, part = objective(params, {} if model_state is None else model_state, batch, key, Notes())
        return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1.0), 0.0), part

    def measure(
        self,
        state: MonitorState,
        *,
        step: jax.Array,
        part: Part,
        gradients: Any,
        params: Any,
        new_params: Any,
        opt_state: Any,
        new_opt_state: Any,
        scan: bool,
    ) -> tuple[MonitorState, Report]:
        """Everything that is known once the update was made, as one report.

        Args:
            state: From `init` or the previous step.
            step: Number of this step, integer scalar.
            part: From `loss`.
            gradients: What the optimizer was given, unscaled and accumulated.
            params: Parameters before the update.
            new_params: Parameters after it.
            opt_state: Optimizer state before the update.
            new_opt_state: Optimizer state after it.
            scan: As given to `loss`.

        Returns:
            State for the next step, and the report to hand to `Recorder.record`.
        """
        program = "full" if scan else "light"
        before = Core(params, {}, None, opt_state, None, state)
        after = before._replace(params=new_params, opt_state=new_opt_state)
        items = measure_before(self.settings, program, part, gradients)
        notes = Notes(part.names, dict(self.settings.missing))
        return finish(
            self.settings, program, jnp.asarray(step), before, after, part, items, notes, skip=None, guard=None
        )
