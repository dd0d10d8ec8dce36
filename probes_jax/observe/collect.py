"""What leaves each named stage of an optimizer, while a step that wants to know is traced."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from jax.extend.core import get_opaque_trace_state

from probes_jax.observe.hiding import hiding

HIDDEN = "inside {0} (optax.MultiSteps, optax.apply_if_finite), out of which nothing comes but the update"
UNSEEN = "the stages of this optimizer cannot be seen; make it with pj.chain"


class Collector:
    """Keeps the updates of every stage of every `Chain` that runs in the trace it was made in.

    Attributes:
        stages: By the stage's name, the updates after it: more than one tree where groups of parameters have stages of
            one name. A stage of a chain within a stage is called `outer.inner`.
        missing: Reason by name, for stages that ran inside of a transform.
    """

    def __init__(self) -> None:
        self.stages: dict[str, list[Any]] = {}
        self.missing: dict[str, str] = {}
        self._around: list[str] = []
        self._trace = get_opaque_trace_state(convention="flax")

    def take(self, name: str, updates: Any) -> None:
        """Keeps what the stage made, or why it cannot be kept."""
        label = ".".join((*self._around, name))
        if get_opaque_trace_state(convention="flax") == self._trace:
            self.stages.setdefault(label, []).append(updates)
        else:
            self.missing[label] = HIDDEN.format(hiding(self._trace))

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """While the stage runs."""
        self._around.append(name)
        try:
            yield
        finally:
            self._around.pop()


class _Active(threading.local):
    collector: Collector | None = None


_active = _Active()


@contextlib.contextmanager
def collecting(collector: Collector | None) -> Iterator[None]:
    """Hands the stages of chains to this collector while the block runs, in this thread only; None: to nobody."""
    previous, _active.collector = _active.collector, collector
    try:
        yield
    finally:
        _active.collector = previous


def run_stage(stage: Any, updates: Any, state: Any, params: Any, extra_args: dict[str, Any]) -> tuple[Any, Any]:
    """`stage.update`, whose updates the collector gets."""
    collector = _active.collector
    if collector is None:
        return stage.update(updates, state, params, **extra_args)
    with collector.inside(stage.name):
        updates, state = stage.update(updates, state, params, **extra_args)
    collector.take(stage.name, updates)
    return updates, state
