"""Who may import whom, and which file is the home of which foreign library.

The tables are the rules. A new package, a new dependency or a new home is one line here, written on purpose.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib

import pytest

from tests.contracts.source import ROOT, Source, sources

# Each package and the packages of ours that it may import.
LAYERS: dict[str, set[str]] = {
    "spec": set(),
    "stats": {"spec"},
    "signals": {"spec", "stats"},
    "observe": {"spec", "stats"},
    "detect": {"spec", "stats"},
    "step": {"spec", "stats", "signals", "observe", "detect"},
    "cost": {"spec", "observe", "step"},
    "evaluate": {"spec", "stats", "signals", "observe", "detect"},
    "host": {"spec"},
    "system": {"spec"},
    "diagnose": {"spec"},
    "respond": {"spec", "diagnose"},
    "present": {"spec", "host", "diagnose"},
}
AT_THE_TOP = {"__init__.py", "__main__.py"}  # the lazy names, and the command line's door

# What is traced into the step: no clock, thread, file or log.
GRAPH_SIDE = ("spec", "stats", "signals", "observe", "detect", "step")
IMPURE = {
    "asyncio", "concurrent", "datetime", "io", "logging", "multiprocessing", "pathlib", "queue", "shutil", "signal",
    "socket", "subprocess", "tempfile", "time", "warnings",
}  # fmt: skip
IMPURE_HOMES = {
    "step/restore.py": {"logging"},  # says once, outside any step, what an older state lacked
}
NO_THREAD_STARTED = {"local", "Lock", "RLock"}  # of `threading`: two traces in two threads must not mix
# Host side: must load without JAX, because a finished run is read on machines that have no use for it.
WITHOUT_JAX = ("host", "system", "diagnose", "respond", "present")
NEVER_JAX = ("spec", "diagnose")
JAX = ("jax", "jaxlib", "flax", "optax", "orbax")

# Foreign libraries and the only files that may import them, at any depth. A pattern must match the whole name.
HOMES: dict[str, str] = {
    "flax.linen": r"observe/linen(_\w+|/\w+)?\.py",
    "flax.core": r"observe/linen(_\w+|/\w+)?\.py",
    "flax.nnx": r"observe/nnx(_\w+|/\w+)?\.py",
    "optax": r"observe/\w+\.py|step/(create|settings|update)\.py",
    "orbax": r"step/restore\.py",
    "tensorstore": r"host/store\.py",
    "clu": r"host/writers/clu\.py|stats/clu\.py",
    "tensorboard": r"host/writers/(protos|record)\.py",
    "google_crc32c": r"host/writers/record\.py",
    "rich": r"present/\w+\.py",
    "tensorflow": r"(?!)",  # only CLU imports it
}
ON_BOTH_SIDES = {"jax", "jaxlib", "numpy", "flax"}  # no single home, but still declared
DISTRIBUTION = {"google_crc32c": "google-crc32c", "orbax": "orbax-checkpoint", "jaxlib": "jax"}


def below(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def report(source: Source, line: int, text: str) -> str:
    return f"probes_jax/{source.name}:{line} {text}"


def check(found: list[str]) -> None:
    assert not found, "\n" + "\n".join(found)


def test_every_package_has_its_rule() -> None:
    layers = {source.layer for source in sources() if source.layer}
    assert layers <= set(LAYERS), f"packages without a rule: {sorted(layers - set(LAYERS))}"
    top = {source.name for source in sources() if not source.layer}
    assert top <= AT_THE_TOP, f"modules that belong in a package: {sorted(top - AT_THE_TOP)}"


def test_packages_import_only_what_lies_below_them() -> None:
    wrong = []
    for source in sources():
        for taken in source.imports:
            if taken.module.startswith("."):
                wrong.append(report(source, taken.line, "a relative import: name the module from probes_jax on"))
            if not source.layer or not below(taken.module, "probes_jax"):
                continue
            layer = taken.dotted.split(".")[1]
            allowed = LAYERS.get(source.layer, set()) | {source.layer, "__version__"}
            if layer not in allowed:
                wrong.append(report(source, taken.line, f"imports {taken.dotted}: {source.layer} may not use {layer}"))
    check(wrong)


def test_the_graph_side_has_no_clock_thread_file_or_log() -> None:
    wrong = []
    for source in sources():
        if source.layer not in GRAPH_SIDE:
            continue
        banned = IMPURE - IMPURE_HOMES.get(source.name, set())
        wrong += [
            report(source, taken.line, f"imports {taken.module} on the graph side")
            for taken in source.imports
            if taken.module.split(".")[0] in banned
        ]
        wrong += [
            report(source, node.lineno, "opens a file or prints on the graph side")
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("open", "print")
        ]
        wrong += [
            report(source, node.lineno, f"uses threading.{node.attr} on the graph side")
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "threading"
            if node.attr not in NO_THREAD_STARTED
        ]
        wrong += [
            report(source, taken.line, "import threading as a whole, so that its uses can be read")
            for taken in source.imports
            if taken.module == "threading" and taken.name
        ]
    check(wrong)


def test_the_host_side_takes_jax_only_inside_functions() -> None:
    wrong = []
    for source in sources():
        for taken in source.imports:
            if taken.for_types or taken.module.split(".")[0] not in JAX:
                continue
            if source.layer in NEVER_JAX or (source.layer in WITHOUT_JAX and taken.at_load):
                wrong.append(report(source, taken.line, f"imports {taken.module}"))
    check(wrong)


def test_host_modules_load_without_jax_or_tensorflow() -> None:
    modules = [
        "probes_jax." + re.sub(r"(/__init__)?\.py$", "", source.name).replace("/", ".")
        for source in sources()
        if source.layer in (*WITHOUT_JAX, "spec") and not source.name.endswith("__main__.py")
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    bad = [m for m in ('jax', 'jaxlib', 'flax', 'optax', 'tensorflow') if m in sys.modules]\n"
        "    assert not bad, f'importing {name} brings in {bad}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("library", sorted(HOMES))
def test_a_foreign_library_is_imported_only_at_home(library: str) -> None:
    check(
        [
            report(source, taken.line, f"imports {library}, whose home is {HOMES[library]}")
            for source in sources()
            for taken in source.imports
            if (below(taken.module, library) or below(taken.dotted, library))
            and not re.fullmatch(HOMES[library], source.name)
        ]
    )


def test_every_foreign_library_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = {re.split(r"[\[<>=~! ]", line)[0] for line in project["dependencies"]}
    foreign = {
        taken.module.split(".")[0]
        for source in sources()
        for taken in source.imports
        if not taken.module.startswith(".")
    } - set(sys.stdlib_module_names) - {"probes_jax"}  # fmt: skip
    unplaced = foreign - {library.split(".")[0] for library in HOMES} - ON_BOTH_SIDES
    assert not unplaced, f"foreign libraries without a home in HOMES: {sorted(unplaced)}"
    missing = {library for library in foreign if DISTRIBUTION.get(library, library) not in declared}
    assert not missing, f"imported, but not among the dependencies of pyproject.toml: {sorted(missing)}"
