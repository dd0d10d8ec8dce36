"""Given arrays against those a model would make: what lacks, what is too much, what has another shape."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

_SHOWN = 5  # names listed in an error


def check_arrays(what: str, given: Any, expected: Any) -> None:
    """Compares two nested dicts of arrays (or shapes) by path.

    Raises:
        ValueError: They differ; the message names the first differences.
    """
    have, want = _by_path(given), _by_path(expected)
    for verb, paths in (
        ("lacks", [path for path in want if path not in have]),
        ("has, and the model does not have,", [path for path in have if path not in want]),
    ):
        if paths:
            raise ValueError(f"{what} {verb} {some(paths)}; check that it belongs to this model")
    wrong = [path for path in want if jnp.shape(have[path]) != jnp.shape(want[path])]
    if wrong:
        path = wrong[0]
        more = f" ({len(wrong)} arrays differ)" if len(wrong) > 1 else ""
        raise ValueError(
            f"{what}: {path} has shape {jnp.shape(have[path])}, the model makes {jnp.shape(want[path])}{more}"
        )


def some(names: Iterable[Any]) -> str:
    """The first few names, for an error message."""
    names = [str(name) for name in names]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _by_path(tree: Any) -> dict[str, Any]:
    return {
        "/".join(str(getattr(key, "key", key)) for key in path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
