"""What was unusual in a run, read from its record: one line for each kind of trouble, with its steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from probes_jax.host.happenings import ATTEMPT, KINDS
from probes_jax.host.upkeep import SCANS, SHED
from probes_jax.present.first_screen import format_value
from probes_jax.present.score import find_plan
from probes_jax.present.state import DETECTORS, History, read, where
from probes_jax.present.walk import jumps, walk_run
from probes_jax.spec.plan import Plan

# Running counts of the train state: a rise is one more trouble on that step.
_COUNTS = (
    ("alert/nonfinite_steps", "NaN or infinite loss or gradient"),
    ("alert/nonfinite_accepted", "update applied in spite of a NaN or infinite loss or gradient"),
    ("alert/guard/skipped_count", "update skipped"),
    ("data/empty_steps", "batch without a valid token"),
    ("opt/loss_scale_drops", "loss scale lowered"),
)
_MOST = 6  # attempts that are named one by one
_TOLD = {ATTEMPT, SHED, SCANS, *KINDS.values()} - {
    "guard_stopped"
}  # events of what the other rules here find in the series
_WORST = ("logits/abs_max", "act/abs_max")  # a NaN or infinity in one of these is named
_MONITOR = (  # running counts of the recorder, and what to look at
    ("sys/monitor/dropped", "records lost in part or whole, noticed", "the host or its disk was too slow"),
    ("sys/monitor/failed", "failed writes", "the log says which and why"),
)


@dataclasses.dataclass(frozen=True)
class Unusual:
    """One kind of trouble.

    Attributes:
        what: What happened.
        steps: Where it happened, rising; empty if it has no place.
        detail: How bad.
    """

    what: str
    steps: tuple[int, ...] = ()
    detail: str = ""

    def __str__(self) -> str:
        at = f" at {format_steps(self.steps)}" if self.steps else ""
        return f"{self.what}{at}{f' ({self.detail})' if self.detail else ''}"


def format_steps(steps: Sequence[int], most: int = 6) -> str:
    """Steps as stretches, no more than `most` of them.

    >>> format_steps([3, 7, 8, 9, 40])
    'steps 3, 7-9, 40'
    """
    cuts = [i for i in range(1, len(steps)) if steps[i] != steps[i - 1] + 1]
    stretches = [steps[a:b] for a, b in zip([0, *cuts], [*cuts, len(steps)], strict=True)]
    shown = [f"{part[0]:,}" if len(part) == 1 else f"{part[0]:,}-{part[-1]:,}" for part in stretches[:most]]
    more = f" and {len(stretches) - most} more stretches" if len(stretches) > most else ""
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(shown)}{more}"


def find_unusual(run: History, plan: Plan | None = None) -> list[Unusual]:
    """Everything unusual in a run, the most serious first; empty when nothing was.

    Args:
        run: The record, from `probes_jax.open_run`.
        plan: Thresholds; by default those that the run was recorded with.
    """
    manifest = run.manifest()
    plan = find_plan(manifest) if plan is None else plan
    found = [*_counts(run), *_nonfinite(run), *_walks(run), *_co_spikes(run), *_spikes(run, plan), *_monitor(run)]
    found += [*_budget(run), *_missing_steps(run), *_lacking(run)]
    return [*found, *_attempts(run, manifest), *_events(run)]


def _walks(run: History) -> Iterator[Unusual]:
    """Where a gradient of an activation exploded: what the first such scan says of it."""
    steps = jumps(run)
    if steps:
        for line in walk_run(run, steps[0]).lines():
            yield Unusual(line, (steps[0],))


def _measured(run: History, name: str) -> tuple[np.ndarray, np.ndarray]:
    steps, values, present = read(run, name)
    return steps[present], values[present]


def _numbers(steps: np.ndarray) -> tuple[int, ...]:
    return tuple(int(step) for step in steps)


def _counts(run: History) -> Iterator[Unusual]:
    for name, what in _COUNTS:
        steps, total = _rises(run, name)
        if steps:
            yield Unusual(what, steps, total)


def _rises(run: History, name: str) -> tuple[tuple[int, ...], str]:
    """Where a running count rose, and by how much in all; a resumed run may count from 0 again."""
    steps, values = _measured(run, name)
    rises = np.maximum(np.diff(values, prepend=0.0), 0.0)
    return _numbers(steps[rises > 0]), f"{format_value(float(rises.sum()), 'count')} in all"


def _nonfinite(run: History) -> Iterator[Unusual]:
    for name in _WORST:
        steps, values = _measured(run, name)
        bad = ~np.isfinite(values)
        if bad.any():
            first = where(run, name, int(steps[bad][0]))
            yield Unusual(f"NaN or infinity in {name}", _numbers(steps[bad]), f"first in {first}" if first else "")


def _co_spikes(run: History) -> Iterator[Unusual]:
    steps, values = _measured(run, "alert/co_spike")
    if (values > 0).any():
        yield Unusual("co-spike of loss and gradient norm", _numbers(steps[values > 0]))


def _spikes(run: History, plan: Plan) -> Iterator[Unusual]:
    for name, signal in DETECTORS.items():
        steps, scores = _measured(run, f"{signal}/spike/score")
        high = scores > plan.theta
        if high.any():
            worst = int(np.argmax(np.where(high, scores, -np.inf)))
            detail = f"worst score {format_value(scores[worst], '1')} at {steps[worst]:,}, threshold {plan.theta:g}"
            yield Unusual(f"spike of {name}", _numbers(steps[high]), detail)


def _monitor(run: History) -> Iterator[Unusual]:
    for name, what, hint in _MONITOR:
        steps, total = _rises(run, name)
        if steps:
            yield Unusual(what, steps, f"{total}; {hint}")
    seen, reported = (_measured(run, f"sys/monitor/points_{word}")[1] for word in ("seen", "reported"))
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
