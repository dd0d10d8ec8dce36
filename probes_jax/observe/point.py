"""One place in a model where a value is taken."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from probes_jax.observe.names import ROOT, Names, escape, expand

INPUT = "input"  # stands for the method of a point that is what a module is given, not what it returns


@dataclasses.dataclass(frozen=True)
class Point:
    """One float output of one call of one method of one module.

    Methods are `__call__` and all whose name does not begin with an underscore, but not `setup`.

    Paths alone are not unique (shared scopes, shared modules, a helper called three times), so class, method, call
    number and leaf belong to the identity.

    Attributes:
        path: Module path inside the root; `()` for the root.
        class_name: Class of the module.
        method: Name of the method.
        call: 0-based number of this call of this method of this module within one step.
        leaf: Path inside the output; empty for its only float array.
        stack: Positions in `path` after which a layer index goes, outermost scan first.
        name: The name, with `[*]` for layer indices. Filled in when empty; not part of the identity.
        shape: Shape of the value, in one iteration where it is inside a scan; not part of the identity.
        through: Transforms the value comes out of, the outermost first; not part of the identity.

    Example:
        >>> Point(("blocks", "mlp"), "MLP", stack=(1,)).labels((2,))
        ('act/blocks[0]/mlp/{stat}', 'act/blocks[1]/mlp/{stat}')
    """

    path: tuple[str, ...]
    class_name: str
    method: str = "__call__"
    call: int = 0
    leaf: str = ""
    stack: tuple[int, ...] = ()
    name: str = dataclasses.field(default="", compare=False)
    shape: tuple[int, ...] = dataclasses.field(default=(), compare=False)
    through: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def __post_init__(self) -> None:
        if any(not isinstance(element, str) for element in self.path):
            raise ValueError(f"Point path must be a tuple of strings, got {self.path!r}")
        if self.call < 0:
            raise ValueError(f"Point call is a 0-based number, got {self.call}")
        if any(not 0 <= position <= len(self.path) for position in self.stack):
            raise ValueError(f"Point stack positions must lie in [0, {len(self.path)}], got {self.stack}")
        if not self.name:
            stacks = [self.path[:position] for position in self.stack]
            object.__setattr__(self, "name", point_name(self, Names((), stacks, also=[self.path])))

    def __str__(self) -> str:
        return self.name

    @property
    def key(self) -> str:
        """A string that is unique in a model, whatever the names of its modules."""
        path = "/".join(escape(element) for element in self.path)
        return f"{path}|{self.class_name}.{escape(self.method)}#{self.call}:{self.leaf}"

    def labels(self, stack_shape: Sequence[int] = (), prefix: str = "act") -> tuple[str, ...]:
        """Metric names, one per layer row, with `{stat}` where the statistic goes.

        Args:
            stack_shape: Leading axes of the summary, as `Summary.stack_shape()` gives them.
            prefix: First segment of the names.
        """
        indices = itertools.product(*(range(length) for length in stack_shape))
        return tuple(f"{prefix}/{expand(self.name, index)}/{{stat}}" for index in indices)


def point_name(point: Point, names: Names) -> str:
    """`<path>.<method>#<call>:<leaf>`, without what is the default."""
    text = names.path(point.path, point.stack) or ROOT + "[*]" * len(point.stack)
    if point.method != "__call__":
        text += f".{escape(point.method)}"
    if point.call:
        text += f"#{point.call}"
    return f"{text}:{point.leaf}" if point.leaf else text
