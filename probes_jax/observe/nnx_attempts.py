"""Finds the marks that an nnx model takes, module by module: a model may be written so that it fails with one more."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from probes_jax.observe.names import Path
from probes_jax.observe.nnx_marks import NO_MARKS, Marks
from probes_jax.observe.nnx_recorder import NNXRecorder


class Saved:
    """What a call of a model may change: the module, and modules and random states among its arguments."""

    def __init__(self, module: nnx.Module, arguments: Any) -> None:
        self._graphdef, self._state = nnx.split(module, graph=True)
        self._state = _copy(self._state)
        nodes = jax.tree.leaves(arguments, is_leaf=_is_node)
        self._nodes = [(node, _copy(nnx.split(node, graph=True)[1])) for node in nodes if _is_node(node)]

    def restore(self) -> nnx.Module:
        """The module as it was, a new one; arguments get their values back."""
        for node, state in self._nodes:
            nnx.update(node, _copy(state))
        return nnx.merge(self._graphdef, _copy(self._state))

    def is_of(self, module: nnx.Module) -> bool:
        """Whether the module has the values that it had, the same arrays."""
        now = jax.tree.leaves(nnx.split(module, graph=True)[1])
        then = jax.tree.leaves(self._state)
        return len(now) == len(then) and all(a is b for a, b in zip(now, then))


def _is_node(x: Any) -> bool:
    return isinstance(x, nnx.Pytree | nnx.Object)


def _copy(state: Any) -> Any:
    return jax.tree.map(lambda x: x, state)  # other Variables, the same arrays


class Attempts:
    """Runs a model until it runs with as many marks as it takes.

    Args:
        recorder: Observes the runs.
        run: Runs the model with marks.
        undo: Puts everything back as it was before the run.
    """

    def __init__(self, recorder: NNXRecorder, run: Callable[[Marks], Any], undo: Callable[[], None]) -> None:
        self._recorder = recorder
        self._run = run
        self._undo = undo
        self._start = recorder.mark
        self._error: Exception | None = None

    def search(self, marks: Marks) -> tuple[Any, Marks]:
        """The output of the model, and the marks that it ran with.

        An error that is the model's own is raised by the last run, that without marks.
        """
        while True:
            try:
                output = self._run(marks)
            except Exception:
                if marks == NO_MARKS:
                    raise
                self._take_back()
                marks = self._fewer(marks)
                continue
            more = marks.with_slots(self._recorder.without, self._recorder.fixed)
            if more == marks or not marks.paths:
                return output, marks
            self._take_back()
            marks = more

    def _take_back(self) -> None:
        self._recorder.forget(self._start)
        self._undo()

    def _works(self, marks: Marks) -> bool:
        try:
            self._run(marks)
        except Exception as error:
            self._error = error
            return False
        finally:
            self._take_back()
        return True

    def _fewer(self, marks: Marks) -> Marks:
        """Without what makes the model fail."""
        bare = dataclasses.replace(marks, slots={})
        if marks.slots and self._works(bare):
            groups: dict[Path, dict[Path, Path]] = {}
            for path, owner in marks.slots.items():
                groups.setdefault(owner, {})[path] = owner
            return self._with(bare, list(groups.values()))
        return Marks(lifted=False) if marks.lifted else NO_MARKS

    def _with(self, marks: Marks, groups: list[dict[Path, Path]]) -> Marks:
        """The marks and as many of the groups of slots as the model takes; a group is refused as a whole."""
        more = {path: owner for group in groups for path, owner in group.items()}
        wanted = dataclasses.replace(marks, slots={**marks.slots, **more})
        if self._works(wanted):
            return wanted
        if len(groups) > 1:
            half = len(groups) // 2
            return self._with(self._with(marks, groups[:half]), groups[half:])
        return dataclasses.replace(marks, refused={**marks.refused, **dict.fromkeys(more, _reason(self._error))})


def _reason(error: Exception | None) -> str:
    text = str(error).strip().partition("\n")[0][:100]
    return (
        f"inside a transform that does not take a Variable more ({type(error).__name__}: {text}); make a loop a scan, "
        "move the module out of the transform, or observe what it returns: pj.observe(name, x)"
    )
