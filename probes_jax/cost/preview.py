"""What a plan will report, before anything is compiled: series and bytes, by family."""

from __future__ import annotations

import dataclasses
from typing import Any

from probes_jax.cost.inspection import layout_of
from probes_jax.spec.layout import Layout
from probes_jax.spec.plan import Plan
from probes_jax.spec.readings import decoder_of
from probes_jax.step.state import TrainState


@dataclasses.dataclass(frozen=True)
class Share:
    """Of one family in one program.

    Attributes:
        series: Metrics in a report.
        payload: Bytes of a report that go to the host.
    """

    series: int
    payload: int


@dataclasses.dataclass(frozen=True)
class Preview:
    """What each program will report. `print` shows it as a table.

    Attributes:
        plan: The plan.
        families: For `light` and `full`, the share of each family (the first part of a metric's name).
    """

    plan: Plan
    families: dict[str, dict[str, Share]]

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
        return "\n".join(lines)


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
    programs = {program: layout_of(state, batch, program) for program in ("light", "full")}
    return Preview(state.settings.plan, {program: _families(layout) for program, layout in programs.items()})


def _families(layout: Layout) -> dict[str, Share]:
    series: dict[str, int] = {}
    for name in decoder_of(layout).names:
        family = name.split("/")[0]
        series[family] = series.get(family, 0) + 1
    payload: dict[str, int] = dict.fromkeys(series, 0)
    for slot in layout.slots:
        payload[layout.entries[slot.entry].key.split("/")[0]] += 4 * slot.size
    return {family: Share(series[family], payload[family]) for family in series}
