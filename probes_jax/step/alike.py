"""Whether all processes of a mesh are about to run the same program: asked before they would wait for each other."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from probes_jax.spec.plan import Plan
from probes_jax.spec.switch import enabled

Facts = Mapping[str, str]  # what must be the same, by name
_WORDS = 4  # of a fingerprint, the last one the length of the text behind it
_MOST = 3  # differences that an error names, for each process


def check_alike(mesh: Mesh | None, facts: Facts) -> None:
    """Compares facts over the processes of a mesh: one small all-gather, and a second one where they differ.

    Every process of the mesh has to call this; all of them raise, or none does. Nothing is done where the mesh lies in
    one process, or its devices are not here (`pj.topology`).

    Args:
        mesh: The mesh that the step runs on.
        facts: What decides the program, by name.

    Raises:
        ValueError: A fact differs; the message says on which process, and what it is there.
    """
    if not spans_processes(mesh):
        return
    assert mesh is not None
    text = json.dumps(dict(facts), sort_keys=True).encode()
    words = np.frombuffer(hashlib.sha256(text).digest()[: 4 * (_WORDS - 1)], np.uint32)
    fingerprints = _gather(mesh, np.append(words, np.uint32(len(text))))
    if len({tuple(words) for words in fingerprints.values()}) == 1:
        return
    lengths = {process: int(words[-1]) for process, words in fingerprints.items()}
    own = np.zeros(max(lengths.values()), np.uint32)
    own[: len(text)] = np.frombuffer(text, np.uint8)
    texts = _gather(mesh, own)
    lines = differences({p: json.loads(bytes(texts[p][:n].astype(np.uint8))) for p, n in lengths.items()})
    raise ValueError(
        f"the processes of this job do not run the same program: {'; '.join(lines)}. They would wait for each other "
        "for ever, or mix their reports: start all of them with the same code, settings and checkpoint"
    )


def differences(facts: Mapping[int, Facts]) -> list[str]:
    """What each process has that most processes do not; where there is no majority, process 0 is right.

    >>> differences({0: {"step": "7"}, 1: {"step": "0"}})
    ['process 1 has step: 0 (process 0: 7)']
    """
    counts = collections.Counter(json.dumps(dict(own), sort_keys=True) for own in facts.values())
    usual = max(sorted(facts), key=lambda process: counts[json.dumps(dict(facts[process]), sort_keys=True)])
    lines = []
    for process, own in sorted(facts.items()):
        names = [name for name in dict.fromkeys([*facts[usual], *own]) if own.get(name) != facts[usual].get(name)]
        told = [
            f"{name}: {own.get(name, 'none')} (process {usual}: {facts[usual].get(name, 'none')})" for name in names
        ]
        more = f", and {len(told) - _MOST} more differences" if len(told) > _MOST else ""
        if told:
            lines.append(f"process {process} has {', '.join(told[:_MOST])}{more}")
    return lines


def setting_facts(plan: Plan, **more: Any) -> dict[str, str]:
    """PROBES_JAX, every setting of a plan, and more settings by name."""
    told = {f"Plan {field.name}": getattr(plan, field.name) for field in dataclasses.fields(plan)}
    return {name: repr(value) for name, value in ({"PROBES_JAX": switch()} | told | more).items()}


def switch() -> str:
    """What the environment says: on or off."""
    return "on" if enabled() else "off"


def shape_facts(what: str, tree: Any) -> dict[str, str]:
    """Shape and dtype of every array of a tree.

    >>> shape_facts("batch", {"mask": np.ones((8, 2), bool)})
    {"batch['mask']": 'bool[8, 2]'}
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        what + jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in leaves
        if hasattr(leaf, "dtype")
    }


def spans_processes(mesh: Mesh | None) -> bool:
    """Whether the devices of a mesh are here, and are those of several processes."""
    if mesh is None or jax.process_count() == 1:
        return False
    devices = mesh.devices.flat
    return len({device.process_index for device in devices}) > 1 and set(devices) <= set(jax.devices())


@functools.lru_cache(maxsize=8)
def _spread(line: Mesh) -> Any:
    """Compiled once for each mesh: the all-gather."""
    return jax.jit(lambda x: x, out_shardings=NamedSharding(line, PartitionSpec()))


def _gather(mesh: Mesh, row: np.ndarray) -> dict[int, np.ndarray]:
    """The row `[n]` of every process of a mesh, by its index."""
    mine = {device: row for device in mesh.devices.flat if device.process_index == jax.process_index()}
    return {device.process_index: row for device, row in gather_rows(mesh, mine).items()}


def gather_rows(mesh: Mesh, mine: Mapping[Any, np.ndarray]) -> dict[Any, np.ndarray]:
    """The row uint32 `[n]` of every device of a mesh; every process gives those of its own devices."""
    devices = mesh.devices.reshape(-1)
    line = Mesh(devices, ("device",))
    here = [jax.device_put(mine[device][None], device) for device in devices if device in mine]
    rows = NamedSharding(line, PartitionSpec("device"))
    stacked = jax.make_array_from_single_device_arrays((devices.size, here[0].shape[1]), rows, here)
    found = np.asarray(_spread(line)(stacked).addressable_data(0))
    return dict(zip(devices, found, strict=True))
