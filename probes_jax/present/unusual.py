"""What was unusual in a run, read from its record: one line for each kind of trouble, with its steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from probes_jax.host.happenings import ATTEMPT, KINDS
from probes_jax.host.upkeep import SCANS, SHED
from probes_jax.present.first_screen import Signal, first_screen
from probes_jax.present.movements import find_movements
from probes_jax.present.score import find_plan
from probes_jax.present.state import History, read
from probes_jax.present.trouble import Unusual, measured, rises
from probes_jax.spec.plan import Plan

_MOST = 6  # attempts that are named one by one
_TOLD = {ATTEMPT, SHED, SCANS, *KINDS.values()}  # events of what the rules find in the series
_MONITOR = (  # running counts of the recorder, and what to look at
    ("sys/monitor/dropped", "records lost in part or whole, noticed", "the host or its disk was too slow"),
    ("sys/monitor/failed", "failed writes", "the log says which and why"),
)


def find_unusual(run: History, plan: Plan | None = None, signals: Sequence[Signal] | None = None) -> list[Unusual]:
    """Everything unusual in a run: what moved, by its first step, then what became of the record. Empty for nothing.

    Args:
        run: The record, from `probes_jax.open_run`.
        plan: Thresholds; by default those that the run was recorded with.
        signals: The first screen, where it is known already.
    """
    manifest = run.manifest()
    plan = find_plan(manifest) if plan is None else plan
    signals = first_screen(run, plan) if signals is None else signals
    found = [*find_movements(run, plan, signals), *_monitor(run), *_budget(run), *_missing_steps(run), *_lacking(run)]
    return [*found, *_attempts(run, manifest), *_events(run)]


def _monitor(run: History) -> Iterator[Unusual]:
    for name, what, hint in _MONITOR:
        steps, total = rises(run, name)
        if steps:
            yield Unusual(what, steps, f"{total}; {hint}")
    seen, reported = (measured(run, f"sys/monitor/points_{word}")[1] for word in ("seen", "reported"))
    if seen.size and reported.size and reported[-1] < seen[-1]:
        counts = f"{reported[-1]:,.0f} of {seen[-1]:,.0f} reported"
        yield Unusual("observed points that did not report", (), f"{counts}; probes coverage names them")


def _budget(run: History) -> Iterator[Unusual]:
    """What the recorder left out to keep its budget, and scans above it."""
    events = run.events()
    shed = _telling(events, SHED, "what")
    if shed:
        detail = f"{shed[-1]['payload']['what']} since then"
        yield Unusual("recorder over its budget, or back in it,", tuple(event["step"] for event in shed), detail)
    for event in _telling(events, SCANS, "share", "scan_every"):
        cost, every = event["payload"]["share"], event["payload"]["scan_every"]
        yield Unusual(f"scans add {cost:.2g} of a step's time", (event["step"],), f"scan_every={every} would do")


def _telling(events: list[dict], kind: str, *keys: str) -> list[dict]:
    """The events of a kind that say this; somebody else may write events of any kind."""
    return [event for event in events if event["kind"] == kind and event["payload"].keys() >= {*keys}]


def _missing_steps(run: History) -> Iterator[Unusual]:
    """Steps without a record, between the first and the last."""
    steps, _, _ = read(run, "loss/mean")
    gaps = np.flatnonzero(np.diff(steps) > 1)
    missing = [step for at in gaps[:100] for step in range(int(steps[at]) + 1, int(steps[at + 1]))]
    if missing:
        yield Unusual("no record", tuple(missing))


def _lacking(run: History) -> Iterator[Unusual]:
    """Processes of a job whose flight record is missing, or lacks what others have."""
    for process, steps in run.lacking().items():
        if steps is None:
            yield Unusual(f"flight record of process {process} is not in this folder")
        else:
            yield Unusual(f"flight record of process {process} lacks what others have", steps)


def _attempts(run: History, manifest: dict) -> Iterator[Unusual]:
    """Attempts after the first: those that went on where the run had ended, and each that went back."""
    told = {e.get("attempt"): e.get("payload", {}).get("superseded_through") for e in run.events() if _begins(e)}
    later = list(manifest.get("attempts", ()))[1:]
    begun = [(entry.get("attempt"), entry["first_step"]) for entry in later if entry.get("first_step") is not None]
    onward = [(number, step) for number, step in begun if told.get(number) is None]
    back = [(number, step) for number, step in begun if told.get(number) is not None]
    if onward:
        numbers = ", ".join(str(number) for number, _ in onward[:_MOST])
        which = f"attempt{'s' if len(onward) > 1 else ''} {numbers}{', ...' if len(onward) > _MOST else ''}"
        yield Unusual("run resumed", tuple(step for _, step in onward), which)
    for number, step in back[-_MOST:]:
        yield Unusual(
            "run started again", (step,), f"attempt {number}, in place of earlier {_span(step, told[number])}"
        )
    if len(back) > _MOST:
        yield Unusual(f"run started again {len(back) - _MOST} times more, before these")


def _begins(event: dict) -> bool:
    return event["kind"] == ATTEMPT


def _span(first: int, last: int) -> str:
    return f"step {first:,}" if first == last else f"steps {first:,}-{last:,}"


def _events(run: History) -> Iterator[Unusual]:
    kinds: dict[str, list[int]] = {}
    for event in run.events():
        if event["kind"] in _TOLD:
            continue
        kinds.setdefault(str(event["kind"]), []).append(int(event["step"]))
    for kind, steps in kinds.items():
        yield Unusual(kind, tuple(sorted(set(steps))))
