"""What runs while a linen model is observed: calls of methods, and lifted transforms."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import flax.linen as nn
from flax.core import tracers

from probes_jax.observe import linen_lift
from probes_jax.observe.hiding import hiding
from probes_jax.observe.names import Path


@dataclasses.dataclass
class Call:
    """One intercepted method call that has not returned yet."""

    module: nn.Module
    scope: Any
    method: str
    function: Any
    own: bool
    observed: bool

    @property
    def path(self) -> Path:
        return tuple(self.scope.path)


@dataclasses.dataclass
class Lift:
    """One application of a lifted transform that has not returned yet."""

    name: str
    paths: tuple[Path, ...]
    myself: Path | None  # path of the module that lifts a function of itself
    axis: int | None
    mark: int  # number of visits when it was entered
    variable: str  # what records made inside are kept in
    hidden: str | None  # the JAX transform that its own records would have to leave
    inner: int = 0  # transforms entered in the present trace of its body

    @property
    def stacked(self) -> list[tuple[str | None, ...]]:
        """Where it gives each iteration parameters of its own; a last `None` stands for every child of the module."""
        own = self.name in linen_lift.PER_LAYER and self.axis is not None
        return [(*path, None) if path == self.myself else path for path in self.paths] if own else []


def hidden_by(scope: Any) -> str | None:
    """The JAX transform that runs between the scope's variables, which its root holds, and now; None without one."""
    return None if scope.root.trace_level == tracers.current_trace() else hiding(scope.root.trace_level)


def is_method(cls: type, name: str, function: Any) -> bool:
    """Whether `function` is a method of `cls`, and not a function that a transform runs in its place."""
    found = [base.__dict__[name] for base in cls.__mro__ if name in base.__dict__]
    target = inspect.unwrap(function)
    return any(inspect.unwrap(method) is target for method in found if not isinstance(method, staticmethod))
