"""Which of JAX's transforms a value is inside of, for messages about what does not come out of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import get_opaque_trace_state

UNKNOWN = "a JAX transform"
RULE = "jax.custom_vjp or jax.custom_jvp"
RULES = (RULE, "jax.custom_vjp", "jax.custom_jvp", "jax.jvp")  # given tangents or gradients of a known structure
_OF_TRACE = {"BatchTrace": "jax.vmap", "LinearizeTrace": "jax.grad", "JVPTrace": "jax.jvp"}
_OF_BODY = {
    "jit": "jax.jit",
    "checkpoint / remat": "jax.checkpoint",
    "shard_map": "jax.shard_map",
    "scan": "jax.lax.scan",
    "fori_loop": "jax.lax.fori_loop",
    "while_body": "jax.lax.while_loop",
    "while_cond": "jax.lax.while_loop",
    "cond": "jax.lax.cond",
    "switch": "jax.lax.switch",
    "custom_vjp fun": "jax.custom_vjp",
    "custom_jvp fun": "jax.custom_jvp",
}


def hiding(outer: Any) -> str:
    """The transform that stands between a trace and the one that is running, the outermost of several.

    JAX has no public way to ask: where it says nothing, or something new, the answer is `UNKNOWN`.

    Args:
        outer: The trace outside of it, from `jax.extend.core.get_opaque_trace_state`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> here = get_opaque_trace_state(convention="flax")
        >>> jax.vmap(lambda x: [print(hiding(here)), x][1])(jnp.ones(2)).shape
        jax.vmap
        (2,)
    """
    end, trace = _trace(outer), _trace(get_opaque_trace_state(convention="flax"))
    around = [t for t in _outwards(end) if getattr(t, "parent_trace", None)]
    found = UNKNOWN
    for inner in _outwards(trace):
        if inner is end:
            break
        if inner in around:  # a rule of derivation runs beside the derivative that asks for it, not in it
            return RULE
        found = _name(inner) or found  # a shard_map or custom_vjp does not say what it is inside of
    return found


def _outwards(trace: Any) -> Iterator[Any]:
    while trace is not None:
        yield trace
        trace = getattr(trace, "parent_trace", None)


def _trace(state: Any) -> Any:
    return getattr(state, "_trace_ref", lambda: None)()


def _name(trace: Any) -> str | None:
    body = getattr(getattr(getattr(trace, "frame", None), "debug_info", None), "traced_for", "")
    return _OF_TRACE.get(type(trace).__name__) or _OF_BODY.get(body)
