"""Whether the optimizer itself held an update back, as two of optax's wrappers do."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class HeldBack(NamedTuple):
    """What became of the gradient of one step. bool, 0-d."""

    applied: jax.Array  # the parameters were updated on this step
    dropped: jax.Array  # the gradient was thrown away: nothing of it will reach the parameters


def held_back(before: Any, after: Any, update: jax.Array) -> HeldBack:
    """Reads it from the states of `optax.MultiSteps` and `optax.apply_if_finite`, at any depth.

    Args:
        before: Optimizer state before the update.
        after: Optimizer state after it.
        update: float32, 0-d, norm of the update; it is exactly 0 where `optax.apply_if_finite` drops the gradient, and
            is not once it gives in.

    Example:
        >>> import optax
        >>> tx, x = optax.MultiSteps(optax.sgd(0.1), 2), jnp.ones(3)
        >>> before = tx.init(x)
        >>> _, after = tx.update(x, before)
        >>> bool(held_back(before, after, jnp.float32(0.0)).applied)
        False
    """
    applied, dropped = jnp.bool_(True), jnp.bool_(False)
    for old, new in zip(_wrappers(before), _wrappers(after), strict=True):
        if hasattr(new, "gradient_step"):
            gone = _skipped(new)
            applied &= new.gradient_step != old.gradient_step
        else:
            gone = ~new.last_finite & (update == 0)
            applied &= ~gone
        dropped |= gone
    return HeldBack(applied, dropped)


def _wrappers(state: Any) -> list[Any]:
    """States of the wrappers, told by their fields, outer ones first."""
    found = [node for node in jax.tree.leaves(state, is_leaf=_is_wrapper) if _is_wrapper(node)]
    return [inner for node in found for inner in (node, *_wrappers(_inside(node)))]


def _is_wrapper(node: Any) -> bool:
    return all(hasattr(node, name) for name in ("gradient_step", "inner_opt_state")) or all(
        hasattr(node, name) for name in ("last_finite", "notfinite_count", "inner_state")
    )


def _inside(node: Any) -> Any:
    return node.inner_opt_state if hasattr(node, "inner_opt_state") else node.inner_state


def _skipped(multi_steps: Any) -> jax.Array:
    """What `should_skip_update_fn` of `optax.MultiSteps` said of this microstep."""
    found = multi_steps.skip_state
    return jnp.asarray(found["should_skip"]) if isinstance(found, dict) and "should_skip" in found else jnp.bool_(False)
