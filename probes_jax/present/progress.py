"""The signals while the run goes on: a progress bar with their last values, or a plain line now and then."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from probes_jax.present.first_screen import OTHER, format_value
from probes_jax.present.state import ALARMS, DETECTORS, LEVELS, TROUBLES, State
from probes_jax.spec.catalog import REGISTRY
from probes_jax.spec.metric import Priority
from probes_jax.spec.plan import Plan
from probes_jax.spec.readings import Readings
from probes_jax.spec.switch import OFF, enabled

if TYPE_CHECKING:
    from rich.console import Console

_PAIRS = 2  # signals side by side
_LAST_STEPS = 30.0  # seconds to wait for them at the end
_PER_SECOND = 2  # redraws; each takes the training thread's time, too


class _Source(Protocol):
    @property
    def latest(self) -> Readings | None: ...
    def flush(self, limit: float = ...) -> bool: ...


@functools.cache
def _places() -> dict[str, int]:
    return {spec.name: place for place, spec in enumerate(REGISTRY)}


def _place(name: str) -> int:
    """Where a signal stands on the first screen."""
    return _places()[REGISTRY[name].name]


class LatestSignals:
    """The last value of every signal. A metric that is measured every 100 steps keeps its value in between."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._units: dict[str, str] = {}  # of every signal, in the order of the registry
        self._names: tuple[str, ...] = ()
        self._columns: dict[str, int] = {}  # signals and scores in the present names
        self.values: dict[str, tuple[float, State | None]] = {}
        self.step: int | None = None

    def see(self, readings: Readings | None) -> None:
        """Takes the readings of a step; None and a step seen before are ignored."""
        if readings is None or readings.step == self.step:
            return
        if readings.names is not self._names:
            self._look_up(readings.names)
        self.step = readings.step
        measured = {n: float(readings.values[i]) for n, i in self._columns.items() if readings.present[i]}
        for name in self._units:
            if name in measured:
                self.values[name] = measured[name], self._state(name, measured)

    def _look_up(self, names: tuple[str, ...]) -> None:
        scores = {f"{signal}/spike/score" for signal in DETECTORS.values()}
        self._names, self._columns = names, {}
        for column, name in enumerate(names):
            spec = REGISTRY.find(name)
            if spec is not None and spec.priority is Priority.P0:
                self._units[name] = spec.unit
                self._columns[name] = column
            elif name in scores:
                self._columns[name] = column
        self._units = {name: self._units[name] for name in sorted(self._units, key=_place)}

    def _state(self, name: str, measured: dict[str, float]) -> State | None:
        """By the rules of the first screen, as far as one step tells; None where it takes earlier steps to say."""
        value = measured[name]
        if not math.isfinite(value) or (name in ALARMS and value != 0):
            return State.ALERT
        if name in TROUBLES and value != 0:
            return State.WATCH
        if name in (*ALARMS, *TROUBLES, *LEVELS):
            return State.OK
        score = measured.get(f"{DETECTORS.get(name)}/spike/score")
        if score is None:
            return State.NEW if name in DETECTORS else None
        return State.ALERT if score > self._plan.theta else State.WATCH if score > self._plan.theta / 2 else State.OK

    def texts(self) -> list[tuple[str, str, State | None]]:
        """(name, value, state) of every signal measured so far; None where the state is not known."""
        known = [name for name in self._units if name in self.values]
        if OTHER + "mean" not in known:
            known = [name for name in known if not name.startswith(OTHER)]
        found = [(name, *self.values[name]) for name in known]
        return [(name, format_value(value, self._units[name]), state) for name, value, state in found]


