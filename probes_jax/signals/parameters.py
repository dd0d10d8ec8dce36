"""Gradients, parameters and updates: one row per layer in the full program, totals in every program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from probes_jax.signals.measured import Measured, measured
from probes_jax.spec.summary import KINDS
from probes_jax.stats.exact import normalize_count
from probes_jax.stats.moments import summarize_magnitude, summarize_norm
from probes_jax.stats.partial import WHOLE, Split
from probes_jax.stats.summary import Summary

_GLOBAL_GRADIENT = ("norm", "abs_mean", "abs_max", "finite_abs_max", "zero_fraction", "nan_count", "inf_count")


@dataclasses.dataclass(frozen=True)
class ParameterInfo:
    """What is known of one parameter tensor before the step is traced.

    Attributes:
        names: One canonical name per layer; a single one unless the tensor stacks layers.
        stack_axis: Axis that stacks the layers, or None.
        split: How the mesh shards it.
        embedding: Whether its zero fraction is reported apart.
        frozen: Whether the optimizer never moves it.
    """

    names: tuple[str, ...]
    stack_axis: int | None = None
    split: Split = WHOLE
    embedding: bool = False
    frozen: bool = False


Tensors = Mapping[str, jax.Array]  # by the key of the ParameterInfo
Infos = Mapping[str, ParameterInfo]


def _by_layer(summarize: Callable[[jax.Array, Split], Summary], x: jax.Array, info: ParameterInfo) -> Summary:
    """Rows of one tensor, with a leading stack axis where it stacks layers."""
    axis = info.stack_axis
    if axis is None:
        return summarize(x, info.split)
    dims = info.split.dims[:axis] + info.split.dims[axis + 1 :]
    rest = Split(dims, info.split.sizes)
    return jax.vmap(lambda layer: summarize(layer, rest), in_axes=axis)(x)


def _total(summary: Summary) -> Summary:
    """Layers merged, counts carried so that further sums stay exact."""
    while summary.stack_shape():
        summary = summary.collapse(0)
    counts = {leaf.name for leaf in KINDS[summary.kind].leaves if leaf.width}
    leaves = {n: normalize_count(x) if n in counts else x for n, x in summary.leaves.items()}
    return dataclasses.replace(summary, leaves=leaves)


def measure_gradients(gradients: Tensors, infos: Infos, *, layers: bool) -> list[Measured]:
    """Entries of the gradients: totals, zero fractions by role, frozen apart, and with `layers` each layer's own."""
    rows = {key: _by_layer(summarize_magnitude, gradients[key], info) for key, info in infos.items()}
    totals = {key: _total(row) for key, row in rows.items()}
    moved = [key for key, info in infos.items() if not info.frozen]
    frozen = [totals[key] for key, info in infos.items() if info.frozen]
    out = []
    if moved:
        out.append(measured("grad/{stat}", *(totals[key] for key in moved), stats=_GLOBAL_GRADIENT))
        for role, wanted in (("embedding", True), ("other", False)):
            of_role = [totals[key] for key in moved if infos[key].embedding is wanted]
            if of_role:
                out.append(measured(f"grad/{{stat}}/{role}", *of_role, stats=("zero_fraction",)))
    if frozen:
        out.append(measured("grad_frozen/{stat}", *frozen, stats=("norm",)))
    if layers:
        for key in moved:
            labels = tuple(f"grad/{name}/{{stat}}" for name in infos[key].names)
            out.append(measured(labels, rows[key], stats=_GLOBAL_GRADIENT))
    return out


def measure_norms(family: str, tensors: Tensors, infos: Infos, *, layers: bool) -> list[Measured]:
    """Entries of the norms of `param` or `update`: the total, and with `layers` each layer's own."""
    rows = {key: _by_layer(summarize_norm, tensors[key], info) for key, info in infos.items()}
    out = [measured(f"{family}/{{stat}}", *(_total(row) for row in rows.values()))]
    if layers:
        for key, info in infos.items():
            out.append(measured(tuple(f"{family}/{name}/{{stat}}" for name in info.names), rows[key]))
    return out


def subtract(new: Tensors, old: Tensors) -> dict[str, jax.Array]:
    """The update really applied, `w_new - w_old` in the parameter's dtype, taken to float32."""
    return {key: jnp.subtract(new[key], old[key]).astype(jnp.float32) for key in new}
