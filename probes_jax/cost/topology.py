"""Devices that are not here, to compile for: TPU slices and GPU hosts by name."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Iterator
from typing import Any

from jax.experimental import topologies

# What XLA has to know of a GPU to compile for it (its own description of an H100 SXM).
_H100 = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 1 patch: 1 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
_NEEDS = {
    "tpu": ("libtpu", "pip install libtpu, of the version that jax[tpu] asks for"),
    "cuda": (
        "jax_plugins.xla_cuda12",
        "pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt, of jax's own version (no GPU is needed)",
    ),
}


def topology(name: str) -> list[Any]:
    """Devices to compile for, not to run on: build a mesh of them and hand it to `pj.inspect`.

    One process may compile for TPUs and for GPUs. Neither the devices nor a driver have to be there, only the compiler:
    `libtpu`, or `jax-cuda12-plugin` with `jax-cuda12-pjrt`.

    Args:
        name: A TPU slice as XLA names it, `"v5e:16x16"`, `"v5p:8x8x8"`; or one host of H100s, `"h100:8"`.

    Returns:
        The devices, in the order of the topology.

    Raises:
        ValueError: There is no such topology.
        RuntimeError: Another process is using libtpu.
        ModuleNotFoundError: The compiler for it is not installed; the message says which packages to install.
    """
    if not isinstance(name, str) or not re.fullmatch(r"h100:\d+|v\d+\w*:\d+(x\d+)+", name):
        raise ValueError(f'topology names a TPU slice such as "v5e:16x16" or a host "h100:8", got {name!r}')
    kind, _, size = name.partition(":")
    platform = "cuda" if kind == "h100" else "tpu"
    module, advice = _NEEDS[platform]
    if not _has(module):
        raise ModuleNotFoundError(f"compiling for {name!r} needs {module}: {advice}", name=module)
    try:
        if platform == "tpu":
            with _without_metadata_server():
                return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
        described = topologies.get_topology_desc("h100", "cuda", topology=f"1x1x{int(size)}", target_config=_H100)
        return list(described.devices)
    except (ValueError, RuntimeError) as error:  # XLA's own, with its own words
        if "lockfile" in str(error):
            raise RuntimeError(
                "another process on this machine is using libtpu: wait for it to end, or set "
                "ALLOW_MULTIPLE_LIBTPU_LOAD=1 in both, which does no harm where they only compile"
            ) from error
        raise ValueError(f"XLA knows no topology {name!r}: {error}") from error


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent
        return False


@contextlib.contextmanager
def _without_metadata_server() -> Iterator[None]:
    """Keeps libtpu from asking the cloud's metadata server what machine this is, for minutes where there is none."""
    before = os.environ.get("TPU_SKIP_MDS_QUERY")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("TPU_SKIP_MDS_QUERY", None)
