"""One of two processes of which the second holds a wrong copy; started by test_divergence.py.

usage: two_copies.py INDEX PORT FOLDER
"""

from __future__ import annotations

import dataclasses
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
from tests.step.copies import flip, with_copy
from tests.step.small import make_batch, make_sgd, make_state, only


def main(index: int, port: int, folder: pathlib.Path) -> None:
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=index)
    place = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    half = slice(4 * index, 4 * index + 4)
    batch = {k: jax.make_array_from_process_local_data(place, x[half]) for k, x in make_batch(0).items()}
    plan = only("replica", scan_every=1)
    state = make_state(
        plan=plan, tx=make_sgd(), batch=batch, shardings=lambda path, shape: PartitionSpec(), donate=False
    )
    params = jax.tree.map(lambda x: x, state.params)
    wrong = jax.devices()[3].id  # of process 1
    params["head"]["bias"] = with_copy(params["head"]["bias"], wrong, flip)
    broken = dataclasses.replace(state, params=params)
    reports = [pj.monitored_train_step(one, batch)[1] for one in (state, broken)]
    divergences = pj.find_divergence(broken)
    found = {
        "healthy": [str(one) for one in pj.find_divergence(state)],
        "broken": [[one.name, one.shard, len(one.devices), one.copies] for one in divergences],
        "device": divergences[0].devices[0],
        "counts": [report.scalars()["replica/divergent_tensors"] for report in reports],
        "which": reports[1].readings()[0].which["replica/divergent_tensors"],
    }
    (folder / f"found_{index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3]))
