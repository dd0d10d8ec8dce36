"""What a plan will report, before anything is compiled: series and bytes, by family."""

from __future__ import annotations

import dataclasses
from typing import Any

from probes_jax.cost.inspection import layout_of
from probes_jax.spec.limits import Share, count_stored, exceeded, shares
from probes_jax.spec.plan import Plan
from probes_jax.step.state import TrainState


@dataclasses.dataclass(frozen=True)
class Preview:
    """What each program will report. `print` shows it as a table.

    Attributes:
        plan: The plan.
        families: For `light` and `full`, the share of each family (the first part of a metric's name).
        stored: Series of a full report that the online writers do not get; the store has them.
        warnings: A sentence for each limit of the plan that a full report exceeds.
    """

    plan: Plan
    families: dict[str, dict[str, Share]]
    stored: int = 0
    warnings: tuple[str, ...] = ()

    def total(self, program: str) -> Share:
        """All that a program reports."""
        shares = self.families[program].values()
        return Share(sum(s.series for s in shares), sum(s.payload for s in shares))

    @property
    def bytes_a_step(self) -> float:
        """Bytes to the host, averaged over steps that scan and steps that do not."""
        every = self.plan.scan_every
        return (self.total("light").payload * (every - 1) + self.total("full").payload) / every

    def __str__(self) -> str:
        lines = [f"{'':12}  {'light':>8}  {'full':>8}  {'full payload':>12}"]
        none = Share(0, 0)
        for family in self.families["full"]:
            light, full = (self.families[program].get(family, none) for program in ("light", "full"))
            lines.append(f"{family:12}  {light.series:8,}  {full.series:8,}  {full.payload:10,} B")
        light, full = self.total("light"), self.total("full")
        lines.append(f"{'all series':12}  {light.series:8,}  {full.series:8,}  {full.payload:10,} B")
        lines.append(
            f"A full report every {self.plan.scan_every} steps, a light one of {light.payload:,} B on the others: "
            f"{self.bytes_a_step:,.0f} B a step."
        )
        online = full.series - self.stored
        lines.append(f"Of a full report {online:,} series go online, {self.stored:,} to the store only.")
        return "\n".join([*lines, *self.warnings])


def preview(state: TrainState, batch: Any) -> Preview:
    """What the state's plan will report. Traces the step; compiles and runs nothing.

    Args:
        state: From `TrainState.create`; with `abstract=True` it needs no memory.
        batch: A batch as the step is called with, or its shapes.

    Raises:
        TypeError: `state` is no `TrainState`.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, optax
        >>> loss = lambda model, batch, rngs: jnp.mean(model(batch) ** 2)
        >>> batch = jax.ShapeDtypeStruct((8, 4), jnp.float32)
        >>> state = TrainState.create(
        ...     model=nn.Dense(2), tx=optax.sgd(0.1), loss_fn=loss, batch=batch, abstract=True
        ... )
        >>> preview(state, batch).families["light"]["param"]
        Share(series=1, payload=8)
    """
    layouts = {program: layout_of(state, batch, program) for program in ("light", "full")}
    plan = state.settings.plan
    families = {program: shares(layout) for program, layout in layouts.items()}
    stored = sum(count_stored(layouts["full"], plan).values())
    return Preview(plan, families, stored, exceeded(layouts["full"], plan))
