"""Trains a real model with and without the library. The plain loop uses the model's framework and optax alone."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import probes_jax as pj
from tests.models.zoo import RealModel

STEPS = 3
PLAN = pj.Plan(scan_every=1)  # every step measures activations and their gradients


def make_tx() -> Any:
    return pj.chain(("clip", optax.clip_by_global_norm(1.0)), ("lr", optax.scale_by_learning_rate(0.1)))


def loss_fn(real: RealModel) -> Any:
    def monitored(model: Any, batch: Any, rngs: Any) -> pj.Loss:
        nll = optax.softmax_cross_entropy_with_integer_labels(real.logits(model, batch), batch["target"])
        return pj.Loss(nll=nll, mask=jnp.ones(nll.shape))

    return monitored


def start(real: RealModel, module: Any, plan: pj.Plan = PLAN) -> pj.TrainState:
    """The state before the first step; a linen module starts from the same weights as `plain`."""
    variables = first_variables(real, module) if isinstance(module, nn.Module) else None
    wrapped = pj.wrap(module)
    batch = real.batch(0)
    return pj.TrainState.create(
        model=wrapped, tx=make_tx(), loss_fn=loss_fn(real), plan=plan, batch=batch, rngs=0, variables=variables
    )


def first_variables(real: RealModel, module: nn.Module) -> Any:
    init = functools.partial(real.logits, batch=real.batch(0))
    return jax.jit(lambda key: nn.init(lambda model: init(model), module)(key))(jax.random.key(0))


def plain(real: RealModel, module: Any) -> tuple[list[float], Any]:
    """Losses of the steps, and the parameters after them, of the module itself."""
    if isinstance(module, nn.Module):
        variables = first_variables(real, module)
        params, rest = variables["params"], {key: value for key, value in variables.items() if key != "params"}

        def call(params: Any, batch: Any) -> Any:
            return real.logits(functools.partial(module.apply, {"params": params, **rest}), batch)
    else:
        graph, params, others = nnx.split(module, nnx.Param, ...)

        def call(params: Any, batch: Any) -> Any:
            return real.logits(nnx.merge(graph, params, others), batch)

    def mean_loss(params: Any, batch: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(call(params, batch), batch["target"]).mean()

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_learning_rate(0.1))

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(mean_loss)(params, batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return loss, optax.apply_updates(params, updates), opt_state

    losses, opt_state = [], tx.init(params)
    for seed in range(STEPS):
        loss, params, opt_state = step(params, opt_state, real.batch(seed))
        losses.append(float(loss))
    return losses, params


def by_path(tree: Any) -> dict[str, Any]:
    """Arrays by their path, of linen's dict and of nnx's state alike."""
    pure = nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else tree
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(pure)}
