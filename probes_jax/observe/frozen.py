"""Which parameters an optimizer never moves."""

from __future__ import annotations

from typing import Any

import jax

from probes_jax.observe.flow import flow
from probes_jax.observe.marks import UNKNOWN, ZERO, Mark, join
from probes_jax.observe.stage import Transformation


def frozen_leaves(tx: Transformation, params: Any, **extra_args: Any) -> Any:
    """Finds the leaves whose update is zero whatever the gradients are.

    The update is traced, not run: a leaf is frozen when its update is made of zeros alone (`optax.set_to_zero` in
    `multi_transform`, `masked`, `freeze` or `selective_transform`), at any place in the chain, also when stages of
    which the state starts at zero and stays there come after it (Adam). A leaf that is only decayed is not frozen. What
    cannot be decided counts as trained. The answer holds for finite numbers and for a state that comes from `tx.init`.

    Args:
        tx: Any optax optimizer.
        params: Parameters: arrays or `jax.ShapeDtypeStruct`.
        **extra_args: What the optimizer's `update` is given beside gradients, state and parameters (`value=`).

    Returns:
        Tree of bool with the structure of `params`: True where frozen.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> tx = optax.chain(optax.freeze({"trunk": True, "head": False}), optax.adam(1e-3))
        >>> frozen_leaves(tx, {"trunk": jnp.ones(2), "head": jnp.ones(2)})
        {'head': False, 'trunk': True}
    """
    leaves, structure = jax.tree.flatten(params)
    frozen = [mark is ZERO for mark in _update_marks(tx, params, extra_args)]
    return jax.tree.unflatten(structure, frozen if len(frozen) == len(leaves) else [False] * len(leaves))


def _update_marks(tx: Transformation, params: Any, extra_args: dict[str, Any]) -> list[Mark]:
    """Marks of the updates, once the marks of the state repeat themselves from update to update."""
    leaves, structure = jax.tree.flatten(params)
    unknown: list[Mark] = [UNKNOWN] * len(leaves)
    start, state = jax.make_jaxpr(tx.init, return_shape=True)(params)
    step, (updates, after) = jax.make_jaxpr(tx.update, return_shape=True)(params, state, params, **extra_args)
    if jax.tree.structure(updates) != structure:
        return unknown
    fixed = jax.tree.structure(after) == jax.tree.structure(state)
    extras: list[Mark] = [UNKNOWN] * len(jax.tree.leaves(extra_args))
    # The state starts as init leaves it; what an update changes is unknown from then on.
    marks = flow(start, unknown) if fixed else [UNKNOWN] * len(jax.tree.leaves(state))
    while True:
        result = flow(step, [*unknown, *marks, *unknown, *extras])
        later = [join(first, second) for first, second in zip(marks, result[len(leaves) :])] if fixed else marks
        if later == marks:
            return result[: len(leaves)]
        marks = later