class LiveSignals:
    """Shows how far a run is and what its signals say. Reads `recorder.latest`, so it never waits for the device.

        with Recorder("runs/demo", plan) as recorder, LiveSignals(recorder, plan, total=1000) as live:
            for batch in batches:
                state, report = monitored_train_step(state, batch)
                recorder.record(report)
                live.update()

    In a terminal it is redrawn in place; anywhere else a line is printed now and then. Both say which program is being
    compiled: the first step of each kind, full and light, waits for that.

    Args:
        recorder: The recorder; its `latest` is shown, and at the end it is flushed once.
        plan: Thresholds, for the colours. A signal without a score has none: no score is not all right.
        total: Steps of the whole run.
        first: The step that the loop begins with.
        console: Where to; standard output by default.
        every: Seconds between two lines where the output is no terminal.
        clock: Seconds; replaced in tests.
    """

    def __init__(
        self,
        recorder: _Source,
        plan: Plan,
        *,
        total: int,
        first: int = 0,
        console: Console | None = None,
        every: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        from probes_jax.present.table import make_console

        self._recorder, self._signals = recorder, LatestSignals(plan)
        self._scan_every = plan.scan_every
        self._console = console or make_console()
        self._every, self._clock = every, clock
        self._next = clock()
        self._total, self._first = total, first
        self._updates = 0
        self._compiled: set[str] = set()  # programs
        self._doing = "training"
        self._said: int | None = None  # the step of the last line
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=self._console, auto_refresh=False)
        self._task = self._bar.add_task("training", total=total)
        self._live = Live(console=self._console, get_renderable=self._draw, refresh_per_second=_PER_SECOND)

    def __enter__(self) -> LiveSignals:
        self._look_ahead()
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        by_hand = kind is not None and issubclass(kind, KeyboardInterrupt)
        if by_hand:
            self._console.print("stopping, writing what is left ..." if self._updates else "stopping ...")
        try:
            if kind is None or by_hand:  # the device is still at work on the last steps
                self._recorder.flush(_LAST_STEPS)
            self._signals.see(self._recorder.latest)
        finally:
            if self._console.is_terminal:
                self._live.stop()
            elif self._signals.step != self._said:
                self._say()

    def update(self) -> None:
        """Looks at the last readings. Call it once a step, so that a value measured every 100 steps is not missed."""
        self._updates += 1
        self._look_ahead()
        self._signals.see(self._recorder.latest)
        if not self._console.is_terminal and self._clock() >= self._next:
            self._next = self._clock() + self._every
            self._say()

    def _look_ahead(self) -> None:
        """Says what the next step waits for: its program, when that has not run yet."""
        step = self._first + self._updates
        on = enabled()
        program = ("light" if step % self._scan_every else "full") if on else "off"
        self._doing = "training" if on else OFF
        if program in self._compiled or step >= self._total:
            return
        self._compiled.add(program)
        self._doing = f"compiling the {program} program (step {step})" if on else OFF
        if not self._console.is_terminal:
            self._console.print(self._doing)

    def _say(self) -> None:
        if self._signals.step is None:
            self._next = self._clock()  # nothing has come back yet: say it as soon as something has
            return
        self._said = self._signals.step
        texts = {name: text for name, text, _ in self._signals.texts()}
        shown = [f"{name} {texts[name]}" for name in ("loss/mean", "grad/norm", "grad/clip_rate") if name in texts]
        troubles = [f"{name} {text}" for name, text, state in self._signals.texts() if state is State.ALERT]
        alert = f"  ALERT {', '.join(troubles)}" if troubles else ""
        line = f"step {self._signals.step + 1}/{self._total}  {'  '.join(shown)}{alert}"
        self._console.print(line, markup=False, soft_wrap=True)

    def _draw(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        from probes_jax.present.table import COLOURS

        done = self._first + self._updates if self._signals.step is None else self._signals.step + 1
        self._bar.update(self._task, completed=done, description=self._doing)
        grid = Table.grid(padding=(0, 1))
        for _ in range(_PAIRS):
            grid.add_column(style="dim")
            grid.add_column(justify="right", min_width=10)
        pairs = [
            (Text(name), Text(text, COLOURS[state] if state is not None else ""))
            for name, text, state in self._signals.texts()
        ]
        for at in range(0, len(pairs), _PAIRS):
            grid.add_row(*(cell for pair in pairs[at : at + _PAIRS] for cell in pair))
        return Group(self._bar.get_renderable(), grid)
