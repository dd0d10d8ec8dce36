"""Which tensors are not the same on all devices that hold a copy, and which devices are the odd ones."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from probes_jax.step.alike import gather_rows, spans_processes
from probes_jax.step.partition import find_mesh
from probes_jax.step.replica import named_tensors
from probes_jax.step.state import TrainState

_WORDS = 4  # of a digest of a copy's bytes
Digests = dict[Any, bytes]  # by device


@dataclasses.dataclass(frozen=True)
class Divergence:
    """A shard of a tensor, the copies of which differ.

    Attributes:
        name: The tensor, as `replica/...` names it.
        shard: Where it lies in the tensor, `[0:4, :]`; empty for the whole.
        devices: The devices whose copy is not the one that most have. Where none has a majority, that of the first
            device is taken to be right.
        copies: How many copies there are.
        elements: How many elements differ, at most, in these; None where this process does not see both kinds of copy.
        largest: The largest difference, NaN where it is not a number; None as before, and for what is no number.
    """

    name: str
    shard: str
    devices: tuple[str, ...]
    copies: int
    elements: int | None
    largest: float | None

    def __str__(self) -> str:
        by = "" if self.largest is None else f", by up to {self.largest:g}"
        what = "" if self.elements is None else f" (elements that differ: {self.elements:,}{by})"
        return f"{self.name}{self.shard}, of {self.copies} copies those on {', '.join(self.devices)}{what}"


def find_divergence(state: Any) -> tuple[Divergence, ...]:
    """Compares all copies of every array of a state, byte for byte (by a digest of 128 bits).

    It reads the whole state to the host, shard by shard: a thing to do after `replica/divergent_tensors` has said that
    there is one, not in every step. In a job of several processes all of them call it, and find the same.

    Args:
        state: A `TrainState`, or any pytree of arrays.

    Returns:
        One entry for each shard whose copies differ; empty where all are the same.

    Example:
        >>> import jax.numpy as jnp
        >>> find_divergence({"w": jnp.ones(3)})
        ()
    """
    tensors = [(name, x) for name, x in _named(state) if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1]
    own = [{shard.device: _digest(shard.data) for shard in x.addressable_shards} for _, x in tensors]
    digests = _of_all_processes(tensors, own)
    return tuple(found for (name, x), known in zip(tensors, digests, strict=True) for found in _compare(name, x, known))


def _named(state: Any) -> Iterator[tuple[str, Any]]:
    trees = {"": state}
    if isinstance(state, TrainState):
        yield from named_tensors(state.core)
        trees = {"model_state/": state.model_state, "key": state.key, "monitor/": state.monitor}
    for prefix, tree in trees.items():
        for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            yield prefix + jax.tree_util.keystr(keys, simple=True, separator="/"), leaf


def _bytes(x: jax.Array) -> np.ndarray:
    """The bytes of the elements, uint8 `[elements, bytes of one]`."""
    x = jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    array = np.ascontiguousarray(np.asarray(x)).reshape(-1, 1)
    return array.view(np.uint8)


def _digest(x: jax.Array) -> bytes:
    return hashlib.blake2b(_bytes(x).tobytes(), digest_size=4 * _WORDS).digest()


def _of_all_processes(tensors: list[tuple[str, jax.Array]], own: list[Digests]) -> list[Digests]:
    """The digests of all devices, by one all-gather where they are those of several processes."""
    mesh = find_mesh([x for _, x in tensors])
    if not tensors or not spans_processes(mesh):
        return own
    assert mesh is not None
    here = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    nothing = bytes(4 * _WORDS)
    rows = {d: np.frombuffer(b"".join(known.get(d, nothing) for known in own), np.uint32) for d in here}
    found = {device: row.reshape(len(tensors), _WORDS) for device, row in gather_rows(mesh, rows).items()}
    return [
        {device: found[device][index].tobytes() for device in x.sharding.device_set}
        for index, (_, x) in enumerate(tensors)
    ]


def _compare(name: str, x: jax.Array, digests: Digests) -> Iterator[Divergence]:
    groups: dict[str, list[Any]] = {}
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        groups.setdefault(_shard_text(index), []).append(device)
    data = {shard.device: shard.data for shard in x.addressable_shards}
    for shard, devices in groups.items():
        devices = sorted((device for device in devices if device in digests), key=lambda device: device.id)
        counts = collections.Counter(digests[device] for device in devices)
        if len(counts) < 2:
            continue
        usual = max(counts, key=lambda digest: counts[digest])  # the first of those that are as many
        odd = [device for device in devices if digests[device] != usual]
        right = next((data[device] for device in devices if device in data and digests[device] == usual), None)
        wrong = [data[device] for device in odd if device in data]
        seen = right is not None and wrong
        yield Divergence(
            name=name,
            shard=shard,
            devices=tuple(map(str, odd)),
            copies=len(devices),
            elements=max(_differing(right, copy) for copy in wrong) if seen else None,
            largest=_largest(right, wrong) if seen else None,
        )


def _differing(right: Any, copy: Any) -> int:
    return int((_bytes(right) != _bytes(copy)).any(axis=1).sum())


def _largest(right: Any, wrong: list[Any]) -> float | None:
    if not jax.numpy.issubdtype(right.dtype, np.number):
        return None
    with np.errstate(all="ignore"):
        base = np.asarray(right).astype(np.float64)
        return float(max(np.max(np.abs(np.asarray(copy).astype(np.float64) - base)) for copy in wrong))


def _shard_text(index: tuple[slice, ...]) -> str:
    parts = [":" if s == slice(None) else f"{s.start or 0}:{'' if s.stop is None else s.stop}" for s in index]
    return "" if all(part == ":" for part in parts) else f"[{', '.join(parts)}]"
