"""Gradients, parameters and updates: one row per layer in the full program, totals in every program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from probes_jax.signals.measured import Measured, measured
from probes_jax.spec.summary import LOSSES
from probes_jax.stats.explicit import summarize_where_it_lies
from probes_jax.stats.manual import differing
from probes_jax.stats.moments import summarize_magnitude, summarize_norm, summarize_update
from probes_jax.stats.partial import WHOLE, Split, cut
from probes_jax.stats.precision import summarize_magnitude_precisely
from probes_jax.stats.summary import Summary, is_summary
from probes_jax.stats.types import stated

Role = Literal["embedding", "other", "frozen"]
ENCODER = "media/encoder_gradient"
GRADIENT_STATS = ("norm", "abs_mean", "abs_max", "finite_abs_max", "zero_fraction", "nan_count", "inf_count")


@dataclasses.dataclass(frozen=True)
class ParameterInfo:
    """What is known of one parameter tensor before the step is traced.

    Attributes:
        names: One canonical name per layer; a single one unless the tensor stacks layers.
        stack_axis: Axis that stacks the layers, several where stacks are nested (the outermost first), or None.
        split: How the mesh shards it.
        embedding: Whether its zero fraction is reported apart.
        frozen: Whether the optimizer never moves it.
        encoder: Whether it belongs to the encoder of another modality.
    """

    names: tuple[str, ...]
    stack_axis: int | tuple[int, ...] | None = None
    split: Split = WHOLE
    embedding: bool = False
    frozen: bool = False
    encoder: bool = False

    @property
    def role(self) -> Role:
        """What the tensor's zero fraction is reported with."""
        return "frozen" if self.frozen else "embedding" if self.embedding else "other"


_SMALL = 2**16  # elements; smaller tensors cost more as reductions of their own than read together

Tensors = Mapping[Any, jax.Array]  # by the key of the ParameterInfo
Infos = Mapping[Any, ParameterInfo]
Summarize = Callable[..., Any]  # (*arrays, split) -> pytree of Summary


def summarize_layers(summarize: Summarize, info: ParameterInfo, *arrays: jax.Array) -> Any:
    """Rows of one tensor, or of several like it, with a leading stack axis for each axis that stacks layers."""
    axis = info.stack_axis
    axes = () if axis is None else (axis,) if isinstance(axis, int) else axis

    def by_layer(*arrays: jax.Array, split: Split, axes: tuple[int, ...] = axes) -> Any:
        if not axes:
            return summarize(*arrays, split=split)
        outer, *inner = axes
        rest = Split(split.dims[:outer] + split.dims[outer + 1 :], split.sizes)
        left = tuple(axis - (axis > outer) for axis in inner)
        rows = jax.vmap(lambda *layer: by_layer(*layer, split=rest, axes=left), in_axes=outer)(*arrays)
        group = split.dims[outer] if outer < len(split.dims) and not inner else ()
        own = tuple((axis, dict(split.sizes)[axis]) for axis in group)
        return jax.tree.map(lambda of_layer: of_layer.with_own_layers(own), rows, is_leaf=is_summary)

    return summarize_where_it_lies(by_layer, info.split, *arrays)


def _totals(summarize: Summarize, tensors: Tensors, infos: Infos) -> dict[Role, list[Summary]]:
    """Summaries by role that together cover every tensor once; small tensors that are cut alike are read as one."""
    found: dict[Role, list[Summary]] = {}
    small: dict[tuple[Role, tuple[str, ...]], list[jax.Array]] = {}  # by role, and how it is cut
    for key, info in infos.items():
        x = tensors[key]
        if x.size < _SMALL and not differing(x) and stated(x) is None:
            part = cut(x.astype(jnp.float32), info.split)
            small.setdefault((info.role, part.axes), []).append(part.array.reshape(*part.rows, -1))
        else:
            of_tensor = summarize_where_it_lies(summarize, info.split, x)
            found.setdefault(info.role, []).append(of_tensor.carried())
    for (role, axes), pieces in small.items():
        joined = jnp.concatenate(pieces, axis=-1)
        split = Split(tuple((axis,) for axis in axes), tuple(zip(axes, joined.shape)))
        found.setdefault(role, []).append(summarize_where_it_lies(summarize, split, joined).carried())
    return found


def _rows(summarize: Summarize, tensors: Tensors, infos: Infos) -> tuple[dict[Any, Summary], dict[Role, list[Summary]]]:
    """Each tensor's rows, and the totals that they merge to."""
    rows = {key: summarize_layers(summarize, info, tensors[key]) for key, info in infos.items()}
    found: dict[Role, list[Summary]] = {}
    for key, info in infos.items():
        whole = rows[key].narrowed(rows[key].kind.removeprefix("precise_"))
        found.setdefault(info.role, []).append(of_all_layers(whole))
    return rows, found


