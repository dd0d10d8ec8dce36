"""What the probes add to programs compiled for TPUs and GPUs: collectives, bytes, memory, compile time, by family.

Each program is compiled in a process of its own (`benchmarks.compiled`). Where the compiler for a kind of device is not
installed, its rows are left out and said so. `make bench-aot` has them.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.figure import Figure

COMMAND = "make bench-aot"
TOPOLOGIES = ("cpu:8", "v5e:16x16", "v5p:8x8x8", "h100:8")
TINY = ("--width", "256", "--length", "128", "--vocabulary", "1024")
SMALL = ("--width", "1024", "--length", "2048", "--vocabulary", "4096")
# Of the decoder with 12 scanned layers of 2,048, remat, on v5e-256: (examples a device row, length).
SHAPES = ((2, 2048), (4, 2048), (1, 4096))
BYTES = {"light": 0.003, "full, without backward": 0.03, "full": 0.05}


def _inspected(*arguments: str) -> dict[str, Any] | None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.compiled", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        if "ModuleNotFoundError" in done.stderr:
            print(f"left out, no compiler: {' '.join(arguments)}")
            return None
        sys.exit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def _added(found: dict[str, Any], program: str, what: str) -> float:
    return found["programs"][program][what] - found["programs"]["off"][what]


def _figure(title: str, samples: list[float], unit: str, most: float | None) -> Figure:
    value = statistics.median(samples)
    target, met = ("", None) if most is None else (f"<= {most:g}", value <= most)
    return Figure(title, value, min(samples), max(samples), unit, target, met, COMMAND)


def _collectives() -> Iterator[Figure]:
    for layers, how in (("12", ()), ("48", ("--unrolled",))):
        for name in TOPOLOGIES:
            sizes = TINY if how or name == "cpu:8" else SMALL if name == "h100:8" else ()
            found = _inspected(name, "--layers", layers, *how, *sizes)
            if found is None:
                continue
            kind = f"{found['devices']} x {found['device']}, {layers} layers {'unrolled' if how else 'scanned'}"
            for program in ("light", "full"):
                loops = sum(each["looped"] for each in found["exchanges"][program])
                more = float(_added(found, program, "collectives"))
                yield _figure(f"collectives added, {program}, {kind}", [more], "a step", 2)
                yield _figure(f"collectives added inside of loops, {program}, {kind}", [float(loops)], "", 0)
                seconds = [found["programs"][key]["compile_seconds"] for key in ("off", program)]
                most = {"light": None, "full": 1.3 if how else 1.15}[program]
                yield _figure(f"compiling {program} / plain, {kind}", [seconds[1] / seconds[0]], "processor time", most)


def _traffic() -> Iterator[Figure]:
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in BYTES}
    for examples, length in SHAPES:
        shape = ("v5e:16x16", "--examples", str(examples), "--length", str(length))
        found, forward = _inspected(*shape), _inspected(*shape, "--no-backward", "--program", "full")
        if found is None or forward is None:
            return
        for name, source in (("light", found), ("full, without backward", forward), ("full", found)):
            plain, program = source["programs"]["off"], name.split(",")[0]
            seen[name].append(
                tuple(_added(source, program, what) / plain[what] for what in ("bytes", "temporary"))  # pyright: ignore
            )
    where = "12 layers of 2,048 with remat, 256 x TPU v5 lite"
    for name, pairs in seen.items():
        yield _figure(f"bytes added, {name}, {where}", [100 * first for first, _ in pairs], "%", 100 * BYTES[name])
        yield _figure(f"temporary memory added, {name}, {where}", [100 * second for _, second in pairs], "%", 1.0)


def _families() -> Iterator[Figure]:
    for name in ("v5e:16x16", "h100:8"):
        found = _inspected(name, "--by", "family", "--program", "full", *(SMALL if name == "h100:8" else ()))
        if found is None:
            continue
        plain = found["programs"]["off"]
        for family, cost in found["parts"]["full"].items():
            where = f"of the full program, {found['devices']} x {found['device']}"
            yield _figure(f"bytes of {family} {where}", [100 * cost["bytes"] / plain["bytes"]], "%", None)
            yield _figure(f"payload of {family} {where}", [cost["payload"] / 1000], "kB a scan", None)


def measure() -> Iterator[Figure]:
    """All of them; most of an hour on two cores."""
    yield from _collectives()
    yield from _traffic()
    yield from _families()
