"""A checkpoint of an older version or another plan, read into today's state."""

from __future__ import annotations

import logging
from typing import Any

import jax
import numpy as np

from probes_jax.step.abstract import is_abstract, lying
from probes_jax.step.create import check_here
from probes_jax.step.monitor import init_monitor
from probes_jax.step.state import TrainState

_log = logging.getLogger("probes_jax")
_ABSENT = object()
_WINDOWS = ("monitor/window/", "monitor/clip/")


def restore_state(state: TrainState, tree: Any) -> TrainState:
    """Fills `state` with what a checkpoint holds.

    A checkpoint of the same version and plan needs no help: orbax restores it with `state` as the target. This is for
    the others: pass what orbax returns without a target (nested dicts and lists). Monitoring that the checkpoint does
    not hold, or holds in another shape, starts from its defaults, said once in the log.

    Args:
        state: A fresh state from `TrainState.create`, which says structure, dtypes and shardings; with `abstract=True`
            nothing is initialized that is read anyway.
        tree: Nested dicts, lists and arrays with the same names.

    Returns:
        The state to go on with.

    Raises:
        ValueError: A parameter, the optimizer state or the model state is missing or has another shape; or the state
            lies on devices of a `pj.topology`.
    """
    state = _ready(state)
    leaves, structure = jax.tree_util.tree_flatten_with_path(state)
    values = {}
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found = _find(tree, path)
        values[name] = _ABSENT if found is _ABSENT else _convert(found, leaf)
        if values[name] is _ABSENT and not name.startswith("monitor"):
            came = "nothing" if found is _ABSENT else f"shape {np.shape(found)}"
            raise ValueError(f"checkpoint holds {came} for {name}, the state needs shape {np.shape(leaf)}")
    lacking = [name for name, value in values.items() if value is _ABSENT]
    if lacking:
        _log.warning("checkpoint lacks %d monitoring values, which start anew: %s", len(lacking), ", ".join(lacking))
    # A window and its count begin anew together: half of an old one would count what was never measured.
    windows = {_window(name) for name in lacking} - {None}
    out = [
        leaf if value is _ABSENT or _window(name) in windows else value
        for (name, value), (_, leaf) in zip(values.items(), leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, out)


def _ready(state: TrainState) -> TrainState:
    """An abstract state as one to fill: leaves lie where it was created to lie, monitoring has its defaults."""
    if not any(map(is_abstract, jax.tree.leaves(state))):
        return state
    settings, everywhere = state.settings, state.settings.partition.everywhere()
    check_here(settings.partition, "restore on the devices that are to train")
    where = jax.tree.map(lambda _: everywhere, state.core) if settings.shardings is None else settings.shardings
    core = jax.tree.map(lambda x, place: lying(x, place) if is_abstract(x) else x, state.core, where)
    fresh = init_monitor(settings.plan, settings.loss_scale)
    monitor = jax.tree.map(lambda x, new: jax.device_put(new, x.sharding) if is_abstract(x) else x, core.monitor, fresh)
    step = np.array(0, np.int32) if is_abstract(state.step) else state.step
    return TrainState.from_core(step, core._replace(monitor=monitor), settings)


def _window(name: str) -> str | None:
    """The detector window that a value belongs to."""
    return next((window for window in _WINDOWS if name.startswith(window)), None)


def _find(tree: Any, path: tuple[Any, ...]) -> Any:
    node = tree
    for key in path:
        name = getattr(key, "name", getattr(key, "key", getattr(key, "idx", None)))
        if isinstance(node, dict):
            node = next((node[n] for n in (name, str(name)) if n in node), _ABSENT)
        elif isinstance(node, list | tuple) and isinstance(name, int) and name < len(node):
            node = node[name]
        else:
            node = getattr(node, str(name), _ABSENT)
        if node is _ABSENT or node is None:
            return _ABSENT
    return node


def _convert(found: Any, leaf: Any) -> Any:
    """The found value as an array like `leaf`, or absent when it does not fit."""
    if isinstance(found, dict | list | tuple):
        return _ABSENT
    if np.shape(found) == () and np.shape(leaf) == (2,) and leaf.dtype == np.uint32:
        total = int(found)  # an older 32- or 64-bit counter
        found = np.array([total & 0xFFFFFFFF, total >> 32], np.uint32)
    if np.shape(found) != np.shape(leaf):
        return _ABSENT
    if isinstance(leaf, np.ndarray):
        return np.asarray(found).astype(leaf.dtype)
    # A copy: the first step donates the state, and the caller's tree must outlive it.
    return jax.device_put(jax.numpy.array(found, leaf.dtype, copy=True), leaf.sharding)
