"""Numbers of each token become summaries, once the loss has said which tokens count."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from probes_jax.signals.measured import Measured, measured
from probes_jax.stats.explicit import summarize_on_each_device
from probes_jax.stats.partial import Split
from probes_jax.stats.per_token import NOTHING, PerToken
from probes_jax.stats.sketch import summarize_spread
from probes_jax.stats.summary import Summary


@functools.partial(jax.tree_util.register_dataclass, data_fields=("rows",), meta_fields=("labels",))
@dataclasses.dataclass(frozen=True)
class Spread:
    """What is known of some numbers of each token: mean and maximum, and a sketch of the quantiles.

    Attributes:
        rows: `spread` and `sketch` rows with one stack axis; without a sketch, only the maximum is reported.
        labels: A metric name for each, with `{stat}` where the statistic goes.
    """

    rows: dict[str, Summary]
    labels: tuple[str, ...]

    def merge(self, other: Spread) -> Spread:
        """Both parts together."""
        return Spread({key: rows.merge(other.rows[key]) for key, rows in self.rows.items()}, self.labels)


def fit_valid(valid: jax.Array | None, positions: tuple[int, ...]) -> jax.Array | None:
    """Which positions count, in the shape that a model has them in.

    Args:
        valid: bool, as the loss has them; None counts all.
        positions: `(*valid.shape)`, all in one axis, the first axis in two (chunks of examples), or with more axes
            behind (an example's patches).

    Returns:
        bool `positions`; None where that cannot be told.
    """
    if valid is None:
        return jnp.ones(positions, bool)
    shape = valid.shape
    if positions[: len(shape)] == shape:
        return jnp.broadcast_to(valid.reshape(*shape, *(1,) * (len(positions) - len(shape))), positions)
    chunks = len(positions) == len(shape) + 1 and positions[0] * positions[1] == shape[0] and positions[2:] == shape[1:]
    return valid.reshape(positions) if chunks or positions == (math.prod(shape),) else None


def measure_tokens(
    found: Mapping[tuple[str, ...], PerToken],
    valid: jax.Array,
    split: Split,
    mesh: Mesh | None = None,
    *,
    sketch: bool = True,
) -> Spread:
    """Summaries of the columns of several points at once: of thousands of small ones, compiling takes its time.

    Args:
        found: Numbers of each token, of the same shape and columns; by the labels of their rows, one for each layer and
            column.
        valid: From `fit_valid`.
        split: How the mesh shards the positions.
        mesh: The mesh; None on one device.
        sketch: False for numbers that may be negative.
    """
    values = []
    for each in found.values():
        columns = jnp.moveaxis(each.values, -1, len(each.stack_shape()))
        values.append(columns.reshape(-1, *valid.shape))

    def summarize(values: jax.Array, valid: jax.Array, split: Split) -> dict[str, Summary]:
        rows = summarize_spread(values, valid & (values != NOTHING), split, 1)
        return rows if sketch else {"spread": rows["spread"]}

    together = jnp.concatenate(values)
    rows = summarize_on_each_device(summarize, Split(((), *split.dims), split.sizes), mesh, together, valid)
    return Spread(rows, tuple(label for labels in found for label in labels))


def name_spread(spread: Spread) -> Iterator[Measured]:
    """Report entries: mean and maximum, and the sketch, which is read in the graph."""
    if "sketch" not in spread.rows:
        yield measured(spread.labels, spread.rows["spread"], stats=("max",))
        return
    yield measured(spread.labels, spread.rows["spread"])
    labels = tuple(label.replace("{stat}", "sketch") for label in spread.labels)
    yield measured(labels, spread.rows["sketch"], hidden=True)
