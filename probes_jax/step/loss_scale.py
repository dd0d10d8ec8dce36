"""Loss scaling: the factor that keeps small gradients of a low-precision backward pass from rounding to zero.

The behaviour is that of torch's `GradScaler` and, but for one step, of `flax.training.dynamic_scale.DynamicScale`. That
one cannot be used here: it owns `value_and_grad`, while a step accumulates microbatches and unscales once; it grows one
step later than its interval says, has no upper bound short of overflow, and does not count its drops.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from probes_jax.spec import check


@dataclasses.dataclass(frozen=True)
class LossScale:
    """How the loss is scaled. Checked when built.

    Attributes:
        initial: Factor on the loss at the first step.
        dynamic: Whether it adapts. False: it stays `initial`, and the settings below mean nothing.
        growth_interval: Steps with finite gradients, in a row, after which the scale grows.
        factor: What it grows and drops by. A power of two, as are the bounds, so that scaling is exact.
        minimum: Where drops stop.
        maximum: Where growth stops.
    """

    initial: float = 2.0**15
    dynamic: bool = True
    growth_interval: int = 2000
    factor: float = 2.0
    minimum: float = 1.0
    maximum: float = 2.0**24

    def __post_init__(self) -> None:
        for name in ("initial", "factor", "minimum", "maximum"):
            value = check.number(f"LossScale {name}", getattr(self, name))
            if value > 2.0**126:
                raise ValueError(f"LossScale {name} must be a positive number up to 2**126, got {value!r}")
            object.__setattr__(self, name, value)
        interval = check.integer("LossScale growth_interval", self.growth_interval, 1)
        object.__setattr__(self, "growth_interval", interval)
        check.flag("LossScale dynamic", self.dynamic)
        if self.dynamic:
            self._check_dynamic()

    def _check_dynamic(self) -> None:
        for name in ("initial", "factor", "minimum", "maximum"):
            value = getattr(self, name)
            if math.frexp(value)[0] != 0.5:
                raise ValueError(f"LossScale {name} must be a power of two when dynamic, got {value!r}")
        if self.factor <= 1:
            raise ValueError(f"LossScale factor must be greater than 1, got {self.factor!r}")
        if not self.minimum <= self.initial <= self.maximum:
            got = f"{self.minimum!r}, {self.initial!r}, {self.maximum!r}"
            raise ValueError(f"LossScale needs minimum <= initial <= maximum, got {got}")


class LossScaleState(NamedTuple):
    """What dynamic loss scaling carries from step to step."""

    scale: jax.Array  # float32 []: factor on the loss of the next step
    good_steps: jax.Array  # uint32 []: steps with finite gradients since the last growth or drop
    drops: jax.Array  # uint32 []: times that the scale was lowered


def as_loss_scale(value: LossScale | float | str | None) -> LossScale | None:
    """Settings from what a user may write: None, a fixed number, `"dynamic"` or `LossScale(...)`.

    Raises:
        ValueError: Anything else, or a number that is not positive and finite.

    Example:
        >>> as_loss_scale(128).initial, as_loss_scale(128).dynamic
        (128.0, False)
    """
    if value is None or isinstance(value, LossScale):
        return value
    if isinstance(value, str) and value == "dynamic":
        return LossScale()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f'loss_scale must be None, a positive number, "dynamic" or LossScale(...), got {value!r}')
    return LossScale(initial=float(value), dynamic=False)


def init_loss_scale(settings: LossScale | None) -> LossScaleState:
    """The state before the first step. Without loss scaling the scale is 1 and stays so."""
    scale = 1.0 if settings is None else settings.initial
    return LossScaleState(jnp.float32(scale), jnp.uint32(0), jnp.uint32(0))


def update_loss_scale(settings: LossScale | None, state: LossScaleState, finite: jax.Array) -> LossScaleState:
    """The next step's scale: divided by `factor` after a non-finite gradient, multiplied after enough finite ones.

    Args:
        settings: The settings; static or None: the state stays as it is.
        state: The state that this step used.
        finite: bool scalar: whether every gradient element of this step was finite.

    Returns:
        State of the same structure.

    Example:
        >>> settings = LossScale(initial=8.0)
        >>> float(update_loss_scale(settings, init_loss_scale(settings), jnp.bool_(False)).scale)
        4.0
    """
    if settings is None or not settings.dynamic:
        return state
    good_steps = jnp.where(finite, state.good_steps + jnp.uint32(1), jnp.uint32(0))
    grow = good_steps >= settings.growth_interval
    grown = jnp.minimum(state.scale * jnp.float32(settings.factor), jnp.float32(settings.maximum))
    lowered = jnp.maximum(state.scale / jnp.float32(settings.factor), jnp.float32(settings.minimum))
    scale = jnp.where(finite, jnp.where(grow, grown, state.scale), lowered)
    return LossScaleState(
        scale=scale,
        good_steps=jnp.where(grow, jnp.uint32(0), good_steps),
        drops=state.drops + (scale < state.scale).astype(jnp.uint32),
    )


def unscale(tree: Any, scale: jax.Array) -> Any:
    """Divides every leaf by the loss scale, in float32 or wider; each leaf keeps its dtype.

    A gradient that is float16 itself rounds again when it is stored: keep the parameters in float32 (or bfloat16) to
    profit from loss scaling. Leaves that are not floating-point pass through.

    Args:
        tree: Gradients of the scaled loss.
        scale: float32 scalar.

    Returns:
        Gradients of the loss.

    Example:
        >>> float(unscale(jnp.float32(128.0), jnp.float32(128.0)))
        1.0
    """

    def divide(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf
        return (leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) / scale).astype(leaf.dtype)

    return jax.tree.map(divide, tree)
