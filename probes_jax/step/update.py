"""The update itself, and skipping it exactly."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from probes_jax.detect.guard import select
from probes_jax.step.loss_scale import update_loss_scale
from probes_jax.step.monitor import MonitorState
from probes_jax.step.settings import Settings


class Core(NamedTuple):
    """The device part of the train state: what a step reads, replaces and donates."""

    params: Any  # trained parameters, nested dict
    frozen: Any  # the others, nested dict
    model_state: Any  # everything else the model carries
    opt_state: Any
    key: Any  # raw key data, uint32 array
    monitor: MonitorState


def apply_update(
    settings: Settings, core: Core, value: jax.Array, gradients: Any, model_state: Any, skip: jax.Array | None
) -> tuple[Core, Any]:
    """Parameters, optimizer state and model state after the step; all as they were where `skip` is true.

    The optimizer also gets the loss as `value=`, which `optax.contrib.reduce_on_plateau` and others ask for. Beside the
    state comes the update that it asked for: a program that does not look at that does not keep it.
    """
    updates, opt_state = settings.tx.update(gradients, core.opt_state, core.params, value=value)
    params = optax.apply_updates(core.params, updates)
    after = core._replace(params=params, opt_state=opt_state, model_state=model_state)
    return after if skip is None else select(skip, core, after), updates


def train_only(settings: Settings, core: Core, value: jax.Array, gradients: Any, model_state: Any) -> Core:
    """A step that measures nothing. A dynamic loss scale still skips overflowed steps: that is how it works."""
    if not settings.skips_overflow:
        return apply_update(settings, core, value, gradients, model_state, None)[0]
    finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(gradients)]).all()
    after, _ = apply_update(settings, core, value, gradients, model_state, ~finite)
    scale = update_loss_scale(settings.loss_scale, core.monitor.loss_scale, finite)
    return after._replace(monitor=core.monitor._replace(loss_scale=scale))
