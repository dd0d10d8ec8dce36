"""The optimizer's second moments, found in its state by what they look like, and how widely each one is spread."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey

from probes_jax.signals.measured import Measured, measured
from probes_jax.signals.parameters import ParameterInfo, summarize_layers
from probes_jax.stats.orders import read_orders, summarize_orders
from probes_jax.stats.partial import WHOLE
from probes_jax.step.pack import Scalars
from probes_jax.step.reduce import Reduced
from probes_jax.step.select import Path, path_of

FACTORS = ("v_row", "v_col")  # adafactor's: a mean over one axis of the parameter
FIELDS = ("nu", "v", "sum_of_squares", *FACTORS)
NONE = f"the optimizer keeps no second moment: no field of its state is called {', '.join(FIELDS[:-1])} or {FIELDS[-1]}"
_HISTOGRAM = "/histogram"


def find_second_moments(
    state: Any, params: Mapping[Path, Any], infos: Mapping[Path, ParameterInfo]
) -> Iterator[tuple[jax.Array, ParameterInfo]]:
    """Every second moment of a parameter that moves, with what is known of it.

    A second moment is a leaf below a field of one of the names of `FIELDS`, at the path of a parameter from there on,
    whatever is around it: `chain`, `masked`, `partition`, `inject_hyperparams`, `MultiSteps`.

    Args:
        state: Optimizer state.
        params: Parameters by path.
        infos: What is known of each.
    """
    times: dict[tuple[str, Path], int] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        field, path = _below(keys, infos)
        if not field or infos[path].frozen:
            continue
        lies = _lies(infos[path], field, params[path].shape, leaf.shape)
        if lies is None:
            continue
        times[field, path] = times.get((field, path), 0) + 1
        suffix = (f"/{field}" if field in FACTORS else "") + (f"~{n}" if (n := times[field, path]) > 1 else "")
        yield leaf, dataclasses.replace(lies, names=tuple(name + suffix for name in lies.names))


def _below(keys: tuple[Any, ...], infos: Mapping[Path, ParameterInfo]) -> tuple[str, Path]:
    """The field that a leaf is in, and its path from there on; `""` where that is no parameter's."""
    for at, key in enumerate(keys):
        if isinstance(key, GetAttrKey) and key.name in FIELDS and path_of(keys[at + 1 :]) in infos:
            return key.name, path_of(keys[at + 1 :])
    return "", ()


def _lies(info: ParameterInfo, field: str, param: tuple[int, ...], shape: tuple[int, ...]) -> ParameterInfo | None:
    """What is known of a moment of this shape; None for a placeholder, and for a mean over layers."""
    if field not in FACTORS:
        return info if shape == param else None
    axis = info.stack_axis
    stack = () if axis is None else (axis,) if isinstance(axis, int) else axis
    gone = [d for d in range(len(param)) if d not in stack and param[:d] + param[d + 1 :] == shape]
    if not gone or len(param) < 2:
        return None
    left = tuple(axis - (axis > gone[-1]) for axis in stack)
    return dataclasses.replace(info, stack_axis=left[0] if len(left) == 1 else left or None, split=WHOLE)


def measure_second_moments(moments: list[tuple[jax.Array, ParameterInfo]]) -> list[Measured]:
    """Report entries of what `find_second_moments` found; the histograms are read in the graph."""
    items = []
    for leaf, info in moments:
        rows = summarize_layers(summarize_orders, info, leaf)
        labels = tuple(f"opt/second_moment/{name}/{{stat}}" for name in info.names)
        items.append(measured(labels, rows["orders"]))
        hidden = tuple(label.replace("/{stat}", _HISTOGRAM) for label in labels)
        items.append(measured(hidden, rows["histogram"], hidden=True))
    return items


def name_orders(reduced: Reduced) -> Scalars:
    """Quantiles and spread of all second moments, read together from the merged histograms."""
    entries = [e for e in reduced.layout.entries[reduced.visible :] if e.kind == "histogram"]
    if not entries:
        return {}
    stems = [label.removesuffix(_HISTOGRAM) for entry in entries for label in entry.labels]
    visible = [entry.key.removesuffix(_HISTOGRAM) + "/{stat}" for entry in entries]

    def of_all(name: str) -> jax.Array:
        return jnp.concatenate([reduced.leaf(key, name) for key in visible])

    buckets = jnp.concatenate([reduced.leaf(entry.key, "buckets") for entry in entries])
    bad = of_all("nan").sum(axis=-1) + of_all("inf").sum(axis=-1) > 0
    some = buckets.sum(axis=-1) > 0
    found = read_orders(buckets, of_all("abs_max"))
    found["spread"] = jnp.where(bad, jnp.nan, found["spread"])
    return {tuple(f"{stem}/{stat}" for stem in stems): (value, some) for stat, value in found.items()}
