"""What is observed in one evaluation of a loss function: calls of the model, and values that it names itself.

The loss function may call the model inside JAX's transforms. What a call leaves behind is kept in the trace that it is
made in, and comes out of the transforms around it as one more output of each (`lifted`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from probes_jax.observe.census import Visit
from probes_jax.observe.lift import Level
from probes_jax.observe.lifted import lifting
from probes_jax.observe.record import Record, is_record

LOSS = "loss_fn"  # where points outside of the model are: their path, and `Visit.place`
OUTSIDE = (
    "the model is called inside {0} in loss_fn, which does not bring out what is observed; apply jax.vmap, "
    "jax.checkpoint or jax.lax.scan in loss_fn itself, call the model outside of {0}, or put it in the model"
)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("records",), meta_fields=())
@dataclasses.dataclass(frozen=True)
class Run:
    """What one call of the model left behind, or the slots of its taps: a pytree of records."""

    records: Any


class Evaluation:
    """Keeps everything observed in one evaluation, in the order in which it was made.

    Attributes:
        levels: See `lift.Carrier`; the first one is the trace of the loss function.

    Args:
        slots: Slots of taps, in the structure of `raw`; `()` takes no gradient.
    """

    def __init__(self, slots: Any = ()) -> None:
        self.levels = [Level(slots=slots or ())]

    @property
    def raw(self) -> tuple[Any, ...]:
        """Everything that was kept: a pytree of `Run` (the model's) and `Record` (the loss function's own)."""
        return tuple(self.levels[0].records)

    @property
    def level(self) -> Level:
        """The innermost trace that brings out what is kept in it. Another one may be running: `Level.is_current`."""
        return self.levels[-1]

    def keep(self, what: Run | Record | None, visits: Sequence[Visit]) -> None:
        """Keeps what was measured in the trace that is running, and the calls that were seen; None: only these."""
        level = self.level
        level.visits += [dataclasses.replace(v, through=(*level.through, *v.through)) for v in visits]
        if what is not None:
            level.records.append(what)

    def visits(self, of_model: bool) -> list[Visit]:
        """Calls seen, of the model or of the loss function itself, in the order of what was kept of them."""
        return [visit for visit in self.levels[0].visits if (visit.place != LOSS) is of_model]

    def join(self, bodies: Sequence[Level], records: Any, axis: bool) -> None:
        """See `lift.Carrier`. Iterations have the same parameters: they are examples, or chunks of them."""
        if axis:
            records = jax.tree.map(Record.repeated, records, is_leaf=is_record)
        self.level.visits += [visit for body in bodies for visit in body.visits]
        self.level.records.append(records)

    @contextlib.contextmanager
    def around(self, loss_fn: Callable[..., Any]) -> Iterator[None]:
        """Observes inside of the transforms of a loss function that runs in the block."""
        function = inspect.unwrap(loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn)
        home = sys.modules.get(getattr(function, "__module__", None) or "")
        with lifting(self, () if home is None else (home,)):
            yield


def runs_in(raw: Any) -> list[Any]:
    """What each call of the model left behind; from `Evaluation.raw`, or from the gradient of its slots."""
    return [item.records for item in _items(raw) if isinstance(item, Run)]


def named_in(raw: Any) -> list[Record]:
    """The loss function's own records."""
    return [item for item in _items(raw) if isinstance(item, Record)]


def _items(raw: Any) -> list[Any]:
    return jax.tree.leaves(raw, is_leaf=lambda node: isinstance(node, Run | Record))
