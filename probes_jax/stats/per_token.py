"""Numbers of each token, on their way from where they are measured to where it is known which tokens count."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from probes_jax.stats.types import filled

RESIDUAL, ATTENTION, ROUTER = "residual", "attention", "router"
FAMILIES = (RESIDUAL, ATTENTION, ROUTER)  # first segments of the metrics' names; no module's class has one
NOTHING = -jnp.inf  # no measurement


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("values",), meta_fields=("family", "names", "positions", "size")
)
@dataclasses.dataclass(frozen=True)
class PerToken:
    """A few numbers for each token: what a block leaves behind where a sum over tokens would count padding too.

    The loss says which tokens count, and it is made after the model has run. So these leave scans and checkpointed
    blocks as they are, and become summaries at the end of the forward pass.

    Attributes:
        values: `[*stack, *positions, columns]`; `NOTHING` where there is no measurement.
        family: What they are about: first segment of the metrics' names.
        names: Name of each column; one for all where the family says what they are.
        positions: How many axes are positions of tokens.
        size: Of routing, how many experts there are.
    """

    values: jax.Array
    family: str
    names: tuple[str, ...]
    positions: int
    size: int = 0

    def stack_shape(self) -> tuple[int, ...]:
        """Leading axes before the positions."""
        return self.values.shape[: self.values.ndim - 1 - self.positions]

    def collapse(self, axis: int) -> PerToken:
        """With one stack axis (examples, chunks of them) as the first axis of the positions."""
        last = len(self.stack_shape()) - 1
        return dataclasses.replace(self, values=jnp.moveaxis(self.values, axis, last), positions=self.positions + 1)

    def carried(self) -> PerToken:
        """As `Summary.carried`: nothing to do."""
        return self

    def identity(self) -> PerToken:
        """The same without a measurement."""
        return dataclasses.replace(self, values=filled(self.values, NOTHING))


def is_kept(node: object) -> bool:
    """Whether a node of a pytree is a whole `PerToken` (`is_leaf` of `jax.tree.map`)."""
    return isinstance(node, PerToken)
