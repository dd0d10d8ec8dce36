"""One of two processes of a small job; started by test_two_processes.py.

usage: two_processes.py INDEX PORT FOLDER
"""

from __future__ import annotations

import json
import os
import pathlib
import sys

if __name__ == "__main__":  # whoever collects tests imports this, too
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import probes_jax as pj
from tests.step.small import make_batch, make_sgd, make_state
from tests.step.two_monitors import PLAN, train_with_monitors


def train(index: int, folder: pathlib.Path) -> list[dict[str, float]]:
    """The scalars of four monitored steps."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    place = NamedSharding(mesh, PartitionSpec("data"))

    def batch(seed: int) -> dict[str, jax.Array]:
        whole = make_batch(seed)
        half = slice(4 * index, 4 * index + 4)
        return {key: jax.make_array_from_process_local_data(place, x[half]) for key, x in whole.items()}

    state = make_state(plan=PLAN, tx=make_sgd(), batch=batch(0), shardings=lambda path, shape: PartitionSpec())
    found = []
    with pj.Recorder(folder / "run", PLAN) as recorder:
        for seed in range(4):
            state, report = pj.monitored_train_step(state, batch(seed))
            recorder.record(report)
            found.append(report.scalars())
    return found


def main(index: int, port: int, folder: pathlib.Path) -> None:
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=index)
    found = {"steps": train(index, folder), **train_with_monitors(folder)}
    (folder / f"found_{index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3]))
