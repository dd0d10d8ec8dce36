"""States of which some leaves are shapes: `pj.inspect` and a checkpoint take them, a step does not."""

from __future__ import annotations

from typing import Any

import jax

_MOST = 3  # leaves that an error names


def is_abstract(leaf: Any) -> bool:
    """Whether a leaf is only the shape of an array."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def lying(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array that lies so."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def refuse_abstract(tree: Any) -> None:
    """Says which leaves of a state, or of a part of it, hold nothing.

    Raises:
        ValueError: There are some.

    Example:
        >>> refuse_abstract({"params": {"kernel": jax.ShapeDtypeStruct((2, 3), "float32")}})
        Traceback (most recent call last):
        ValueError: state holds a shape instead of an array in params/kernel, as TrainState.create(...
    """
    found = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if is_abstract(leaf)
    ]
    if found:
        more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
        raise ValueError(
            f"state holds a shape instead of an array in {', '.join(found[:_MOST])}{more}, as "
            "TrainState.create(abstract=True) and jax.eval_shape make them. pj.inspect and pj.preview take that; to "
            "train, fill it with pj.restore_state(state, tree of a checkpoint), or create it without abstract=True"
        )
