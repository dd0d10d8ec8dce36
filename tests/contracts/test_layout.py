"""The tests lie where the code lies, and no file outgrows its idea."""

from __future__ import annotations

import pathlib

from tests.contracts.source import PACKAGE, ROOT, sources

TESTS = ROOT / "tests"
# Folders that test something other than one package: rules over the whole, and the programs beside the package.
ACROSS = {"contracts", "examples", "benchmarks", "models"}
LONGEST = 400


def test_every_test_file_lies_beside_a_package() -> None:
    lost = []
    for path in sorted(TESTS.rglob("test_*.py")):
        folder = path.parent.relative_to(TESTS)
        top = folder.parts[0] if folder.parts else ""
        if top not in ACROSS and not (top and (PACKAGE / folder).is_dir()):
            lost.append(path.relative_to(ROOT).as_posix())
    assert not lost, f"tests whose folder mirrors no package: {lost}"


def test_every_package_has_tests() -> None:
    packages = {source.layer for source in sources() if source.layer}
    bare = [name for name in sorted(packages) if not any((TESTS / name).rglob("test_*.py"))]
    assert not bare, f"packages without a test: {bare}"


def test_every_test_folder_is_a_package() -> None:
    """Two files of one name in two folders are two modules only then."""
    folders = {path.parent for path in TESTS.rglob("test_*.py")}
    bare = [folder.relative_to(ROOT).as_posix() for folder in sorted(folders) if not (folder / "__init__.py").exists()]
    assert not bare, f"test folders without __init__.py: {bare}"


def test_every_package_folder_is_a_package() -> None:
    """A folder without `__init__.py` would be left out of the built wheel."""
    folders = {source.path.parent for source in sources()}
    bare = [folder.relative_to(ROOT).as_posix() for folder in sorted(folders) if not (folder / "__init__.py").exists()]
    assert not bare, f"package folders without __init__.py: {bare}"


def test_no_file_outgrows_its_idea() -> None:
    def lines(path: pathlib.Path) -> int:
        return len(path.read_text("utf-8").splitlines())

    long = {source.name: lines(source.path) for source in sources() if lines(source.path) > LONGEST}
    assert not long, f"modules of more than {LONGEST} lines: {long}"
