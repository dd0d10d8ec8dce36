"""One of two processes of a small job; started by test_two_processes.py.

usage: two_processes.py INDEX PORT FOLDER STEPS [EXIT_STEP]
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time

if __name__ == "__main__":  # whoever collects tests imports this, too
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import probes_jax as pj
from tests.step.small import GROUPS, make_batch, make_sgd, make_state


def main(index: int, port: int, folder: pathlib.Path, steps: int, exit_step: int | None) -> None:
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=index)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    place = NamedSharding(mesh, PartitionSpec("data"))

    def batch(seed: int) -> dict[str, jax.Array]:
        whole = make_batch(seed)
        half = slice(4 * index, 4 * index + 4)
        return {key: jax.make_array_from_process_local_data(place, x[half]) for key, x in whole.items()}

    plan = pj.Plan(groups=GROUPS, scan_every=2)
    state = make_state(plan=plan, tx=make_sgd(), batch=batch(0), shardings=lambda path, shape: PartitionSpec())
    found = []
    with pj.Recorder(folder / "run", plan) as recorder:
        for seed in range(steps):
            state, report = pj.monitored_train_step(state, batch(seed))
            recorder.record(report)
            if exit_step is None:
                found.append(report.scalars())
            else:
                jax.block_until_ready(report.buffer)
                (folder / f"steps_{index}").write_text(f"{seed} {time.time()}")
            if seed == exit_step and index == 1:
                time.sleep(1.0)
                os._exit(9)
    (folder / f"found_{index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    numbers = [int(x) for x in (sys.argv[1], sys.argv[2], *sys.argv[4:])]
    main(numbers[0], numbers[1], pathlib.Path(sys.argv[3]), numbers[2], numbers[3] if len(numbers) > 3 else None)
