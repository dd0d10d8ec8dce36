"""Eight CPU devices for every test, no accidental use of another backend, and a plain word where TensorFlow lacks."""

import gc
import importlib.metadata
import importlib.util
import os
import pathlib
import sys
from collections.abc import Iterator

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
_FLAG = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()
if (
    os.environ.get("PROBES_TESTS") == "quick"
):  # `make test`: most of its time is XLA's CPU compiler optimizing tiny steps
    _QUICK = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones do not know the flag
        _QUICK += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
    os.environ["XLA_FLAGS"] = " ".join([os.environ["XLA_FLAGS"], *_QUICK])
# Many tests compile the same small step: the first one pays, also for the other worker and the next run.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # XLA carries a traceback along with every operation
gc.set_threshold(50_000, 20, 50)  # tracing allocates millions of containers: fewer collections are 7 % of the time


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("tensorflow") is not None:
        return
    for item in items:
        if item.get_closest_marker("tensorflow"):
            item.add_marker(
                pytest.mark.skip(reason="TensorFlow is not installed: pip install 'probes_jax[tensorflow]'")
            )


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled_programs() -> Iterator[None]:
    """Frees what a file has compiled: thousands of programs in one process take gigabytes and slow every collection."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
