"""The first screen as a table in the terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from probes_jax.present.first_screen import Signal, format_value
from probes_jax.present.state import State

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

COLOURS = {State.NEW: "cyan", State.OK: "green", State.WATCH: "yellow", State.ALERT: "bold red", State.NO_DATA: "dim"}
_HEADINGS = ("signal", "value", "unit", "state", "since step", "where")
_RIGHT = ("value", "since step")
_PLAIN_WIDTH = 120
_WIDEST = 10_000


def show_unit(unit: str) -> str:
    """The unit as it is shown: nothing for a plain ratio."""
    return "" if unit == "1" else unit


def cells(signal: Signal, last: int | None = None) -> tuple[str, ...]:
    """What stands in one row, without colour; a value that is older than step `last` says so."""
    old = signal.step is not None and last is not None and signal.step < last
    return (
        signal.name,
        format_value(signal.value, signal.unit),
        show_unit(signal.unit),
        signal.state.text,
        "-" if signal.since is None else f"{signal.since:,}",
        f"{signal.where} at step {signal.step:,}".strip() if old else signal.where,
    )


def signals_table(signals: Sequence[Signal], title: str = "") -> Table:
    """A rich table of the first screen. Where it is too wide, `where` is folded, and no name or value is cut."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    layout: Any = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False, "show_edge": False}
    table = Table(title=title or None, title_justify="left", **layout)
    for heading in _HEADINGS:
        justify = "right" if heading in _RIGHT else "left"
        table.add_column(heading, justify=justify, no_wrap=heading != "where", overflow="fold")
    last = max((signal.step for signal in signals if signal.step is not None), default=None)
    for signal in signals:
        row = [Text(cell) for cell in cells(signal, last)]
        row[3].stylize(COLOURS[signal.state])
        table.add_row(*row)
    return table


def make_console(width: int | None = None, record: bool = False) -> Console:
    """A console on standard output; where that is no terminal, plain text of a fixed width.

    Args:
        width: Columns; by default those of the terminal.
        record: Keep what is printed, for `as_svg`.
    """
    from rich.console import Console

    fixed = width or (None if sys.stdout.isatty() else _PLAIN_WIDTH)
    return Console(width=fixed, record=record, highlight=False, soft_wrap=False)


def print_table(table: Table) -> None:
    """Prints a table on standard output; where that is no terminal, in as many columns as it needs: nothing is folded,
    so that `grep` finds every name.
    """
    console = make_console()
    if not sys.stdout.isatty():
        console = make_console(width=console.measure(table, options=console.options.update(width=_WIDEST)).maximum)
    console.print(table)


def as_svg(console: Console, title: str) -> str:
    """What a recording console printed, as a picture that needs no other file.

    >>> console = make_console(width=40, record=True)
    >>> console.print("loss/mean 2.000")
    loss/mean 2.000
    >>> as_svg(console, "demo").startswith("<svg")
    True
    """
    svg = console.export_svg(title=title)
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # rich names fonts on a foreign host
