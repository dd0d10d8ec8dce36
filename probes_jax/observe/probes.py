"""What is measured of a model while it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from probes_jax.observe.lift import not_carried
from probes_jax.observe.tap import Measure
from probes_jax.stats.per_token import RESIDUAL, ROUTER, PerToken


@dataclasses.dataclass(frozen=True)
class Probes:
    """The functions that measure, each called where a value is made; None leaves it alone.

    Attributes:
        activation: Summarizes a float array that a method returned, and its gradient.
        branch: (stream, branch) of a residual sum to a few numbers for each token.
        routing: A router's output to the experts of each token; or why it does not tell.
        attention: (query, key, bias, mask, scale=, is_causal=) to a few numbers for each token.
        entry: What a block of the backbone is given to a few numbers for each token.
        roles: See `roles.role_of`.
    """

    activation: Measure | None = None
    branch: Callable[[jax.Array, jax.Array], PerToken] | None = None
    routing: Callable[[Any], PerToken | str] | None = None
    attention: Callable[..., PerToken] | None = None
    entry: Callable[[jax.Array], PerToken] | None = None
    roles: tuple[tuple[str, str], ...] = ()

    def wants(self, family: str) -> bool:
        """Whether what a model names itself is measured: its routing, or the gate of a residual branch."""
        return {ROUTER: self.routing, RESIDUAL: self.branch}[family] is not None

    @classmethod
    def of(cls, measure: Measure | Probes) -> Probes:
        """As they are used inside of a model: transforms in them are ours, and nobody observes there."""
        probes = measure if isinstance(measure, Probes) else cls(activation=measure)
        own = {name: getattr(probes, name) for name in ("activation", "branch", "routing", "attention", "entry")}
        return cls(**{name: function and not_carried(function) for name, function in own.items()}, roles=probes.roles)
