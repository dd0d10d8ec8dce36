"""Are the copies of a tensor on several devices the same, bit for bit? One more row among the sums of a report.

Every device takes the checksum of its own copy, times a weight. The weights of the copies of one shard of a tensor add
up to zero, mod 2^32, and so do the products where all checksums are the same. Where they are not, the sum is not zero:
surely if one copy differs from the others (of an odd number of copies one has an even weight, and misses a difference
of 2^31), and but for one chance in about 2^32 if several do. So what would take the largest and the smallest checksum
over the axes of each tensor travels in the report's one psum, as a count does, in limbs of eight bits.

An array's sharding says that its copies are the same. Outside of a `shard_map` the compiler believes that, and may
reduce the copy of one device for all; inside of it each device sees what it holds. Under a `shard_map` or `pmap` of the
user's, gradients are compared, too: where nobody checks types, each device may have been given another one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from probes_jax.signals.measured import Measured, measured
from probes_jax.signals.parameters import ParameterInfo
from probes_jax.spec.coverage import ONE_DEVICE
from probes_jax.stats.checksum import checksum
from probes_jax.stats.exact import encode_count
from probes_jax.stats.manual import differing, manual_axes, types_tell
from probes_jax.stats.summary import Summary
from probes_jax.stats.types import spec_dims
from probes_jax.step.select import Path
from probes_jax.step.update import Core

UNDER_SHARD_MAP = (
    "how the optimizer state lies under your own shard_map or pmap is not known; compare its copies between steps: "
    "pj.find_divergence(state)"
)
NO_COPIES = "no parameter and no optimizer state is replicated over a mesh axis: there are no copies to differ"
NO_OPTIMIZER = (
    "Monitor.create is not given the optimizer state, so how it lies is not known; pj.find_divergence sees it"
)


class Copies(NamedTuple):
    """A tensor that several devices hold the same shard of."""

    name: str  # `param/block_0/up/kernel`, `opt/0/mu/...`
    array: Any
    spec: PartitionSpec
    over: tuple[str, ...]  # mesh axes along which the copies lie


def named_tensors(core: Core) -> Iterator[tuple[str, Any]]:
    """Parameters and optimizer state, or what stands in their places, by name."""
    for prefix, tree in (("param", core.params), ("param", core.frozen), ("opt", core.opt_state)):
        for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            path = jax.tree_util.keystr(keys, simple=True, separator="/")
            yield f"{prefix}/{path}" if path else prefix, leaf


def find_copies(core: Core, shardings: dict[str, Any], mesh: Mesh) -> list[Copies]:
    """The tensors of a state that are replicated over an axis of a mesh.

    Args:
        core: The state.
        shardings: How each of its tensors lies, by name; None where that is not known.
        mesh: The mesh of the step.
    """
    found = []
    for name, array in named_tensors(core):
        sharding = shardings.get(name)
        if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh or not array.size:
            continue
        used = {axis for group in spec_dims(sharding.spec) for axis in group}
        over = tuple(axis for axis, size in mesh.shape.items() if size > 1 and axis not in used)
        if over:
            found.append(Copies(name, array, sharding.spec, over))
    return found


def shardings_of(core: Core) -> dict[str, Any]:
    """How each tensor of a state lies, by name."""
    return {name: getattr(leaf, "sharding", None) for name, leaf in named_tensors(core)}


def why_not(core: Core, mesh: Mesh | None, manual: tuple[str, ...]) -> dict[str, str]:
    """Why copies are not compared, by metric; nothing where all are."""
    if manual:
        return {"replica/opt": UNDER_SHARD_MAP}
    if mesh is None:
        return {"replica": ONE_DEVICE}
    shardings = shardings_of(core)
    if not find_copies(core, shardings, mesh):
        return {"replica": NO_COPIES}
    unknown = any(name.startswith("opt") and found is None for name, found in shardings.items())
    return {"replica/opt": NO_OPTIMIZER} if unknown else {}


def weights(copies: int) -> np.ndarray:
    """A weight for each of two or more copies, uint32, different and odd, that add up to 0 mod 2^32.

    Of an odd number one weight has to be even; it is twice an odd one.

    >>> int(weights(4).sum(dtype=np.uint32)), (weights(4) % 2).tolist(), int(weights(3)[-1] % 4)
    (0, [1, 1, 1, 1], 2)
    """
    word = (np.arange(copies, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)  # wraps
    word = (word ^ (word >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    found = (word >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
    found[-1] = 0
    found[-1] = -int(found.sum(dtype=np.uint64)) % 2**32
    if found[-1] % 4 == 0:
        found[0] += np.uint32(2)
        found[-1] -= np.uint32(2)
    return found


def measure_copies(core: Core, shardings: dict[str, Any], mesh: Mesh) -> list[Measured]:
    """One entry with a row for each tensor that has copies; nothing where none has.

    Args:
        core: The state before the step, as it lies in memory.
        shardings: From `shardings_of`.
        mesh: The mesh of the step.
    """
    found = find_copies(core, shardings, mesh)
    if not found:
        return []
    names = tuple(mesh.shape)

    def local(arrays: list[jax.Array]) -> jax.Array:
        rows = [_row(array, {axis: mesh.shape[axis] for axis in copies.over}) for copies, array in zip(found, arrays)]
        return jnp.stack(rows).reshape(len(found), *(1 for _ in names), -1)

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=([copies.spec for copies in found],),
        out_specs=PartitionSpec(None, *names),
        check_vma=False,
    )
    rows = Summary(run([copies.array for copies in found]), None, "copies", names)
    return [measured(tuple(f"replica/{copies.name}/{{stat}}" for copies in found), rows)]


def measure_own(prefix: str, arrays: Mapping[Path, jax.Array], infos: Mapping[Path, ParameterInfo]) -> list[Measured]:
    """As `measure_copies`, of what this device holds under a `shard_map` or `pmap` of the user's.

    Args:
        prefix: `param` or `grad`.
        arrays: What is compared, by path.
        infos: What is known of each parameter: where types do not tell, it is cut as it lay when the monitor was made.
    """
    sizes, typed, rows = manual_axes(), types_tell(), {}
    for path, array in arrays.items():
        cut = differing(array) if typed else infos[path].split.axes
        over = {axis: size for axis, size in sizes.items() if axis not in cut and size > 1}
        if over and array.size:
            rows["/".join(map(str, (prefix, *path)))] = _row(array, over)
    if not rows:
        return []
    own = Summary(jnp.stack(list(rows.values())), None, "copies", ()).over(tuple(sizes))
    return [measured(tuple(f"replica/{name}/{{stat}}" for name in rows), own)]


def _row(array: jax.Array, over: Mapping[str, int]) -> jax.Array:
    """The weighted checksum of this device's copy, as a count, and a 1; copies lie over these mesh axes."""
    index = jnp.int32(0)
    for axis, size in over.items():
        index = index * size + jax.lax.axis_index(axis)
    weight = jnp.asarray(weights(math.prod(over.values())))[index]
    return jnp.append(encode_count(checksum(array) * weight), jnp.float32(1.0))
