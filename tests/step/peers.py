"""Starts two processes of `tests.step.peer`, and tells what became of them."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]


@dataclasses.dataclass
class Peer:
    """One process and the file that it prints into."""

    process: subprocess.Popen
    log: pathlib.Path
    results: pathlib.Path

    @property
    def output(self) -> str:
        return self.log.read_text()

    def ends(self, seconds: float = 180.0) -> int:
        return self.process.wait(seconds)

    def found(self) -> list[dict[str, Any]]:
        """What became of each job, once all of them are done."""
        assert self.ends() == 0, self.output[-3000:]
        return json.loads(self.results.read_text())

    def steps(self) -> dict[int, float]:
        """When each step was done, by the process's own word."""
        words = [line.split() for line in self.output.splitlines() if line.startswith("step ")]
        return {int(step): float(at) for _, step, at in words}


@contextmanager
def two_peers(folder: pathlib.Path, *jobs: list[dict[str, Any]]) -> Iterator[list[Peer]]:
    """Both processes, with the jobs of each (options of `tests.step.peer`); killed at the end."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    peers = []
    for index, own in enumerate(jobs):
        command = [sys.executable, "-m", "tests.step.peer", str(index), str(port), str(folder), json.dumps(own)]
        with open(folder / f"out_{index}", "w") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        peers.append(Peer(process, folder / f"out_{index}", folder / f"found_{index}.json"))
    try:
        yield peers
    finally:
        for peer in peers:
            peer.process.kill()
            peer.process.wait(30)
