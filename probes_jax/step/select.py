"""What is trained: `wrt` splits the parameters, and puts them together again."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from probes_jax.spec import check

Path = tuple[str, ...]
Chosen = Callable[[Path, Any], bool]
Wrt = str | Callable[[Path, Any], bool] | None


def flatten(tree: Any) -> dict[Path, Any]:
    """Leaves by path, of any pytree: nested dicts, dataclasses, lists, an nnx state. An index is text in a path."""
    return {path_of(keys): leaf for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def path_of(keys: tuple[Any, ...]) -> Path:
    """The keys of a leaf as JAX has them, as text."""
    if len(keys) > 1 and keys[-1] == jax.tree_util.GetAttrKey("value"):
        keys = keys[:-1]  # an nnx Variable is a node with its array inside
    return tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in keys)


def unflatten(leaves: dict[Path, Any]) -> dict[Any, Any]:
    """Leaves by path to nested dicts."""
    tree: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def split_trained(params: dict[Any, Any], wrt: Wrt) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Trained and frozen parameters, two nested dicts without a leaf in common.

    Args:
        params: Nested dict of arrays.
        wrt: None trains every floating-point parameter. A regular expression is searched in `a/b/kernel`; a function
            gets the path (tuple of keys) and the array.

    Raises:
        ValueError: Nothing would be trained, or something complex would be.
    """
    leaves = flatten(params)
    chosen = chooser(wrt)
    trained = {p: x for p, x in leaves.items() if jnp.issubdtype(x.dtype, jnp.inexact) and chosen(p, x)}
    for path, leaf in trained.items():
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise ValueError(
                f"parameter {'/'.join(map(str, path))} is {leaf.dtype}; only real parameters can be trained. Keep real "
                "and imaginary part as two parameters, or leave it out with wrt="
            )
    if not trained:
        known = ", ".join("/".join(map(str, path)) for path in list(leaves)[:5])
        raise ValueError(
            f"wrt={wrt!r} selects no floating-point parameter; there are {len(leaves)}, the first: {known}"
        )
    return unflatten(trained), unflatten({path: leaf for path, leaf in leaves.items() if path not in trained})


def chooser(wrt: Wrt) -> Chosen:
    """`wrt` as a function of (path, array).

    Raises:
        TypeError, ValueError: It is none of what it may be.
    """
    if wrt is None:
        return lambda path, leaf: True
    if isinstance(wrt, str):
        pattern = re.compile(check.pattern("wrt", wrt))
        return lambda path, leaf: pattern.search("/".join(map(str, path))) is not None
    if callable(wrt):
        return wrt
    raise TypeError(f"wrt must be a regular expression or a function of (path, array), got {type(wrt).__name__}")


def join(trained: dict[Any, Any], frozen: dict[Any, Any]) -> dict[Any, Any]:
    """All parameters again."""
    return unflatten({**flatten(frozen), **flatten(trained)}) if frozen else trained
