"""One of two processes of a job with a tiny model; started by `tests.step.peers`.

usage: peer.py INDEX PORT FOLDER JOBS, the jobs as a JSON list of `Options`, done one after the other
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import sys
import threading
import time
from typing import Any

if __name__ == "__main__":  # whoever collects tests imports this, too
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0"
    os.environ["JAX_PLATFORMS"] = "cpu"

import flax.linen as nn
import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import probes_jax as pj
from probes_jax.host.writers.event import EventWriter
from tests.step.small import only

EXAMPLES, WIDTH = 4, 3


@dataclasses.dataclass(frozen=True)
class Options:
    """What this process does beside training.

    Attributes:
        run: Name of the run's folder.
        steps: Steps of the loop.
        plan: Settings of the plan, which measures no family.
        off: Whether PROBES_JAX=off is set.
        width: Width of the model.
        named: Whether the model names a value of its own.
        first_step: The step that the loop begins with, as after a restore.
        slow: Steps before which it sleeps for a second.
        pace: Seconds that each step takes beside; then the loop also waits for each step, and prints when it was done.
        end_at, end_by: At this step it dies, by `exit` (`os._exit`) or `kill` (SIGKILL), or freezes, by `stop`.
        writer: `raise` or `hang`: a writer that does. None: event files.
    """

    run: str = "run"
    steps: int = 8
    plan: dict[str, Any] = dataclasses.field(default_factory=lambda: {"scan_every": 4})
    off: bool = False
    width: int = WIDTH
    named: bool = False
    first_step: int = 0
    slow: tuple[int, ...] = ()
    pace: float = 0.0
    end_at: int | None = None
    end_by: str = "exit"
    writer: str | None = None


class Model(nn.Module):
    width: int
    named: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.width, name="hidden")(x)
        x = pj.observe("between", x) if self.named else x
        return nn.Dense(1, name="head")(x)[..., 0]


class BadWriter:
    """A CLU writer that never writes: every call raises, or never comes back."""

    def __init__(self, how: str) -> None:
        self._how = how

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            if self._how == "hang":
                threading.Event().wait()
            raise OSError(28, "No space left on device")

        return call


def loss_fn(model, batch, rngs):
    return pj.Loss(nll=(model(batch["x"]) - batch["y"]) ** 2)


def make_batch(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {"x": rng.normal(size=(EXAMPLES, 2)).astype(np.float32), "y": rng.normal(size=EXAMPLES).astype(np.float32)}


def make_state(batch: Any, plan: pj.Plan, width: int = WIDTH, named: bool = False) -> pj.TrainState:
    return pj.TrainState.create(
        model=pj.wrap(Model(width, named)), tx=optax.sgd(0.1), loss_fn=loss_fn, plan=plan, batch=batch, rngs=0
    )


def die(how: str) -> None:
    if how == "exit":
        os._exit(9)
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


def train(index: int, folder: pathlib.Path, options: Options, place: NamedSharding) -> dict[str, Any]:
    """One job; what became of it."""
    half = slice(EXAMPLES // 2 * index, EXAMPLES // 2 * (index + 1))

    def batch(step: int) -> dict[str, jax.Array]:
        whole = make_batch(step).items()
        return {name: jax.make_array_from_process_local_data(place, x[half], x.shape) for name, x in whole}

    plan = only(groups=(), **options.plan)
    state = make_state(batch(0), plan, options.width, options.named)
    state = dataclasses.replace(state, step=np.array(options.first_step, np.int32))
    # Not the default one: where TensorFlow is installed, each pair would import it.
    writer = EventWriter(folder / options.run / "events") if index == 0 else None
    writer = writer if options.writer is None else BadWriter(options.writer)
    reports, calls = [], []
    with pj.Recorder(folder / options.run, plan, writer=writer, patience=1.0, flush_every=5.0) as recorder:
        for step in range(options.first_step, options.first_step + options.steps):
            if step in options.slow:
                time.sleep(1.0)
            state, report = pj.monitored_train_step(state, batch(step))
            began = time.monotonic()
            recorder.record(report)
            calls.append(time.monotonic() - began)
            reports.append(report)
            if options.pace:
                time.sleep(options.pace)
                jax.block_until_ready(report.buffer)
                print(f"step {step} {time.time()}", flush=True)
            if step == options.end_at:
                die(options.end_by)
    return {
        "losses": [report.scalars().get("loss/mean") for report in reports],
        "programs": [report.layout.program for report in reports],
        "slowest_record": max(calls),
        "health": dataclasses.asdict(recorder.health),
    }


def main(index: int, port: int, folder: pathlib.Path, jobs: list[Options]) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"localhost:{port}"
    jax.distributed.initialize(address, num_processes=2, process_id=index, heartbeat_timeout_seconds=10)
    place = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    found = []
    for options in jobs:
        os.environ["PROBES_JAX"] = "off" if options.off else "on"
        try:
            found.append(train(index, folder, options, place))
        except ValueError as error:
            found.append({"error": str(error)})
    (folder / f"found_{index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(
        int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3]),
        [Options(**options) for options in json.loads(sys.argv[4])],
    )  # fmt: skip
