"""Submodules of a bound linen model: `bound.decoder(x)`, `bound.layers[0].norm(x)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax


def holds_module(value: Any) -> bool:
    """Whether a value is a module, or a container of modules."""
    leaves = jax.tree.leaves(value, is_leaf=lambda node: isinstance(node, nn.Module))
    return any(isinstance(leaf, nn.Module) for leaf in leaves)


class LinenAttribute:
    """A submodule by the way to it, found anew in each call: a linen submodule only lives while its root runs.

    Args:
        call: Runs a function of the bound root module and records it.
        read: Runs a function of the bound root module without recording.
        way: From the root: attribute names, and items as one-tuples of their key.
    """

    def __init__(
        self,
        call: Callable[[Callable[..., Any], Any, Any], Any],
        read: Callable[[Callable[..., Any]], Any],
        way: tuple[Any, ...],
    ) -> None:
        self._call = call
        self._read = read
        self._way = way

    def _find(self, root: Any) -> Any:
        for step in self._way:
            root = root[step[0]] if isinstance(step, tuple) else getattr(root, step)
        return root

    def read(self) -> Any:
        """The attribute's value. A module in it is not usable any more."""
        return self._read(self._find)

    def _further(self, step: Any) -> Any:
        further = LinenAttribute(self._call, self._read, (*self._way, step))
        value = further.read()
        return further if holds_module(value) or _is_method(value) else value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(lambda root, *a, **k: self._find(root)(*a, **k), args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._further(name)

    def __getitem__(self, key: Any) -> Any:
        return self._further((key,))

    def __len__(self) -> int:
        return len(self.read())

    def __iter__(self) -> Iterator[Any]:
        value = self.read()
        return iter(value) if hasattr(value, "keys") else (self[index] for index in range(len(value)))


def _is_method(value: Any) -> bool:
    return isinstance(getattr(value, "__self__", None), nn.Module)
