"""What a finished run says at a glance: the first screen, and what was unusual."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from probes_jax.host.damage import LOST, DamagedRun
from probes_jax.present.first_screen import first_screen
from probes_jax.present.reasons import find_reasons
from probes_jax.present.score import find_plan
from probes_jax.present.state import History
from probes_jax.present.table import make_console, signals_table
from probes_jax.present.unusual import find_unusual
from probes_jax.spec.switch import OFF, enabled

if TYPE_CHECKING:
    from rich.console import Console


def print_screen(run: History, console: Console | None = None, name: str = "RUN") -> None:
    """Prints the table of the signals, why some have no data where the run knows, and the list of what was unusual.

    Its title says when the last attempt of the run began. With PROBES_JAX=off a line says that this process added none.
    After a killed job the flight record may go on past the last step of the table: then a line says so. What of the
    run is damaged is named at the end, and the rest is shown.

    Args:
        run: The record, from `probes_jax.open_run`.
        console: A rich console; standard output by default.
        name: Folder or URL of the run, as it is to be shown.

    Example:
        pj.print_screen(pj.open_run("runs/demo"))
    """
    console = make_console() if console is None else console
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamagedRun)  # they stand at the end
        _print(run, console, name)


def _print(run: History, console: Console, name: str) -> None:
    if not enabled():
        console.print(f"Here {OFF}: nothing is recorded. This is what the folder holds of before.\n")
    manifest = run.manifest()
    plan = find_plan(manifest)
    signals = first_screen(run, plan)
    last = max((signal.step for signal in signals if signal.step is not None), default=None)
    console.print(signals_table(signals, title=_title(last, manifest)))
    flown = run.flight_step()
    if flown is not None and (last is None or flown > last):
        line = f'The flight record goes on to step {flown:,}: read it with probes_jax.open_run("{name}").flight()'
        console.print(line, markup=False, soft_wrap=True)
    _section(console, "Without data", find_reasons(run, signals, plan))
    found = find_unusual(run, plan, signals)
    if last is None and (run.damaged() or not run.names()):
        console.print(f"\nNothing can be said of the signals: the run's store {LOST}", soft_wrap=True)
    elif not found:
        console.print("\nWhat was unusual: nothing")
    _section(console, "What was unusual", found)
    _section(console, "Could not be read", run.damaged(), soft_wrap=True)


def _title(last: int | None, manifest: Mapping[str, Any]) -> str:
    """How far the run is, and when its last attempt began."""
    created = (manifest.get("attempts") or [{}])[-1].get("created") or manifest.get("created")
    begun = None if created is None else datetime.datetime.fromtimestamp(created, datetime.UTC)
    parts = ("First screen", last is not None and f"step {last:,}", begun and f"begun {begun:%Y-%m-%d %H:%M} UTC")
    return ", ".join(part for part in parts if part)


def _section(console: Console, heading: str, lines: Sequence[object], **options: Any) -> None:
    if lines:
        console.print(f"\n{heading}:")
    for line in lines:
        console.print(f"  - {line}", markup=False, **options)
