"""What is public resolves, is described and is documented; and importing the package costs nothing."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import time
import tomllib

import pytest

import probes_jax
from tests.contracts.source import PACKAGE, ROOT, is_type_checking, sources

PUBLIC = [name for name in probes_jax.__all__ if name != "__version__"]
TREE = ast.parse((PACKAGE / "__init__.py").read_text("utf-8"))


def written_docs() -> str:
    """README and every page but the generated metric reference."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return "\n".join(page.read_text("utf-8") for page in pages if page.exists() and page.name != "metrics.md")


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_resolves_and_says_what_it_is(name: str) -> None:
    value = getattr(probes_jax, name)
    lines = (inspect.getdoc(value) or "").strip().splitlines()
    assert lines, f"probes_jax.{name} has no docstring"
    assert not lines[0].startswith(f"{name}("), f"probes_jax.{name} has only the docstring that dataclass makes"


def test_the_lazy_names_are_the_ones_that_type_checkers_see() -> None:
    seen = {}
    for node in TREE.body:
        if is_type_checking(node):
            for line in node.body:  # pyright: ignore[reportAttributeAccessIssue]
                seen |= {alias.asname or alias.name: line.module for alias in line.names}
    # A subpackage that is also a function: at run time the package itself, which can be called.
    assert seen == probes_jax._HOMES | {"observe": "probes_jax.observe.named"}
    assert sorted(probes_jax.__all__) == sorted(["__version__", *seen])


def test_the_version_is_the_one_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["version"] == probes_jax.__version__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = probes_jax.no_such_name


def test_every_public_name_is_in_the_docs() -> None:
    text = written_docs()
    missing = [name for name in PUBLIC if not re.search(rf"\b{name}\b", text)]
    assert not missing, f"neither README.md nor a page of docs/ mentions {missing}"


def test_every_module_says_what_it_is_for() -> None:
    silent = [source.name for source in sources() if source.tree.body and not ast.get_docstring(source.tree)]
    assert not silent, f"modules without a docstring: {silent}"


def test_public_functions_and_classes_have_docstrings() -> None:
    silent = [
        f"probes_jax/{source.name}:{node.lineno} {node.name}"
        for source in sources()
        for node in source.tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert not silent, "\n" + "\n".join(silent)


def test_importing_the_package_loads_no_library() -> None:
    code = (
        "import sys, probes_jax; print(sorted({'jax', 'numpy', 'flax', 'tensorflow', 'tensorboard'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_command_line_answers_before_jax_could_load() -> None:
    started = time.monotonic()
    command = [sys.executable, "-X", "importtime", "-m", "probes_jax", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-300:]
    assert time.monotonic() - started < 15  # it takes a third of a second; machines under load are slow
    assert "usage" in done.stdout.lower()
    loaded = set(re.findall(r"\|\s+(\w+)$", done.stderr, flags=re.MULTILINE))
    assert not loaded & {"jax", "flax", "tensorflow", "tensorstore"}
