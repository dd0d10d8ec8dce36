"""The learning rate that an update really used, read from the optimizer's state wherever it keeps it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path

from probes_jax.observe.chain import ChainState

_ABSENT = (
    "the optimizer's state holds no learning rate; build it with pj.chain and give the rate a stage of its own, "
    '("lr", optax.scale_by_learning_rate(schedule)), or wrap it: '
    "optax.inject_hyperparams(optax.adamw)(learning_rate=schedule)"
)


class Rate(NamedTuple):
    """The learning rate of one step."""

    value: jax.Array  # float32 []: the rate, or the largest where parts of the model have their own
    fresh: jax.Array  # bool []: an update was done on this step; otherwise the value is an old one, or none yet


@dataclasses.dataclass(frozen=True)
class RateProbe:
    """Where an optimizer state keeps its learning rates.

    Attributes:
        paths: Path of each one within the state.
    """

    paths: tuple[str, ...]

    def read(self, before: Any, after: Any) -> Rate:
        """The rate used by the update that led from one state to the next. Works under `jit`, `scan` and `vmap`.

        Args:
            before: Optimizer state before the update.
            after: Optimizer state after it; the rate that it holds is the one used.

        Returns:
            The rate; `fresh` is False where nothing was applied (between two updates of `optax.MultiSteps`, or when
            `optax.apply_if_finite` dropped it).
        """
        earlier, later = _find(before), _find(after)
        if tuple(path for path, _ in later) != self.paths or len(earlier) != len(later):
            raise ValueError(f"this state keeps learning rates at {[path for path, _ in later]}, expected {self.paths}")
        values = [jnp.abs(_value(holder)) for _, holder in later]
        changed = [_stamp(old) != _stamp(new) for (_, old), (_, new) in zip(earlier, later, strict=True)]
        return Rate(jnp.max(jnp.stack(values)), jnp.any(jnp.stack(changed)))


def find_learning_rate(state: Any) -> tuple[RateProbe | None, str]:
    """Looks for the learning rate in an optimizer state: in a `ChainState` or an `optax.inject_hyperparams` state.

    Both are found at any depth: inside `optax.MultiSteps`, `masked`, `multi_transform`, `apply_if_finite`.

    Args:
        state: Optimizer state, of arrays or of `jax.ShapeDtypeStruct`.

    Returns:
        The probe and an empty string, or None and the reason with what to do about it.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from probes_jax.observe.chain import chain
        >>> tx = optax.MultiSteps(chain(("lr", optax.scale_by_learning_rate(0.5))), 2)
        >>> before = tx.init(jnp.ones(3))
        >>> probe, _ = find_learning_rate(before)
        >>> _, after = tx.update(jnp.ones(3), before)
        >>> bool(probe.read(before, after).fresh)  # the first of two microsteps: nothing was applied
        False
        >>> find_learning_rate(optax.adam(1e-3).init(jnp.ones(3)))[0] is None
        True
    """
    found = _find(state)
    return (RateProbe(tuple(path for path, _ in found)), "") if found else (None, _ABSENT)


def learning_rate(before: Any, after: Any) -> Rate | None:
    """`find_learning_rate` and `RateProbe.read` in one call; None where the state holds no learning rate."""
    probe, _ = find_learning_rate(before)
    return None if probe is None else probe.read(before, after)


def _find(state: Any) -> list[tuple[str, Any]]:
    """(path, node) of the nodes that hold a rate. Nothing inside such a node is looked at."""
    nodes, _ = tree_flatten_with_path(state, is_leaf=_holds_rate)
    return [(keystr(path), node) for path, node in nodes if _holds_rate(node)]


def _holds_rate(node: Any) -> bool:
    if isinstance(node, ChainState):
        return node.learning_rate is not None
    values = getattr(node, "hyperparams", None)  # optax's two states of inject_hyperparams, told by their fields
    if not isinstance(values, Mapping) or not hasattr(node, "count"):
        return False
    return "learning_rate" in values and getattr(values["learning_rate"], "shape", ()) == ()


def _value(node: Any) -> jax.Array:
    rate = node.learning_rate if isinstance(node, ChainState) else node.hyperparams["learning_rate"]
    return jnp.asarray(rate, jnp.float32)


def _stamp(node: Any) -> jax.Array:
    return jnp.asarray(node.stamp if isinstance(node, ChainState) else node.count)
