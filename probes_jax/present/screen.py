"""What a finished run says at a glance: the first screen, and what was unusual."""

from __future__ import annotations

from typing import TYPE_CHECKING

from probes_jax.present.first_screen import first_screen
from probes_jax.present.state import History
from probes_jax.present.table import signals_table
from probes_jax.present.unusual import find_unusual

if TYPE_CHECKING:
    from rich.console import Console


def print_screen(run: History, console: Console) -> None:
    """Prints the table of the signals and the list of what was unusual.

    Args:
        run: The record, from `probes_jax.open_run`.
        console: Where to, from `make_console`.
    """
    signals = first_screen(run)
    last = max((signal.step for signal in signals if signal.step is not None), default=None)
    console.print(signals_table(signals, title="First screen" if last is None else f"First screen, step {last:,}"))
    found = find_unusual(run)
    if not found:
        console.print("What was unusual: nothing")
        return
    console.print("What was unusual:")
    for item in found:
        console.print(f"  - {item}", markup=False)
