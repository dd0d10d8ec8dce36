"""Parts of a bound model: `bound.decoder(x)`, `bound.layers[0].norm(x)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Reach = Callable[[Any], Any]  # from the root module to a part of it


class Attribute:
    """A submodule or a method, by the way to it from the root. It is found anew in each call.

    Args:
        call: Runs a part of the root module with arguments, and records what it does.
        read: The value of a part of the root module, without running anything.
        follows: Whether a value is a module, a container of modules or a method: what can be called in a bound way.
        way: From the root: attribute names, and items as one-tuples of their key.
    """

    def __init__(
        self,
        call: Callable[[Reach, Any, Any], Any],
        read: Callable[[Reach], Any],
        follows: Callable[[Any], bool],
        way: tuple[Any, ...],
    ) -> None:
        self._call = call
        self._read = read
        self._follows = follows
        self._way = way

    def _reach(self, root: Any) -> Any:
        for step in self._way:
            root = root[step[0]] if isinstance(step, tuple) else getattr(root, step)
        return root

    def resolve(self) -> Any:
        """This part where it can be called or has parts of its own, else its value."""
        value = self._read(self._reach)
        return self if self._follows(value) else value

    def _part(self, step: Any) -> Any:
        return Attribute(self._call, self._read, self._follows, (*self._way, step)).resolve()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._reach, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._part(name)

    def __getitem__(self, key: Any) -> Any:
        return self._part((key,))

    def __len__(self) -> int:
        return len(self._read(self._reach))

    def __iter__(self) -> Iterator[Any]:
        value = self._read(self._reach)
        return iter(value) if hasattr(value, "keys") else (self[index] for index in range(len(value)))
