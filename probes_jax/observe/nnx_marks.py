"""What is put on the modules of an nnx model while it runs: a static path, and a Variable where nothing else helps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax import nnx

from probes_jax.observe.names import Path
from probes_jax.observe.nnx_methods import CONTAINERS
from probes_jax.observe.record import Record

Modules = Mapping[Path, nnx.Module]

_PATH = "_probes_jax_path"
_SLOT = "_probes_jax_slot"
_TAPS = "_probes_jax_taps"


@dataclasses.dataclass(frozen=True)
class Marks:
    """How the modules of one model are observed.

    Attributes:
        paths: Each module has a static attribute that says which one it is: a transform makes new instances.
        lifted: JAX's transforms bring records out (`lifted`).
        slots: Modules with a Variable that brings records out of a transform which is not lifted, with the part of
            the model that takes them or refuses them together.
        refused: Modules in a transform that takes no Variable more, and why.
    """

    paths: bool = True
    lifted: bool = True
    slots: Mapping[Path, Path] = dataclasses.field(default_factory=dict)
    refused: Mapping[Path, str] = dataclasses.field(default_factory=dict)

    def with_slots(self, more: Mapping[Path, Path], fixed: Mapping[Path, str]) -> Marks:
        """With more slots, and without those in parts that are `fixed`: modules in there are refused."""
        slots = {**self.slots, **more}
        why = {path: reason for path in slots for part, reason in fixed.items() if path[: len(part)] == part}
        kept = {path: owner for path, owner in slots.items() if path not in why}
        return dataclasses.replace(self, slots=kept, refused={**self.refused, **why})


NO_MARKS = Marks(paths=False, lifted=False)


class Slot(nnx.Variable):
    """Where a module inside a transform leaves its records. Of our own type: no filter of the model's names it.

    A second one on the module holds the slots of its taps: zeros in the structure of the records.
    """


def plant(modules: Modules, marks: Marks, token: int, taps: Mapping[Path, Any]) -> None:
    """Puts the marks on the modules.

    Args:
        modules: By their path.
        marks: Which ones.
        token: Number of the run. Transforms keep what they have traced, by the structure of their modules: with marks
            of an earlier run they would not run the modules again, and nobody would notice.
        taps: Slots of the taps of the modules that have a `Slot`.
    """
    for path, module in modules.items():
        if isinstance(module, CONTAINERS):
            continue
        if marks.paths:
            setattr(module, _PATH, (token, path))
        if path in marks.slots:
            setattr(module, _SLOT, Slot((), hijax=False, ref=False))
            if path in taps:
                setattr(module, _TAPS, Slot(taps[path], hijax=False, ref=False))


def clear(modules: Modules) -> None:
    """Takes all marks away."""
    for module in modules.values():
        for name in (_PATH, _SLOT, _TAPS):
            if name in vars(module):
                delattr(module, name)


def path_of(module: Any, token: int) -> Path | None:
    """The path that a module was marked with in this run."""
    run, path = vars(module).get(_PATH, (None, ()))
    return path if run == token else None


def slot_of(module: Any) -> Slot | None:
    """The slot of a module, if it has one."""
    return vars(module).get(_SLOT)


def is_open(slot: Slot) -> bool:
    """Whether a transform that is running hands the slot back."""
    return slot._can_update


def put(module: Any, record: Record) -> Record | None:
    """Leaves a record in the slot of a module; what comes back are the slots of its taps, if there are any."""
    slot, taps = vars(module)[_SLOT], vars(module).get(_TAPS)
    number = len(slot.get_value())
    slot.set_value((*slot.get_value(), record))
    return None if taps is None or number >= len(taps.get_value()) else taps.get_value()[number]


def brought(modules: Modules) -> dict[Path, tuple[Record, ...]]:
    """The records that came back in slots."""
    slots = {path: slot_of(module) for path, module in modules.items()}
    return {path: slot.get_value() for path, slot in slots.items() if slot is not None and slot.get_value()}
