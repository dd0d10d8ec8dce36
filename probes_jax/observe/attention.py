"""Attention of models that nobody edited, seen where JAX's or Flax's own function computes it."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from probes_jax.observe.patch import patched

Take = Callable[..., None]  # (query, key, bias, mask, scale=, is_causal=)


class _Active(threading.local):
    take: Take | None = None


_active = _Active()


@contextlib.contextmanager
def watching(take: Take | None, flax: Any) -> Iterator[None]:
    """Calls `take` with what attention is computed of in the block, in this thread only; None: leaves it alone.

    Args:
        take: Who measures.
        flax: Flax's module of attention layers; their own function computes the weights of those.
    """
    previous, _active.take = _active.take, take
    try:
        places = ((jax.nn, "dot_product_attention", _of_jax), (flax, "dot_product_attention_weights", _of_flax))
        with patched(places if take is not None else ()):
            yield
    finally:
        _active.take = previous


def _of_jax(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def attend(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, **options: Any) -> Any:
        output = original(query, key, value, bias, mask, **options)
        known = {name: options.pop(name) for name in ("scale", "is_causal") if name in options}
        options.pop("implementation", None)
        if _active.take is not None and not any(
            option is not None and option is not False for option in options.values()
        ):
            _active.take(query, key, bias, mask, **known)
        return output

    return attend


def _of_flax(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def weights(query: Any, key: Any, bias: Any = None, mask: Any = None, *args: Any, **options: Any) -> Any:
        if _active.take is not None:
            _active.take(query, key, bias, mask, is_causal=bool(options.get("is_causal", False)))
        return original(query, key, bias, mask, *args, **options)

    return weights
