"""The stage that clips by the global norm: which one it is, its threshold, and whether it clips this step."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from probes_jax.observe.chain import Chain, ChainState
from probes_jax.observe.frozen import frozen_leaves
from probes_jax.observe.marks import ZERO
from probes_jax.observe.stage import Stage, ignores_parameters, is_scaling, scale_factor, stage_factors

_LARGE = 1e15  # larger than any threshold, and its square is finite in float32


@dataclasses.dataclass(frozen=True)
class ClipProbe:
    """Which stage of a chain clips the gradient by its global norm.

    Attributes:
        tx: The chain.
        index: Which of its stages clips.
        scalings: The stages before it that multiply the gradient by a number.
        counts_frozen: Whether gradients of frozen leaves enter the norm that it clips: they do when the leaves are
            frozen after it. Then it is the norm of all gradients that decides, else the norm of the trained ones.
    """

    tx: Chain
    index: int
    scalings: tuple[int, ...]
    counts_frozen: bool

    @property
    def stage(self) -> Stage:
        """The stage that clips."""
        return self.tx.stages[self.index]


def find_clip(tx: Any, params: Any, frozen: Any = None) -> tuple[ClipProbe | None, str]:
    """Finds the stage of a `Chain` that clips the gradient by its global norm.

    Found by what it does to small trees: a large update keeps its direction and gets norm c, whatever its size; one
    below c passes unchanged. So `optax.clip`, `clip_by_block_rms`, `adaptive_grad_clip` and normalization are left out,
    and `optax.inject_hyperparams(optax.clip_by_global_norm)` is found.

    Args:
        tx: The optimizer.
        params: Parameters: arrays or `jax.ShapeDtypeStruct`.
        frozen: Tree of bool, True for leaves that the optimizer never moves; None: found here.

    Returns:
        The probe and an empty string, or None and the reason why there is no clip rate.
    """
    if not isinstance(tx, Chain):
        return None, (
            "the stages of this optimizer cannot be seen; make it with pj.chain, with the clip as a stage of its own, "
            '("clip", optax.clip_by_global_norm(1.0)), and any wrapper inside a stage instead of around the chain'
        )
    index = next((index for index, stage in enumerate(tx.stages) if _clips(stage)), None)
    if index is None:
        return None, f"no stage clips by the global norm ({', '.join(stage.name for stage in tx.stages)})"
    scalings: list[int] = []
    zeroed = [False] * len(jax.tree.leaves(params))
    for before, stage in enumerate(tx.stages[:index]):
        if is_scaling(stage):
            scalings.append(before)
            continue
        now = _zeroes(stage, params)
        if now is None:
            return None, (
                f"stage {stage.name!r} changes the gradient before stage {tx.stages[index].name!r} clips it; put the "
                "clip first"
            )
        zeroed = [old or new for old, new in zip(zeroed, now, strict=True)]
    never = jax.tree.leaves(frozen_leaves(tx, params) if frozen is None else frozen)
    if any(zeroed) and zeroed != never:
        return None, (
            f"some, not all, leaves that are set to zero before stage {tx.stages[index].name!r} are frozen: the norm "
            "that it clips is neither that of the trained parameters nor that of all"
        )
    return ClipProbe(tx, index, tuple(scalings), any(never) and not any(zeroed)), ""


def clip_threshold(probe: ClipProbe, state: ChainState) -> jax.Array:
    """The norm that the clip stage allows at this state.

    Args:
        probe: From `find_clip`.
        state: Optimizer state before the update.

    Returns:
        float32 scalar, never negative.
    """
    return _clip_norm(probe, state, jnp.float32(_LARGE))


def clipped(probe: ClipProbe, state: ChainState, grad_norm: jax.Array) -> jax.Array:
    """Whether the update of this step is clipped: 1[G_2 > c], found by handing the stage the scalar G_2.

    Args:
        probe: From `find_clip`.
        state: Optimizer state before the update.
        grad_norm: G_2, float32 scalar: of the trained gradients, or of all where `probe.counts_frozen`.

    Returns:
        bool scalar. True for an infinite norm; False for NaN, which is larger than nothing.
    """
    norm = jnp.asarray(grad_norm, jnp.float32)
    for index in probe.scalings:
        norm = norm * jnp.abs(scale_factor(probe.tx.stages[index], state.stages[index]))
    usable = jnp.isfinite(norm) & (norm > 0)  # optax makes NaN of norm 0 at threshold 0, and of an infinite norm
    safe = jnp.where(usable, norm, 1.0)
    return jnp.where(usable, _clip_norm(probe, state, safe) < safe, jnp.isposinf(norm))


def _clip_norm(probe: ClipProbe, state: ChainState, norm: jax.Array) -> jax.Array:
    """Norm after the clip of an update with this norm."""
    return jnp.abs(scale_factor(probe.stage, state.stages[probe.index], update=norm))


def _zeroes(stage: Stage, params: Any) -> list[bool] | None:
    """Which leaves the stage sets to zero; None when it does anything but that and leaving the others alone."""
    factors = stage_factors(stage, params, jax.eval_shape(stage.init, params))
    if not all(factor in ((), ZERO) for factor in factors):
        return None
    return [factor is ZERO for factor in factors]


def _clips(stage: Stage) -> bool:
    try:
        with jax.ensure_compile_time_eval():
            return _behaves_as_clip(stage)
    except Exception:  # foreign code on a tree it was not made for: it may fail in any way
        return False


def _behaves_as_clip(stage: Stage) -> bool:
    threshold = _norm(_response(stage, 5e10, 1.0, (2, 2)))
    if not threshold < 1e10 or not ignores_parameters(stage) or is_scaling(stage):
        return False  # it lets everything pass, cannot be handed a scalar, or is a learning rate of 0
    # The same norm for any larger update, for more elements (not a mean square) and for other parameters.
    larger = ((5e12, 1.0, (2, 2)), (5e10, 1.0, (8, 3)), (5e10, 30.0, (2, 2)), (1.01 * threshold, 1.0, (2, 2)))
    smaller = (0.99 * threshold, 1e-3 * threshold)
    if threshold == 0.0:  # nothing is below it, and optax makes NaN of a norm of 0
        larger, smaller = larger[:-1], ()
    return all(_is_clipped(stage, *case, threshold) for case in larger) and all(
        _passes(stage, norm) for norm in smaller
    )


def _update(norm: float, width: tuple[int, int]) -> dict[str, np.ndarray]:
    """Two leaves of 3/5 and 4/5 of the norm."""
    return {
        name: np.full((size,), share * norm / math.sqrt(size), np.float32)
        for name, size, share in zip("ab", width, (0.6, 0.8), strict=True)
    }


def _response(stage: Stage, norm: float, parameter: float, width: tuple[int, int]) -> dict[str, np.ndarray]:
    update = _update(norm, width)
    params = {name: jnp.full(leaf.shape, parameter, jnp.float32) for name, leaf in update.items()}
    result, _ = stage.update({name: jnp.asarray(leaf) for name, leaf in update.items()}, stage.init(params), params)
    return {name: np.asarray(leaf, np.float64) for name, leaf in result.items()}


def _norm(tree: dict[str, np.ndarray]) -> float:
    return math.sqrt(sum(float(np.sum(leaf * leaf)) for leaf in tree.values()))


def _is_clipped(stage: Stage, norm: float, parameter: float, width: tuple[int, int], threshold: float) -> bool:
    result, wanted = _response(stage, norm, parameter, width), _update(threshold, width)
    return all(np.allclose(result[name], leaf, rtol=1e-4, atol=0.0) for name, leaf in wanted.items())


def _passes(stage: Stage, norm: float) -> bool:
    result, update = _response(stage, norm, 1.0, (2, 2)), _update(norm, (2, 2))
    return all(np.array_equal(result[name], leaf.astype(np.float64)) for name, leaf in update.items())
