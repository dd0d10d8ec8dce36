"""optax.chain with names and a state that says which learning rate was used, and when."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from probes_jax.observe.collect import collecting, run_stage
from probes_jax.observe.stage import Stage, Transformation, ignores_scale, is_scaling, scale_factor

NO_RATE = -1.0  # a learning rate is an absolute value; NaN would stop a run under jax_debug_nans
_NAME = re.compile(r"[^/\[\]{}\s]+")


class ChainState(NamedTuple):
    """State of a chain."""

    stamp: jax.Array  # uint32 []: updates done. Inside optax.MultiSteps it stands still between two of them
    # float32 []: used by the last update, NO_RATE before; None: no scaling stage, or nothing to scale
    learning_rate: jax.Array | None
    stages: tuple[Any, ...]  # the state of each stage, in order


class Chain(optax.GradientTransformationExtraArgs):
    """An optax transformation that remembers its stages.

    Attributes:
        stages: The named stages, in order.
        scalings: Indices of the stages whose product is the learning rate.
    """

    stages: tuple[Stage, ...]
    scalings: tuple[int, ...]

    def __new__(cls, init: Any, update: Any, stages: tuple[Stage, ...] = (), scalings: tuple[int, ...] = ()) -> Chain:
        self = super().__new__(cls, init, update)
        self.stages, self.scalings = stages, scalings
        return self


def chain(*stages: tuple[str, Transformation]) -> Chain:
    """Applies named transformations one after the other: `optax.chain`, bit for bit, with readings.

    The state keeps a step stamp and the learning rate that the last update used, read before the schedule's count was
    raised: the product of the absolute values of all stages that only multiply by a number (`optax.scale`,
    `optax.scale_by_schedule`, `optax.scale_by_learning_rate`), leaving out those in front of a stage to which the size
    of its input does not matter (Adam). It is the rate in float32, before it is rounded to a leaf's dtype.

    Args:
        *stages: Pairs of a name and an optax transformation. Names are unique and hold no `/`, bracket, brace or space.

    Returns:
        An `optax.GradientTransformationExtraArgs`; its state is a `ChainState` whose structure never changes.

    Raises:
        TypeError: An argument is not a pair of a name and a transformation.
        ValueError: There is no stage, or a name is empty, repeated or holds a forbidden character.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> warm_up = lambda count: 0.1 * count
        >>> tx = chain(("clip", optax.clip_by_global_norm(1.0)), ("lr", optax.scale_by_learning_rate(warm_up)))
        >>> state = tx.init(jnp.ones(3))
        >>> for _ in range(3):
        ...     updates, state = tx.update(jnp.ones(3), state)
        ...     print(f"{state.learning_rate:.1f}")
        0.0
        0.1
        0.2
    """
    named = tuple(_check_stage(index, stage) for index, stage in enumerate(stages))
    if not named:
        raise ValueError('chain needs at least one stage: chain(("lr", optax.scale_by_learning_rate(1e-3)))')
    names = [stage.name for stage in named]
    if len(set(names)) < len(names):
        raise ValueError(f"chain names must be unique, got {names}")
    scalings = _rate_stages(named)

    def init(params: optax.Params) -> ChainState:
        rate = jnp.full((), NO_RATE, jnp.float32) if scalings and not is_blank(params) else None
        return ChainState(jnp.zeros((), jnp.uint32), rate, tuple(stage.init(params) for stage in named))

    def update(
        updates: optax.Updates, state: ChainState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, ChainState]:
        _check_state(state, names)
        # Before the stages run: the count that this update's schedule sees.
        with collecting(None):  # a chain inside of a stage that is only asked for its factor
            factors = [jnp.abs(scale_factor(named[index], state.stages[index], extra_args)) for index in scalings]
        rate = None if state.learning_rate is None else math.prod(factors[1:], start=factors[0])
        after = []
        for stage, inner in zip(named, state.stages, strict=True):
            updates, inner = run_stage(stage, updates, inner, params, extra_args)
            after.append(inner)
        return updates, ChainState(state.stamp + jnp.uint32(1), rate, tuple(after))

    return Chain(init, update, named, scalings)


def is_blank(params: Any) -> bool:
    """Whether these are the parameters of a group of `optax.partition` that no parameter belongs to."""
    leaves = jax.tree.leaves(params, is_leaf=_is_masked)
    return bool(leaves) and all(map(_is_masked, leaves))


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _check_stage(index: int, stage: Any) -> Stage:
    where = f"chain argument {index + 1}"
    if _is_transformation(stage):
        raise TypeError(f'{where} is a transformation without a name; write ("name", transformation)')
    if not isinstance(stage, tuple | list) or len(stage) != 2:
        raise TypeError(
            f'{where} must be a pair ("name", transformation), got {type(stage).__name__}; '
            "pass a list of pairs as chain(*pairs)"
        )
    name, tx = stage
    if isinstance(tx, str) or _is_transformation(name):
        raise TypeError(f'{where}: the name comes first; write ("name", transformation)')
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{where}: a name may not be empty or hold '/', brackets, braces or spaces, got {name!r}")
    if not _is_transformation(tx):
        hint = "; call it to make one" if callable(tx) else ""
        raise TypeError(f"{where} ({name!r}) must hold an optax transformation, got {type(tx).__name__}{hint}")
    tx = optax.with_extra_args_support(tx)
    return Stage(name, tx.init, tx.update)


def _is_transformation(value: Any) -> bool:
    return callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))


def _rate_stages(stages: tuple[Stage, ...]) -> tuple[int, ...]:
    """The scalings that reach the parameters: from the back, up to a stage that does not care for its input's size."""
    scalings = [index for index, stage in enumerate(stages) if is_scaling(stage)]
    reached: list[int] = []
    for index in range(len(stages) - 1, (scalings or [len(stages)])[0] - 1, -1):
        if index in scalings:
            reached.append(index)
        elif ignores_scale(stages[index]):
            break
    return tuple(reversed(reached))


def _check_state(state: Any, names: list[str]) -> None:
    if not isinstance(state, ChainState):
        raise TypeError(f"chain update: state must come from this chain's init, got {type(state).__name__}")
    if len(state.stages) != len(names):
        raise ValueError(
            f"chain update: the state has {len(state.stages)} stages, the chain has {len(names)} ({', '.join(names)}); "
            "the state was made by another chain: call init again"
        )
