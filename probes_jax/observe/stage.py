"""One named stage of an optimizer, and whether all it does is multiply by a number."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core

from probes_jax.observe.flow import flow
from probes_jax.observe.marks import UNKNOWN, Mark, Scaled, Uniform


class Transformation(Protocol):
    """Whatever has optax's two functions: a `GradientTransformation`, or an object such as `optax.MultiSteps`."""

    @property
    def init(self) -> Callable[..., Any]: ...

    @property
    def update(self) -> Callable[..., Any]: ...


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of a chain.

    Attributes:
        name: Unique within the chain.
        init: `init(params) -> state`.
        update: `update(updates, state, params, **extra_args) -> (updates, state)`; takes any extra argument.
    """

    name: str
    init: Callable[..., Any]
    update: Callable[..., Any]


# Some stages ask for the loss value (optax.contrib.reduce_on_plateau); what it is does not matter to a probe.
_EXTRA_ARGS: tuple[Mapping[str, Any], ...] = ({}, {"value": np.float32(1.0)})


def is_scaling(stage: Stage) -> bool:
    """Whether the stage multiplies every update by one number that neither updates nor parameters decide.

    True for `optax.scale`, `optax.scale_by_schedule`, `optax.scale_by_learning_rate`, for `optax.inject_hyperparams`
    around them and for stages of the same behaviour; false for `optax.identity` and for everything that clips,
    preconditions, accumulates, decays or treats parameters differently. Found by looking at what the stage's update
    computes on a small tree; the same inside and outside of `jit`.

    Args:
        stage: Any stage.

    Returns:
        True only when it is sure: what cannot be traced on a small tree is not a scaling.
    """
    tree = {"matrix": _shape(2, 3), "vector": _shape(4), "scalar": _shape()}
    for extra_args in _EXTRA_ARGS:
        try:
            return _scales(stage, tree, extra_args)
        except Exception:  # foreign code on a tree it was not made for: it may fail in any way
            continue
    return False


def _shape(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _scales(stage: Stage, tree: dict[str, Any], extra_args: Mapping[str, Any]) -> bool:
    if not ignores_parameters(stage):
        return False
    factors = set(stage_factors(stage, tree, jax.eval_shape(stage.init, tree), extra_args))
    return len(factors) == 1 and factors.isdisjoint({None, ()})


def ignores_parameters(stage: Stage) -> bool:
    """Whether the stage's state is the same for any parameters: then it can be handed a scalar in their place."""
    tree = {"matrix": _shape(2, 3), "vector": _shape(4)}
    return _form(jax.eval_shape(stage.init, tree)) == _form(jax.eval_shape(stage.init, _shape()))


def _form(state: Any) -> tuple[Any, tuple[Any, ...]]:
    leaves, structure = jax.tree.flatten(state)
    return structure, tuple(leaf.shape for leaf in leaves)


def stage_factors(
    stage: Stage, tree: Any, state: Any, extra_args: Mapping[str, Any] | None = None
) -> list[tuple[Any, ...] | Mark | None]:
    """What the stage does to each leaf: the number it multiplies by (`()` is 1), `ZERO` or None (anything else).

    Args:
        stage: The stage.
        tree: Updates, which stand for the parameters too: a tree of arrays or of `jax.ShapeDtypeStruct`.
        state: Its state for that tree.
        extra_args: Extra arguments of the update.

    Returns:
        One entry per leaf of `tree`. Equal entries are equal numbers.
    """
    closed = jax.make_jaxpr(lambda u, s, p: stage.update(u, s, p, **(extra_args or {}))[0])(tree, state, tree)
    leaves, states = jax.tree.leaves(tree), jax.tree.leaves(state)
    marks: list[Mark] = [Scaled(index) for index in range(len(leaves))]
    marks += [Uniform(("state", index)) if leaf.size == 1 else UNKNOWN for index, leaf in enumerate(states)]
    marks += [UNKNOWN] * len(leaves)
    if [aval.shape for aval in closed.out_avals] != [leaf.shape for leaf in leaves]:
        return [None] * len(leaves)
    return [_factor(mark, index) for index, mark in enumerate(flow(closed, marks))]


def _factor(mark: Mark, leaf: int) -> tuple[Any, ...] | Mark | None:
    if isinstance(mark, Scaled):
        return mark.factor if mark.leaf == leaf else None
    return None if mark is UNKNOWN or isinstance(mark, Uniform) else mark


def scale_factor(
    stage: Stage, state: Any, extra_args: Mapping[str, Any] | None = None, update: jax.Array | float = 1.0
) -> jax.Array:
    """What the stage makes of a scalar at its present state; for 1.0, the number that a scaling multiplies by.

    Args:
        stage: A stage whose state does not depend on the parameters: one for which `is_scaling` holds, or a clip.
        state: Its state before the update, for any parameters.
        extra_args: Extra arguments of the update.
        update: The scalar.

    Returns:
        float32 scalar, with its sign.
    """
    result, _ = stage.update(jnp.asarray(update, jnp.float32), state, jnp.zeros((), jnp.float32), **(extra_args or {}))
    return jnp.asarray(result, jnp.float32)


def ignores_scale(stage: Stage) -> bool:
    """Whether the size of the stage's input hardly matters to its output, as with Adam, sign or normalization.

    A number multiplied in before such a stage is not part of the learning rate. A clip is not such a stage: it passes
    what is small. Measured on the scalars 1e-15, 1 and 100 at the initial state.
    """
    try:
        tiny, one, large = (abs(_output(stage, size)) for size in (1e-15, 1.0, 100.0))
    except Exception:  # see is_scaling
        return False
    return bool(0.0 < one < np.inf and 0.5 < large / one < 2.0 and not np.isclose(tiny, 1e-15, rtol=1e-2, atol=0.0))


def _output(stage: Stage, size: float) -> float:
    """The stage's first output for a scalar of this size, computed now, also while something else is being traced."""
    update, params = np.float32(size), np.float32(1.0)
    closed = jax.make_jaxpr(lambda u, p: stage.update(u, stage.init(p), p)[0])(update, params)
    # A hyperparameter that is traced (optax.inject_hyperparams around a whole chain) stands in as one half.
    consts = [np.full(c.shape, 0.5, c.dtype) if isinstance(c, Tracer) else c for c in closed.consts]
    with jax.ensure_compile_time_eval():
        return float(core.jaxpr_as_fun(core.ClosedJaxpr(closed.jaxpr, consts))(update, params)[0])
