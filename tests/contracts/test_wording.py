"""The tracked files speak of the project alone: no machine's paths, no download addresses, nothing left to do."""

from __future__ import annotations

import pathlib
import re
import subprocess

import pytest

from tests.contracts.source import ROOT

# Written in pieces, so that this file passes its own test.
FORBIDDEN = {
    "a path of one machine": r"(?<![\w.~-])/(?:wor" + r"k|tm" + r"p|roo" + r"t|hom" + r"e/\w+|Users/\w+)(?=/|\b)",
    "a package registry's host": r"py" + r"pi\.org|python" + r"hosted|npm" + r"js\.|registry\.\w+\.|deb\.debian\.",
    "a download address": r"https?://\S+\.(?:whl|zip|tar|tar\.\w+|tgz|deb|gz)\b|git\+https?:",
    "work left for later": r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b",
    "a stub": r"raise NotImplemented" + r"Error\b",
}
TEXT = {".py", ".md", ".toml", ".txt", ".in", ".sh", ".yml", ".yaml", ".cfg", ".json", ""}


def tracked_files() -> list[pathlib.Path]:
    """What is committed or would be; without git, everything outside hidden and build folders."""
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        found = [ROOT / name for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        skipped = re.compile(r"(\.venv|\.git$|\.\w+_cache|__pycache__|build$|dist$|runs$|.*\.egg-info)")
        found = [
            path for path in ROOT.rglob("*") if not any(skipped.match(p) for p in path.relative_to(ROOT).parts)
        ]  # fmt: skip
    return [path for path in found if path.is_file() and path.suffix in TEXT and path.name != "LICENSE"]


def test_there_are_files_to_read() -> None:
    assert ROOT / "pyproject.toml" in tracked_files()


@pytest.mark.parametrize("what", sorted(FORBIDDEN))
def test_no_tracked_file_has(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what])
    found = []
    for path in tracked_files():
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1):
            if match := pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number} {match.group()!r}")
    assert not found, f"{what}:\n" + "\n".join(found[:40])
