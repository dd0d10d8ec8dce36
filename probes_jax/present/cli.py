"""The command line: `probes`, or `python -m probes_jax`.

Everything but the parser is imported by the command that needs it, and nothing here imports JAX.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

_PICTURE_WIDTH = 100  # columns
_EXAMPLES = """\
examples:
  probes screen runs/demo              the signals of a run, and what was unusual in it
  probes walk runs/demo --step 600     where an explosion began, from the output inwards
  probes coverage runs/demo            what of the model is seen, what is not, and why
  probes metrics                       every metric: what it is, what it catches
  probes metrics --json grad/norm      one of them, for a program

exit code: 0 done, 1 the run cannot be read or the file not written, 2 wrong use
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


def _parser() -> argparse.ArgumentParser:
    plain: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(
        prog="probes", description="Reads what probes_jax recorded.", epilog=_EXAMPLES, **plain
    )
    parser.add_argument("--version", action="store_true", help="print the version and stop")
    parser.set_defaults(run_command=_version_or_help, parser=parser)
    commands = parser.add_subparsers(metavar="COMMAND")

    metrics = commands.add_parser("metrics", help="list the metrics", description="Lists the metrics.")
    metrics.add_argument("name", nargs="*", help="only these: reported names, or the beginning of a name")
    form = metrics.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON list")
    form.add_argument("--markdown", action="store_true", help="the metric reference, docs/metrics.md")
    metrics.set_defaults(run_command=_metrics)

    screen = commands.add_parser(
        "screen",
        help="the first screen of a run",
        description="Shows the signals of a run with value, unit, state and since when, and what was unusual.",
    )
    screen.add_argument("run", metavar="RUN", help="folder (or URL) of the run")
    screen.add_argument("--svg", metavar="FILE", help="write the screen as a picture, too")
    screen.set_defaults(run_command=_screen)
    walk = commands.add_parser(
        "walk",
        help="where an explosion or a NaN began",
        description="Walks the gradients of activations of one scan from the output inwards, and names the first that "
        "jumps against its own history.",
    )
    walk.add_argument("run", metavar="RUN", help="folder (or URL) of the run")
    walk.add_argument(
        "--step", type=int, help="a step that scanned activations; by default the last, or its NaN's first"
    )
    walk.set_defaults(run_command=_walk)

    coverage = commands.add_parser(
        "coverage",
        help="what of a model is seen, and what is not",
        description="Lists the points of a run's model, layers that are alike in one row, and everything that could "
        "not be measured with the reason and the line that mends it.",
    )
    coverage.add_argument("run", metavar="RUN", help="folder (or URL) of the run")
    form = coverage.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object, every point by itself")
    form.add_argument("--markdown", action="store_true", help="a Markdown table")
    coverage.set_defaults(run_command=_coverage)
    return parser


def _version_or_help(chosen: argparse.Namespace) -> int:
    if chosen.version:
        from probes_jax import __version__

        print(__version__)
        return 0
    chosen.parser.print_help()
    return 2


def _metrics(chosen: argparse.Namespace) -> int:
    from probes_jax.present import reference
    from probes_jax.spec.catalog import REGISTRY

    specs = list(REGISTRY)
    for name in chosen.name:
        if not any(_asked(spec, [name]) for spec in specs):
            print(f"probes metrics: no metric {name!r}; `probes metrics` lists all", file=sys.stderr)
            return 2
    if chosen.name:
        specs = [spec for spec in specs if _asked(spec, chosen.name)]
    if chosen.json:
        print(reference.as_json(specs))
    elif chosen.markdown:
        sys.stdout.write(reference.as_markdown(specs))
    else:
        from probes_jax.present.table import print_table

        print_table(reference.as_table(specs))
    return 0


def _asked(spec: Any, names: Sequence[str]) -> bool:
    from probes_jax.spec.catalog import REGISTRY

    return any(spec.name.startswith(name) or REGISTRY.find(name) is spec for name in names)


def _screen(chosen: argparse.Namespace) -> int:
    from probes_jax.host.run_folder import open_run
    from probes_jax.present.screen import print_screen
    from probes_jax.present.table import as_svg, make_console

    console = make_console(width=_PICTURE_WIDTH, record=True) if chosen.svg else make_console()
    try:
        print_screen(open_run(chosen.run), console, chosen.run)
        if chosen.svg:
            pathlib.Path(chosen.svg).write_text(as_svg(console, f"probes screen {chosen.run}"), encoding="utf-8")
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        print(f"probes screen: {error}", file=sys.stderr)
        return 1
    return 0


def _walk(chosen: argparse.Namespace) -> int:
    from probes_jax.host.run_folder import open_run
    from probes_jax.present.walk import walk_run

    try:
        found = walk_run(open_run(chosen.run), chosen.step)
    except (OSError, ValueError) as error:
        print(f"probes walk: {error}", file=sys.stderr)
        return 1
    print(f"Step {found.step:,}, from the output inwards:")
    for place in found.chain:
        print(f"  {place}")
    print("\n".join(found.lines()) or "Nothing jumps against its own history.")
    return 0


def _coverage(chosen: argparse.Namespace) -> int:
    from probes_jax.host.run_folder import open_run
    from probes_jax.present import coverage

    try:
        found = coverage.find_coverage(open_run(chosen.run))
    except (OSError, ValueError) as error:
        print(f"probes coverage: {error}", file=sys.stderr)
        return 1
    if chosen.json:
        print(coverage.as_json(found))
    elif chosen.markdown:
        sys.stdout.write(coverage.as_markdown(found.coverage))
        print("\n".join(found.notes), end="\n" if found.notes else "", file=sys.stderr)
    else:
        coverage.print_coverage(found)
    return 0
