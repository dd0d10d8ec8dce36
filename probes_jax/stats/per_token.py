"""Numbers of each token, on their way from where they are measured to where it is known which tokens count."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from probes_jax.stats.types import filled

RESIDUAL, ATTENTION, ROUTER, MEDIA = "residual", "attention", "router", "media"
FAMILIES = (RESIDUAL, ATTENTION, ROUTER, MEDIA)  # first segments of the metrics' names; no module's class has one
NOTHING = -jnp.inf  # no measurement


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "bias"),
    meta_fields=("family", "names", "positions", "size"),
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
        bias: Of routing, a number for each expert, float32 `[*stack, size]`; None where it is not known.
    """

    values: jax.Array
    family: str
    names: tuple[str, ...]
    positions: int
    size: int = 0
    bias: jax.Array | None = None

    def stack_shape(self) -> tuple[int, ...]:
        """Leading axes before the positions."""
        return self.values.shape[: self.values.ndim - 1 - self.positions]

    def collapse(self, axis: int) -> PerToken:
        """With one stack axis (examples, chunks of them) as the first axis of the positions."""
        last = len(self.stack_shape()) - 1
        bias = None if self.bias is None else self.bias.max(axis)  # the same for all, or `NOTHING`
        values = jnp.moveaxis(self.values, axis, last)
        return dataclasses.replace(self, values=values, bias=bias, positions=self.positions + 1)

    def carried(self) -> PerToken:
        """As `Summary.carried`: nothing to do."""
        return self

    def identity(self) -> PerToken:
        """The same without a measurement."""
        bias = None if self.bias is None else filled(self.bias, NOTHING)
        return dataclasses.replace(self, values=filled(self.values, NOTHING), bias=bias)


def mean_square(x: jax.Array) -> PerToken:
    """Mean square of what enters a block, of each token: `[*positions, d]` to one column."""
    square = jnp.mean(jnp.square(jax.lax.stop_gradient(x).astype(jnp.float32)), axis=-1, keepdims=True)
    return PerToken(square, MEDIA, ("square",), x.ndim - 1)


def is_kept(node: object) -> bool:
    """Whether a node of a pytree is a whole `PerToken` (`is_leaf` of `jax.tree.map`)."""
    return isinstance(node, PerToken)