def of_all_layers(rows: Summary) -> Summary:
    """The summary of all layers of a stack together."""
    while rows.stack_shape():
        rows = rows.collapse(0)
    return rows.carried()


def measure_gradients(gradients: Tensors, infos: Infos, *, layers: bool, precision: bool = False) -> list[Measured]:
    """Entries of the gradients: totals, zero fractions by role, frozen apart, and with `layers` each layer's own.

    With `precision` each layer's own also says what narrower formats would lose.
    """
    rows = {}
    if layers:
        rows, totals = _rows(summarize_magnitude_precisely if precision else summarize_magnitude, gradients, infos)
    else:
        totals = _totals(summarize_magnitude, gradients, infos)
    frozen = totals.pop("frozen", [])
    out = []
    if totals:
        out.append(measured("grad/{stat}", *(s for of_role in totals.values() for s in of_role), stats=GRADIENT_STATS))
    for role, of_role in totals.items():
        out.append(measured(f"grad/{{stat}}/{role}", *of_role, stats=("zero_fraction",)))
    if frozen:
        out.append(measured("grad_frozen/{stat}", *frozen, stats=("norm",)))
    for key, row in rows.items():
        if not infos[key].frozen:
            stats = (*GRADIENT_STATS, *(LOSSES if precision else ()))
            out.append(measured(tuple(f"grad/{name}/{{stat}}" for name in infos[key].names), row, stats=stats))
    return out


def measure_squares(gradients: Tensors, infos: Infos) -> tuple[Summary, ...]:
    """`norm` rows of the gradients of all parameters that move together, one for each way in which they are sharded.

    Each tensor by itself: how the compiler lays a gradient inside of a loop is not known, and to join them moves some.
    """
    moved = {key: info for key, info in infos.items() if not info.frozen}
    rows = [summarize_where_it_lies(summarize_norm, info.split, gradients[key]) for key, info in moved.items()]
    return measured("square", *rows).parts


def measure_encoder(gradients: Tensors, infos: Infos) -> list[Measured]:
    """The gradient of the encoder's parameters together, to be read in the graph; nothing without an encoder."""
    rows = [
        of_all_layers(summarize_layers(summarize_norm, info, gradients[key]))
        for key, info in infos.items()
        if info.encoder and not info.frozen
    ]
    return [measured(ENCODER, *rows, hidden=True)] if rows else []


def measure_norms(family: str, tensors: Tensors, infos: Infos, *, layers: bool) -> list[Measured]:
    """Entries of the norms of `param` or `update`: the total, and with `layers` each layer's own."""
    rows = {}
    if layers:
        rows, totals = _rows(summarize_norm, tensors, infos)
    else:
        totals = _totals(summarize_norm, tensors, infos)
    out = [measured(f"{family}/{{stat}}", *(s for of_role in totals.values() for s in of_role))]
    for key, row in rows.items():
        out.append(measured(tuple(f"{family}/{name}/{{stat}}" for name in infos[key].names), row))
    return out


def measure_updates(applied: Tensors, requested: Tensors, infos: Infos, skip: jax.Array | None) -> list[Measured]:
    """Norms as `measure_norms` has them, and how much of each update was lost in rounding, from one pass.

    Args:
        applied: From `subtract`.
        requested: What the optimizer asked for.
        infos: What is known of each tensor.
        skip: Whether the update was left out, bool scalar or None: then nothing was lost in rounding.
    """
    rows = {key: summarize_layers(summarize_update, info, applied[key], requested[key]) for key, info in infos.items()}
    if skip is not None:
        for of_tensor in rows.values():
            of_tensor["noop"] = _unless(skip, of_tensor["noop"])
    norms, noops = ({key: of_tensor[what] for key, of_tensor in rows.items()} for what in ("norm", "noop"))
    out = [measured("update/{stat}", *map(of_all_layers, norms.values()))]
    out += [measured(tuple(f"update/{name}/{{stat}}" for name in infos[key].names), norms[key]) for key in infos]
    out.append(measured("update/noop_fraction", *map(of_all_layers, noops.values())))
    for key, info in infos.items():
        out.append(measured(tuple(f"update/{name}/noop_fraction" for name in info.names), noops[key]))
    return out


def _unless(skip: jax.Array, rows: Summary) -> Summary:
    """The summary of nothing where `skip` is true."""
    return jax.tree.map(lambda nothing, found: jnp.where(skip, nothing, found), rows.identity(), rows)


def subtract(new: Tensors, old: Tensors) -> dict[Any, jax.Array]:
    """The update really applied, `w_new - w_old` in the parameter's dtype, taken to float32."""
    return {key: jnp.subtract(new[key], old[key]).astype(jnp.float32) for key in new}
