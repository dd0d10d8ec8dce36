"""What one call of one method leaves behind: a summary of each float array it returned."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from probes_jax.observe.names import escape
from probes_jax.stats.summary import Summary


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("values",),
    meta_fields=("class_name", "method", "below", "stack"),
)
@dataclasses.dataclass(frozen=True)
class Record:
    """A pytree that leaves scans and checkpointed blocks as one of their outputs.

    It knows nothing of the path of its module: a jitted block traced once serves several modules, and the path is
    where the record is found.

    Attributes:
        values: Summary of each float leaf of the output, by its path inside the output.
        class_name: Class of the module.
        method: Name of the method.
        below: Path from the module it is stored at to the module it belongs to; `()` for the same.
        stack: Positions in the module's path after which a layer index goes, outermost scan first.
    """

    values: dict[str, Summary]
    class_name: str
    method: str
    below: tuple[str, ...] = ()
    stack: tuple[int, ...] = ()

    def stacked(self, position: int) -> Record:
        """The record as it comes out of a scan over layers, named after `path[:position]`."""
        return dataclasses.replace(self, stack=(position, *self.stack))

    def collapsed(self) -> Record:
        """The record as it comes out of a scan over time or a map over examples: merged over its first axis."""
        return dataclasses.replace(
            self, values={leaf: value.collapse().carried() for leaf, value in self.values.items()}
        )


def float_leaves(output: Any) -> dict[str, jax.Array]:
    """The float arrays in any pytree, by their path in it (`"h"`, `"0.k"`); a single one has the path `""`.

    A scanned layer returns `(x, None)` where its unrolled twin returns `x`: both have one float array.

    >>> import jax.numpy as jnp
    >>> list(float_leaves({"h": jnp.ones(2), "c": jnp.ones(2), "n": 3, "ids": jnp.arange(2)}))
    ['c', 'h']
    """
    try:
        leaves = jax.tree_util.tree_flatten_with_path(output)[0]
    except (TypeError, ValueError):  # not a pytree JAX can flatten, such as a dict with keys it cannot sort
        return {}
    found: dict[str, jax.Array] = {}
    for path, leaf in leaves:
        if isinstance(leaf, jax.Array | np.ndarray) and jnp.issubdtype(leaf.dtype, jnp.floating):
            found[".".join(_key(entry) for entry in path)] = jnp.asarray(leaf)
    return dict(zip([""], found.values())) if len(found) == 1 else found


def _key(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return escape(str(getattr(entry, attribute))).replace(".", "%2E")
    return escape(str(entry)).replace(".", "%2E")
