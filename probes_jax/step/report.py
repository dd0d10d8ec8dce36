"""What leaves a monitored step: one packed buffer, its layout, and what could not be measured."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from probes_jax.spec.coverage import Coverage
from probes_jax.spec.layout import Layout
from probes_jax.spec.near import near_names
from probes_jax.spec.readings import Readings, decoder_of


class Scalars(dict[str, Any]):
    """A dict whose error for a name that it lacks says why, or which it has. A copy or a pickle of it is a plain dict.

    >>> Scalars({"loss/mean": 2.0})["loss"]
    Traceback (most recent call last):
    KeyError: "nothing was measured as 'loss' on this step; did you mean 'loss/mean'?"
    """

    coverage: Coverage | None = None

    def __missing__(self, name: Any) -> Any:
        reason = None if self.coverage is None else self.coverage.why(str(name))
        if reason is not None:
            raise KeyError(f"nothing was measured as {name!r}: {reason}")
        meant = ", ".join(map(repr, near_names(str(name), self))) or "one of list(report.scalars())"
        raise KeyError(f"nothing was measured as {name!r} on this step; did you mean {meant}?")

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
        scalars.coverage = self.coverage
        return scalars
