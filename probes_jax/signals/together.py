"""Small tensors of one shape are measured as one: a model has hundreds, and each takes its time to compile."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from probes_jax.signals.parameters import Infos, Tensors
from probes_jax.stats.manual import differing
from probes_jax.stats.partial import WHOLE
from probes_jax.stats.types import stated

_SMALL = 2**13  # elements; to copy larger ones costs more than it saves
Groups = tuple[tuple[Any, ...], ...]  # keys of tensors that are measured as one


def find_groups(tensors: Tensors, infos: Infos) -> Groups:
    """Which tensors are small, whole on every device, and of one shape, kind and role."""
    alike: dict[Any, list[Any]] = {}
    for key, info in infos.items():
        x = tensors[key]
        small = 0 < x.size <= _SMALL and info.split == WHOLE and not differing(x) and stated(x) is None
        same = (
            (x.shape, x.dtype, info.stack_axis, info.embedding, info.frozen, info.encoder) if small else ("alone", key)
        )
        alike.setdefault(same, []).append(key)
    return tuple(map(tuple, alike.values()))


def join_infos(infos: Infos, groups: Groups) -> dict[Any, Any]:
    """What is known of each group: a stack of its tensors, by all their keys; one alone keeps its own."""
    found = {}
    for keys in groups:
        first = infos[keys[0]]
        if len(keys) == 1:
            found[keys[0]] = first
            continue
        axis = first.stack_axis
        inner = () if axis is None else (axis,) if isinstance(axis, int) else axis
        names = tuple(name for key in keys for name in infos[key].names)
        found[keys] = dataclasses.replace(first, names=names, stack_axis=(0, *(at + 1 for at in inner)))
    return found


def join_tensors(tensors: Mapping[Any, jax.Array], groups: Groups | None) -> Mapping[Any, jax.Array]:
    """The tensors in the order and by the keys of `join_infos`; as they are without groups."""
    if groups is None:
        return tensors
    return {
        keys[0] if len(keys) == 1 else keys: tensors[keys[0]]
        if len(keys) == 1
        else jnp.stack([tensors[key] for key in keys])
        for keys in groups
    }
