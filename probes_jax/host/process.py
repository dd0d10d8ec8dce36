"""Which process of a multi-process job this is, found without starting a JAX backend."""

from __future__ import annotations

import sys
from typing import Any


def _jax() -> Any:
    """The jax module if somebody else has imported it."""
    jax = sys.modules.get("jax")
    return jax if hasattr(jax, "process_index") and hasattr(jax, "distributed") else None


def _backend_is_up() -> bool:
    # There is no public way to ask. An unknown answer is "not yet": the first report then decides.
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bool(getattr(bridge, "backends_are_initialized", bool)())


def is_distributed() -> bool:
    """Whether this process is one of several. Never starts a backend."""
    jax = _jax()
    if jax is None:
        return False
    return jax.distributed.is_initialized() or (_backend_is_up() and jax.process_count() > 1)


def process_index() -> int | None:
    """Index of this process; None while JAX is imported but has no backend yet. 0 without JAX."""
    jax = _jax()
    if jax is None:
        return 0
    return jax.process_index() if _backend_is_up() else None


def process_count() -> int:
    """How many processes the job has; 1 while JAX has no backend, and without JAX."""
    jax = _jax()
    return jax.process_count() if jax is not None and _backend_is_up() else 1
