"""What the package's source says: its modules and the imports in them, read without running anything."""

from __future__ import annotations

import ast
import dataclasses
import functools
import pathlib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "probes_jax"


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported name: `module` as written, `name` what is taken from it, and when it runs."""

    module: str
    name: str
    line: int
    at_load: bool  # at module level, so that importing the module runs it
    for_types: bool  # under TYPE_CHECKING: never runs

    @property
    def dotted(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


@dataclasses.dataclass(frozen=True)
class Source:
    """One module of the package."""

    path: pathlib.Path
    tree: ast.Module

    @property
    def name(self) -> str:
        """Its path below the package, with slashes: `host/recorder.py`."""
        return self.path.relative_to(PACKAGE).as_posix()

    @property
    def layer(self) -> str:
        """The top package that it belongs to; empty for the modules that lie at the top."""
        return self.name.split("/")[0] if "/" in self.name else ""

    @property
    def imports(self) -> list[Import]:
        return list(_imports(self.tree, at_load=True, for_types=False))


@functools.cache
def sources() -> tuple[Source, ...]:
    """Every module of the package, in the order of their paths."""
    return tuple(Source(path, ast.parse(path.read_text("utf-8"), str(path))) for path in sorted(PACKAGE.rglob("*.py")))


def is_type_checking(node: ast.AST) -> bool:
    """Whether `node` is the block that only type checkers read."""
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _imports(node: ast.AST, at_load: bool, for_types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, "", child.lineno, at_load, for_types) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            module = "." * child.level + (child.module or "")
            yield from (Import(module, alias.name, child.lineno, at_load, for_types) for alias in child.names)
        else:
            runs_later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            types_only = for_types or is_type_checking(child)
            yield from _imports(child, at_load and not runs_later and not types_only, types_only)
