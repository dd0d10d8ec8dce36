"""Whether to skip an update, counted exactly.

A skip is exact: the caller selects the old parameters and the old optimizer state, element by element (`select`).
Multiplying an update by zero is not a skip: Adam moves on a zero gradient, and 0 * NaN is NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from probes_jax.detect.counter import count_if, zero
from probes_jax.spec.plan import Guard

Tree = TypeVar("Tree")


class GuardState(NamedTuple):
    """Counters since the start of the run. uint32, 0-d, each with one meaning that never changes.

    Attributes:
        attempted: Steps.
        applied: Updates really applied: the optimizer's own count of steps.
        skipped: Updates skipped by the guard.
        consecutive: Of those, how many in a row up to now. An applied update sets it to 0; an empty step that is left
            out does not.
        nonfinite_steps: Steps with a NaN or infinite loss or gradient, skipped or not.
        accepted_bad: Updates made from a non-finite loss or gradient and applied, and those made from finite ones whose
            norm is not finite: the guard decides before there is one. Above 0 the parameters are most likely lost.
        empty_steps: Steps without a valid token, applied or not.
        stopped: 1 once the guard has stopped the run; it then skips every update until `release`.
    """

    attempted: jax.Array
    applied: jax.Array
    skipped: jax.Array
    consecutive: jax.Array
    nonfinite_steps: jax.Array
    accepted_bad: jax.Array
    empty_steps: jax.Array
    stopped: jax.Array


def init_guard() -> GuardState:
    """All counters at zero, each its own array (a donated state may not hold one twice)."""
    return GuardState(*(zero() for _ in GuardState._fields))


def decide(
    guard: Guard | None,
    state: GuardState,
    *,
    finite: jax.Array,
    co_spike: jax.Array,
    empty: jax.Array,
    skip_empty: bool,
    overflow: jax.Array | None = None,
) -> tuple[jax.Array, GuardState]:
    """Decides on one update and counts the decision; `count_outcome` counts what came of it.

    The flags must already be reduced over the mesh and over microbatches: then every device and every process decides
    alike.

    Args:
        guard: What is skipped; None skips nothing (what is not finite is then applied, and counted as such).
        state: Counters so far.
        finite: bool, 0-d, loss and all gradient elements are finite.
        co_spike: bool, 0-d, loss and gradient norm both spike.
        empty: bool, 0-d, the batch has no valid token.
        skip_empty: Leave the state untouched by an empty batch.
        overflow: bool, 0-d, a gradient overflowed under a dynamic loss scale, which works by skipping such updates,
            with or without a guard; None without one.

    Returns:
        Whether to skip (bool, 0-d), and the new counters. After `max_consecutive` skips in a row `stopped` is 1 and
        every further update is skipped.
    """
    no = jnp.zeros((), bool)
    nonfinite = ~finite
    bad, stopped = no, no
    if guard is not None:
        bad = (nonfinite if guard.nonfinite else no) | (co_spike if guard.co_spike else no)
        stopped = state.stopped > np.uint32(0)
    by_guard = bad | stopped | (no if overflow is None else overflow)
    left_out = (empty & ~by_guard) if skip_empty else no
    skip = by_guard | left_out
    consecutive = jnp.where(by_guard, count_if(state.consecutive, by_guard), jnp.where(left_out, state.consecutive, 0))
    if guard is not None:
        stopped = stopped | (consecutive >= np.uint32(min(guard.max_consecutive, 2**32 - 1)))
    return skip, GuardState(
        attempted=count_if(state.attempted, ~no),
        applied=state.applied,
        skipped=count_if(state.skipped, by_guard),
        consecutive=consecutive.astype(jnp.uint32),
        nonfinite_steps=count_if(state.nonfinite_steps, nonfinite),
        accepted_bad=state.accepted_bad,
        empty_steps=count_if(state.empty_steps, empty),
        stopped=stopped.astype(jnp.uint32) if guard is not None else state.stopped,
    )


def count_outcome(
    state: GuardState,
    *,
    skip: jax.Array,
    finite: jax.Array,
    update_finite: jax.Array,
    applied: jax.Array,
    dropped: jax.Array,
) -> GuardState:
    """Counts what became of the update.

    Args:
        state: Counters, as `decide` returns them.
        skip: bool, 0-d, from `decide`.
        finite: bool, 0-d, loss and all gradient elements are finite.
        update_finite: bool, 0-d, the norm of the update that the optimizer made is finite.
        applied: bool, 0-d, False where the optimizer itself waits for more gradients or threw this one away.
        dropped: bool, 0-d, the optimizer threw the gradient away.
    """
    bad = (~finite & ~dropped) | ~update_finite
    return state._replace(
        applied=count_if(state.applied, applied & ~skip),
        accepted_bad=count_if(state.accepted_bad, bad & ~skip),
    )


def release(state: GuardState) -> GuardState:
    """The counters of a stopped run that somebody decided to continue: not stopped, no skips in a row."""
    return state._replace(stopped=jnp.zeros_like(state.stopped), consecutive=jnp.zeros_like(state.consecutive))


def select(skip: jax.Array, old: Tree, new: Tree) -> Tree:
    """`old` where `skip`, else `new`, bit for bit, for every leaf: also integers and typed random keys.

    Args:
        skip: bool, 0-d.
        old: Any pytree of arrays.
        new: The same structure, shapes and dtypes.

    Returns:
        One of the two, leaf by leaf chosen by `where`, never by a product.

    Raises:
        ValueError: A leaf of `new` has another shape or dtype than in `old`.
    """

    def choose(path: Any, before: Any, after: Any) -> jax.Array:
        before, after = jnp.asarray(before), jnp.asarray(after)
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            raise ValueError(
                f"select: leaf {jax.tree_util.keystr(path)} is {before.dtype}{list(before.shape)} in `old` and "
                f"{after.dtype}{list(after.shape)} in `new`; an update may not change them"
            )
        return jnp.where(skip, before, after)

    return jax.tree_util.tree_map_with_path(choose, old, new)
