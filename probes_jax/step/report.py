"""What leaves a monitored step: one packed buffer, its layout, and what could not be measured."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from probes_jax.spec.catalog import REGISTRY
from probes_jax.spec.coverage import Coverage
from probes_jax.spec.layout import Layout
from probes_jax.spec.metric import Cadence
from probes_jax.spec.near import near_names
from probes_jax.spec.readings import Readings, decoder_of


class Scalars(dict[str, Any]):
    """A dict whose error for a name that it lacks says why, or which it has. A copy or a pickle of it is a plain dict.

    >>> Scalars({"loss/mean": 2.0})["loss"]
    Traceback (most recent call last):
    KeyError: "nothing was measured as 'loss' on this step; did you mean 'loss/mean'?"
    """

    why: Callable[[str], str | None] = staticmethod(lambda name: None)  # the reason that a name is missing

    def __missing__(self, name: Any) -> Any:
        reason = self.why(str(name))
        if reason is not None:
            raise KeyError(f"nothing was measured as {name!r}: {reason}")
        near = ", ".join(map(repr, near_names(str(name), self)))
        instead = f"did you mean {near}?" if near else "list(report.scalars()) has what was"
        raise KeyError(f"nothing was measured as {name!r} on this step; {instead}")

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


jax.tree_util.register_pytree_with_keys(
    Scalars,  # as a dict is: by the keys in their order, with the values below them
    lambda scalars: (
        [(jax.tree_util.DictKey(name), scalars[name]) for name in sorted(scalars)],
        tuple(sorted(scalars)),
    ),
    lambda names, values: Scalars(zip(names, values)),
)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("buffer", "aux"), meta_fields=("layout", "coverage", "plan")
)
@dataclasses.dataclass(frozen=True)
class Report:
    """Everything measured in one step, or in `T` steps of an outer `lax.scan`.

    Attributes:
        buffer: uint32 `[layout.size]`, or `[T, layout.size]`.
        aux: `Loss.aux` as the loss function returned it; with microbatches stacked `[K, ...]`.
        layout: Names and offsets (static).
        coverage: What could and could not be measured (static).
        plan: Fingerprint of the plan that it was measured by (static); empty where nothing was.
    """

    buffer: jax.Array
    layout: Layout
    coverage: Coverage = dataclasses.field(default_factory=Coverage)
    aux: Any = None
    plan: str = ""

    def __repr__(self) -> str:
        return f"<Report of the {self.layout.program} program, {len(self.layout.entries)} entries: scalars() reads it>"

    def readings(self) -> list[Readings]:
        """All metrics, one `Readings` per step that ran. Waits for the device."""
        if not self.layout.entries:
            return []
        rows = np.asarray(self.buffer).reshape(-1, self.layout.size)
        decoder = decoder_of(self.layout)
        return [found for row in rows if (found := decoder.decode(row)) is not None]

    def scalars(self) -> dict[str, Any]:
        """Measured metrics by name, for a notebook; absent ones are left out. Waits for the device.

        A stacked report gives lists, one value per step; a step without that metric gives None.
        """
        steps = self.readings()
        if np.ndim(self.buffer) == 1:
            scalars = Scalars(steps[0].scalars() if steps else {})
        else:
            dicts = [reading.scalars() for reading in steps]
            names = dict.fromkeys(name for found in dicts for name in found)
            scalars = Scalars({name: [found.get(name) for found in dicts] for name in names})
        scalars.why = functools.partial(_why, self.coverage, self.layout)
        return scalars


def _why(coverage: Coverage, layout: Layout, name: str) -> str | None:
    """Why a report of this layout does not have a metric; None where no reason is known."""
    if not layout.entries:
        return "PROBES_JAX=off measures nothing"
    reason = coverage.why(name)
    spec = REGISTRY.find(name)
    if reason is None and spec is not None and layout.program == "light" and spec.cadence is Cadence.EVERY_100:
        return "it is measured by the full program only, every Plan.scan_every steps"
    return reason
