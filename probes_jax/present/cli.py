"""The command line: `probes`, or `python -m probes_jax`.

Everything but the parser is imported by the command that needs it, and nothing there imports JAX.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from probes_jax.present import commands

_EXAMPLES = """\
examples:
  probes screen runs/demo              the signals of a run, and what was unusual in it
  probes walk runs/demo --step 600     where an explosion began, from the output inwards
  probes coverage runs/demo            what of the model is seen, what is not, and why
  probes series runs/demo grad/norm    one metric: step and value, a line each (without a name: what there is)
  probes metrics                       every metric: what it is, what it catches
  probes metrics grad/norm             one of them, with its definition (--json: for a program)

exit code: 0 done, 1 the run cannot be read or the file not written, 2 wrong use, or no such name
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code.

    Args:
        arguments: Without the program's name; by default those of the process.
    """
    parser = _parser()
    chosen = parser.parse_args(arguments)
    try:
        return chosen.run_command(chosen)
    except BrokenPipeError:  # the reader (`| head`) has gone; say nothing more, also not at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, ValueError) as error:
        print(f"probes {chosen.run_command.__name__}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    plain: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(
        prog="probes", description="Reads what probes_jax recorded.", epilog=_EXAMPLES, **plain
    )
    parser.add_argument("--version", action="store_true", help="print the version and stop")
    parser.set_defaults(run_command=_version_or_help, parser=parser)
    subparsers = parser.add_subparsers(metavar="COMMAND")

    metrics = subparsers.add_parser("metrics", help="list the metrics", description="Lists the metrics.")
    metrics.add_argument("name", nargs="*", help="only these: reported names, or the beginning of a name")
    form = metrics.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON list")
    form.add_argument("--markdown", action="store_true", help="the metric reference, docs/metrics.md")
    metrics.set_defaults(run_command=commands.metrics)

    screen = subparsers.add_parser(
        "screen",
        help="the first screen of a run",
        description="Shows the signals of a run with value, unit, state and since when, and what was unusual.",
    )
    screen.add_argument("run", metavar="RUN", help="folder (or URL) of the run")
    screen.add_argument("--svg", metavar="FILE", help="write the screen as a picture, too")
    screen.set_defaults(run_command=commands.screen)
    walk = subparsers.add_parser(
        "walk",
        help="where an explosion or a NaN began",
        description="Walks the gradients of activations of one scan from the output inwards, and names the first that "
        "jumps against its own history.",
    )
    walk.add_argument("run", metavar="RUN", help="folder (or URL) of the run")
    walk.add_argument(
        "--step", type=int, help="a step that scanned activations; by default the last, or its NaN's first"
    )
    walk.set_defaults(run_command=commands.walk)

    series = subparsers.add_parser(
        "series",
        help="one metric over the steps",
        description="Prints a line for each step at which a metric was measured: the step, a tab, the value.",
    )
    series.add_argument("run", metavar="RUN", help="folder (or URL) of the run")
    series.add_argument("name", metavar="NAME", nargs="?", help="reported name, such as grad/norm (default: list all)")
    series.add_argument("--last", type=_positive, metavar="N", help="only the last N of them")
    series.add_argument("--json", action="store_true", help="one JSON object: name, steps, values")
    series.set_defaults(run_command=commands.series)

    coverage = subparsers.add_parser(
        "coverage",
        help="what of a model is seen, and what is not",
        description="Lists the points of a run's model, layers that are alike in one row, and everything that could "
        "not be measured with the reason and the line that mends it.",
    )
    coverage.add_argument("run", metavar="RUN", help="folder (or URL) of the run")
    form = coverage.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object, every point by itself")
    form.add_argument("--markdown", action="store_true", help="a Markdown table")
    coverage.set_defaults(run_command=commands.coverage)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _version_or_help(chosen: argparse.Namespace) -> int:
    if chosen.version:
        from probes_jax import __version__

        print(__version__)
        return 0
    chosen.parser.print_help()
    return 2
