"""What one call of one method leaves behind: a summary of each float array it returned."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from probes_jax.observe.names import escape
from probes_jax.observe.point import INPUT
from probes_jax.observe.tap import Measure, fits, tap
from probes_jax.stats.summary import Summary
from probes_jax.stats.types import filled


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
        values: Summary of each float leaf of the output, by its path inside the output; or numbers of each token.
        class_name: Class of the module.
        method: Name of the method.
        below: Path from the module it is stored at to the module it belongs to; `()` for the same.
        stack: For each leading axis, the outermost first, the position in the module's path after which a layer index
            goes; None for an axis of time steps or examples.
    """

    values: Mapping[str, Any]  # of `Summary` or of `PerToken`
    class_name: str
    method: str
    below: tuple[str, ...] = ()
    stack: tuple[int | None, ...] = ()

    def stacked(self, position: int) -> Record:
        """The record as it comes out of a scan over layers, named after `path[:position]`."""
        return dataclasses.replace(self, stack=(position, *self.stack))

    def repeated(self) -> Record:
        """The record as it comes out of a scan over time or a map over examples: its first axis is to be merged."""
        return dataclasses.replace(self, stack=(None, *self.stack))

    def merged(self) -> Record:
        """The record with one row per layer: axes of time steps and examples are merged."""
        values: Any = self.values
        for axis in reversed([axis for axis, position in enumerate(self.stack) if position is None]):
            values = {leaf: value.collapse(axis).carried() for leaf, value in values.items()}
        return dataclasses.replace(self, values=values, stack=self.layers)

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """Lengths of the leading axes; none of slots that nothing is tapped with."""
        return next((value.stack_shape() for value in self.values.values()), ())

    @property
    def layers(self) -> tuple[int, ...]:
        """`stack` without the axes of time steps and examples."""
        return tuple(position for position in self.stack if position is not None)


def slots_like(raw: Any) -> Any:
    """Slots for the taps of an evaluation like the one that left the records in `raw` behind: zeros of their structure.

    What is measured of tokens has no gradient to be measured.
    """

    def slots(record: Record) -> Record:
        values = {leaf: value for leaf, value in record.values.items() if isinstance(value, Summary)}
        return dataclasses.replace(record, values=jax.tree.map(lambda x: filled(x, 0.0), values))

    return jax.tree.map(slots, raw, is_leaf=is_record)


def is_record(node: object) -> bool:
    """Whether a node of a pytree is a whole record (`is_leaf` of `jax.tree.map`)."""
    return isinstance(node, Record)


def float_leaves(output: Any) -> dict[str, jax.Array]:
    """The float arrays in any pytree, by their path in it (`"h"`, `"0.k"`); a single one has the path `""`.

    A scanned layer returns `(x, None)` where its unrolled twin returns `x`: both have one float array.

    >>> import jax.numpy as jnp
    >>> list(float_leaves({"h": jnp.ones(2), "c": jnp.ones(2), "n": 3, "ids": jnp.arange(2)}))
    ['c', 'h']
    """
    leaves, names, _ = _named(output)
    return {name: jnp.asarray(leaves[index]) for index, name in names.items()}


def shapes_of(leaves: Mapping[str, jax.Array]) -> dict[str, tuple[int, ...]]:
    """The shape of each of `float_leaves`."""
    return {name: leaf.shape for name, leaf in leaves.items()}


def tapped(measure: Measure, output: Any, record: Record, slots: Record) -> Any:
    """`output` with a tap on every float array that has a fitting slot (see `tap`).

    Args:
        measure: Summarizes an array.
        output: What a method returned.
        record: What was measured of it.
        slots: Zeros of the same structure. Constants have no gradient and get no tap. Nor does what a module is given:
            what goes past the module would not be in it.
    """
    if record.method == INPUT:
        return output
    leaves, names, structure = _named(output)
    for index, name in names.items():
        slot = slots.values.get(name)
        if slot is not None and fits(slot, record.values[name]) and not isinstance(leaves[index], np.ndarray):
            leaves[index] = tap(measure, leaves[index], slot)
    return jax.tree.unflatten(structure, leaves)


def _named(output: Any) -> tuple[list[Any], dict[int, str], Any]:
    """Leaves, the names of the float arrays by number, and the structure."""
    try:
        pairs, structure = jax.tree_util.tree_flatten_with_path(output)
    except (TypeError, ValueError):  # not a pytree JAX can flatten, such as a dict with keys it cannot sort
        return [], {}, jax.tree.structure(())
    names = {
        index: ".".join(_key(entry) for entry in path)
        for index, (path, leaf) in enumerate(pairs)
        if isinstance(leaf, jax.Array | np.ndarray) and jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    return [leaf for _, leaf in pairs], dict.fromkeys(names, "") if len(names) == 1 else names, structure


def _key(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return escape(str(getattr(entry, attribute))).replace(".", "%2E")
    return escape(str(entry)).replace(".", "%2E")
