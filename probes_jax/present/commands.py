"""What each command does: chosen arguments in, text out, exit code back.

A run that cannot be read raises `OSError` or `ValueError`; the caller says so in a line.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import warnings
from collections.abc import Sequence
from typing import Any

_PICTURE_WIDTH = 100  # columns


def metrics(chosen: argparse.Namespace) -> int:
    """Lists metrics; those that are asked for by name with their definition."""
    from probes_jax.present import reference
    from probes_jax.spec.catalog import REGISTRY
    from probes_jax.spec.near import near_names

    specs = list(REGISTRY)
    for name in chosen.name:
        if not any(_asked(spec, [name]) for spec in specs):
            near = ", ".join(near_names(name, (spec.name for spec in specs)))
            hint = f"did you mean {near}?" if near else "`probes metrics` lists all"
            print(f"probes metrics: no metric {name!r}; {hint}", file=sys.stderr)
            return 2
    if chosen.name:
        specs = [spec for spec in specs if _asked(spec, chosen.name)]
    if chosen.json:
        print(reference.as_json(specs))
    elif chosen.markdown:
        sys.stdout.write(reference.as_markdown(specs))
    elif chosen.name:
        print("\n\n".join(map(reference.as_text, specs)))
    else:
        from probes_jax.present.table import print_table

        print_table(reference.as_table(specs))
    return 0


def _asked(spec: Any, names: Sequence[str]) -> bool:
    from probes_jax.spec.catalog import REGISTRY

    return any(spec.name.startswith(name) or REGISTRY.find(name) is spec for name in names)


def screen(chosen: argparse.Namespace) -> int:
    """Prints the first screen, and draws it."""
    from probes_jax.host.run_folder import open_run
    from probes_jax.present.screen import print_screen
    from probes_jax.present.table import as_svg, make_console

    console = make_console(width=_PICTURE_WIDTH, record=True) if chosen.svg else make_console()
    print_screen(open_run(chosen.run), console, chosen.run)
    if chosen.svg:
        pathlib.Path(chosen.svg).write_text(as_svg(console, f"probes screen {chosen.run}"), encoding="utf-8")
    return 0


def walk(chosen: argparse.Namespace) -> int:
    """Prints what one scan says, and the values behind it."""
    from probes_jax.host.run_folder import open_run
    from probes_jax.present.score import find_plan
    from probes_jax.present.walk import verdict, walk_run

    run = open_run(chosen.run)
    found = walk_run(run, chosen.step)
    print("\n".join(verdict(run, found, find_plan(run.manifest()))))
    print(f"\nStep {found.step:,}, from the output inwards:")
    for place in found.chain:
        print(f"  {place}")
    return 0


def series(chosen: argparse.Namespace) -> int:
    """Prints one metric, a line for each step at which it was measured; without a name those that there are."""
    from probes_jax.host.damage import DamagedRun
    from probes_jax.host.run_folder import open_run
    from probes_jax.host.strict_json import dumps

    run = open_run(chosen.run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamagedRun)  # told in lines of their own
        if chosen.name is None:
            print(dumps(run.names()).decode() if chosen.json else "\n".join(run.names()))
            return 0 if run.names() else 1
        try:
            steps, values, present = run.series(chosen.name)
        except KeyError as error:
            print(f"probes series: {error.args[0]}", file=sys.stderr)
            return 2 if run.names() else 1
    for text in run.damaged():
        print(f"probes series: {text}", file=sys.stderr)
    if run.damaged() and not present.any():
        return 1
    last = slice(None) if chosen.last is None else slice(max(0, int(present.sum()) - chosen.last), None)
    steps, values = steps[present][last].tolist(), values[present][last].tolist()
    if chosen.json:
        print(dumps({"name": chosen.name, "steps": steps, "values": values}).decode())
        return 0
    for step, value in zip(steps, values, strict=True):
        print(f"{step}\t{value:.7g}")
    return 0


def coverage(chosen: argparse.Namespace) -> int:
    """Prints what of a run's model was seen."""
    from probes_jax.host.run_folder import open_run
    from probes_jax.present import coverage

    found = coverage.find_coverage(open_run(chosen.run))
    if chosen.json:
        print(coverage.as_json(found))
    elif chosen.markdown:
        sys.stdout.write(coverage.as_markdown(found.coverage))
        print("\n".join(found.notes), end="\n" if found.notes else "", file=sys.stderr)
    else:
        coverage.print_coverage(found)
    return 0
