"""What of a recorded run was seen and what was not: text, Markdown, JSON."""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from probes_jax.host.damage import DamagedRun
from probes_jax.spec.coverage import HEADINGS, LIGHT_ONLY, Coverage, missing_lines

if TYPE_CHECKING:
    from rich.table import Table


class Covered(Protocol):
    """A run that says what was seen of it."""

    def coverage(self) -> list[dict[str, Any]]:
        """See `probes_jax.host.run_reader.Run.coverage`."""
        ...

    def damaged(self) -> list[str]:
        """See `probes_jax.host.run_reader.Run.damaged`."""
        ...


@dataclasses.dataclass(frozen=True)
class RunCoverage:
    """What was seen of a run.

    Attributes:
        attempt: The last attempt that observed activations; the last of all where none did.
        programs: The programs that reported in it.
        coverage: Its points, and what is missing in any of its programs.
        notes: Whole sentences about what the table does not show.
    """

    attempt: int
    programs: tuple[str, ...]
    coverage: Coverage
    notes: tuple[str, ...]

    @property
    def counts(self) -> str:
        points = self.coverage.points
        back = sum(point.gradient for point in points)
        return (
            f"attempt {self.attempt}: {len(self.coverage.reported)} of {len(points)} observed points reported, "
            f"{back} of them with their gradient"
        )


def find_coverage(run: Covered) -> RunCoverage:
    """What was seen of a run.

    Raises:
        ValueError: The run does not say.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamagedRun)  # they are among the notes
        entries = run.coverage()
    damaged = [text for text in run.damaged() if text.startswith("entries/coverage/")]
    if not entries:
        raise ValueError(
            "; ".join(damaged)
            or "the run does not say what was seen of it: it was recorded without a table of points, or ended before "
            "the store was first flushed; print(report.coverage) in the loop shows the same"
        )
    scanned = [entry for entry in entries if entry["coverage"].points]
    attempt = (scanned or entries)[-1]["attempt"]
    here = [entry for entry in entries if entry["attempt"] == attempt]
    points = scanned[-1]["coverage"].points if scanned else ()
    missing = {item: None for entry in here for item in entry["coverage"].missing}
    programs = tuple(dict.fromkeys(entry["program"] for entry in here))
    notes = [*damaged, *(_notes(entries, scanned, attempt) if scanned or not damaged else ())]
    full = (scanned or here)[-1]["coverage"]
    told = {line: None for entry in here for line in entry["coverage"].warnings}
    coverage = Coverage(points, tuple(missing), full.stored, tuple(told))
    return RunCoverage(attempt, programs, coverage, tuple(notes))


def _notes(entries: Sequence[dict[str, Any]], scanned: Sequence[dict[str, Any]], attempt: int) -> list[str]:
    notes = []
    if not scanned and all(entry["program"] == "light" for entry in entries):
        notes.append(f"Only the light program has reported so far: {LIGHT_ONLY}.")
    elif not scanned:
        notes.append("No program of this run observes activations: its loop hands none to the monitor.")
    later = entries[-1]["attempt"]
    if later > attempt:
        notes.append(f"Attempt {later} has not observed activations: this is what attempt {attempt} saw.")
    for entry in scanned:
        if entry["attempt"] < attempt and set(entry["coverage"].points) != set(scanned[-1]["coverage"].points):
            seen, reported = (len(names) for names in (entry["coverage"].seen, entry["coverage"].reported))
            notes.append(f"Attempt {entry['attempt']} saw other points: {reported} of {seen} reported.")
    return notes


def as_table(coverage: Coverage) -> Table:
    """A rich table of the points; layers that are alike are one row."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, overflow="fold", justify="right" if heading == "layers" else "left")
    for row in coverage.table():
        table.add_row(*(Text(cell) for cell in row))
    return table


def as_markdown(coverage: Coverage) -> str:
    """The same as a Markdown table, and what is missing as a list."""
    rows = [HEADINGS, ["---"] * len(HEADINGS), *([_code(cell) for cell in row] for row in coverage.table())]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    missing = [f"- {line.strip()}" for line in missing_lines(coverage.missing, most=None)]
    return "\n".join([*(lines if coverage.points else []), "", *missing]).strip() + "\n"


def _code(cell: str) -> str:
    return f"`{cell}`" if re.search(r"[^\w ]|_", cell) else cell


def as_json(found: RunCoverage) -> str:
    """One JSON object: the counts, the points one by one, everything that is missing."""
    coverage = found.coverage
    counts = {"seen": len(coverage.seen), "reported": len(coverage.reported)}
    about = {"attempt": found.attempt, "programs": list(found.programs), **counts, "notes": list(found.notes)}
    return json.dumps(about | coverage.to_json(), indent=2, ensure_ascii=False, allow_nan=False)


def print_coverage(found: RunCoverage) -> None:
    """Prints the counts, the table, and a line for every reason why something is missing."""
    from probes_jax.present.table import print_table

    if found.coverage.points:
        print(found.counts)
        print_table(as_table(found.coverage))
    for note in found.notes:
        print(note)
    for line in found.coverage.lines():
        print(line.strip())
    lines = missing_lines(found.coverage.missing, most=None)
    if lines or found.coverage.points:
        print("\n".join(lines) or "Nothing is missing.")
