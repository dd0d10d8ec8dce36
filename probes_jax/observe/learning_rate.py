"""The learning rate that an update really used, read from the optimizer's state wherever it keeps it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import DictKey, keystr, tree_flatten_with_path

from probes_jax.observe.chain import ChainState, is_blank

_FORBIDDEN = re.compile(r"[/\[\]{}\s]")  # no part of a metric's name may hold these
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
        """The rate used by the update that led from one state to the next, the largest of several.

        Takes and says what `read_each` does.
        """
        values, fresh = map(jnp.stack, zip(*self.read_each(before, after).values()))
        used = fresh | ~jnp.any(fresh)  # a group that waits for its update does not count
        return Rate(jnp.max(jnp.where(used, values, -jnp.inf)), jnp.any(fresh))

    def read_each(self, before: Any, after: Any) -> dict[str, Rate]:
        """Each rate used by the update that led from one state to the next. Works under `jit`, `scan` and `vmap`.

        Args:
            before: Optimizer state before the update.
            after: Optimizer state after it; the rate that it holds is the one used.

        Returns:
            The rates by the label that `optax.multi_transform` gives their parameters, or by number where they have
            none. `fresh` is False where nothing was applied (between two updates of `optax.MultiSteps`, or when
            `optax.apply_if_finite` dropped it).
        """
        earlier, later = _find(before), _find(after)
        paths = tuple(keystr(path) for path, _ in later)
        if paths != self.paths or len(earlier) != len(later):
            raise ValueError(f"this state keeps learning rates at {list(paths)}, expected {self.paths}")
        rates = [
            Rate(jnp.abs(_value(new)), _stamp(old) != _stamp(new))
            for (_, old), (_, new) in zip(earlier, later, strict=True)
        ]
        return dict(zip(_labels([path for path, _ in later]), rates, strict=True))


def find_learning_rate(state: Any) -> tuple[RateProbe | None, str]:
    """Looks for the learning rate in an optimizer state: in a `ChainState` or an `optax.inject_hyperparams` state.

    Both are found at any depth: inside `optax.MultiSteps`, `masked`, `multi_transform`, `apply_if_finite`. A group that
    no parameter belongs to has no rate; of `inject_hyperparams` that shows only where something is kept for each
    parameter (Adam, momentum).

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
    return (RateProbe(tuple(keystr(path) for path, _ in found)), "") if found else (None, _ABSENT)


def learning_rates(before: Any, after: Any) -> dict[str, Rate]:
    """The learning rates used by the update from one state to the next, by label; `""` is the one, or the largest.

    Empty where the state holds none.
    """
    probe, _ = find_learning_rate(before)
    if probe is None:
        return {}
    each = probe.read_each(before, after)
    return {"": probe.read(before, after), **(each if len(each) > 1 else {})}


def _find(state: Any) -> list[tuple[Any, Any]]:
    """(path, node) of the nodes that hold a rate. Nothing inside such a node is looked at."""
    nodes, _ = tree_flatten_with_path(state, is_leaf=_holds_rate)
    return [(path, node) for path, node in nodes if _holds_rate(node)]


def _labels(paths: Sequence[Any]) -> list[str]:
    """One label per path, from the dictionary keys in it: those are the labels of `optax.multi_transform`."""
    words = [".".join(str(entry.key) for entry in path if isinstance(entry, DictKey)) for path in paths]
    words = [_FORBIDDEN.sub("_", word) for word in words]
    return [
        word if word and words.count(word) == 1 else f"{word}#{number}" if word else str(number)
        for number, word in enumerate(words)
    ]


def _holds_rate(node: Any) -> bool:
    if isinstance(node, ChainState):
        return node.learning_rate is not None
    values = getattr(node, "hyperparams", None)  # optax's two states of inject_hyperparams, told by their fields
    if not isinstance(values, Mapping) or not hasattr(node, "count") or not _has_parameters(node.inner_state):
        return False
    return "learning_rate" in values and getattr(values["learning_rate"], "shape", ()) == ()


def _has_parameters(inner_state: Any) -> bool:
    """Whether something is kept for a parameter, or nothing is for any: then nobody can tell."""
    trees = [node for node in jax.tree.leaves(inner_state, is_leaf=_is_tree) if _is_tree(node)]
    return not trees or not all(map(is_blank, trees))


def _is_tree(node: Any) -> bool:
    return isinstance(node, Mapping)


def _value(node: Any) -> jax.Array:
    rate = node.learning_rate if isinstance(node, ChainState) else node.hyperparams["learning_rate"]
    return jnp.asarray(rate, jnp.float32)


def _stamp(node: Any) -> jax.Array:
    return jnp.asarray(node.stamp if isinstance(node, ChainState) else node.count)
