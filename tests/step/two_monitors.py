"""A user's own step that measures under `shard_map` and `pmap`, on each of two processes of test_two_processes.py."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import probes_jax as pj
from tests.step.small import loss_fn, make_batch, only
from tests.step.test_shard_map import AXIS, TX, Small, trained_step

# What is cut over the processes, what each holds whole, and the tokens.
PLAN = only("act", "grad_act", "grad", "logits", scan_every=2)


def everywhere(tree, mesh, spec):
    """The same arrays on every process, as arrays of all of them."""

    def place(x):
        return jax.make_array_from_callback(np.shape(x), NamedSharding(mesh, spec), lambda index: np.asarray(x)[index])

    return jax.tree.map(place, tree)


def under_shard_map(params, batch):
    mesh = Mesh(np.array(jax.devices()), AXIS)
    params, opt_state, batch = everywhere(params, mesh, P()), TX.init(params), everywhere(batch, mesh, P("data"))
    made = dict(tx=TX, params=params, plan=PLAN, model=Small(), loss_fn=loss_fn, batch=batch, axis_names=AXIS)
    specs = (P(), P(), P(), P("data"))
    step = jax.jit(jax.shard_map(trained_step(scan=True), mesh=mesh, in_specs=specs, out_specs=P()))
    return step(params, everywhere(opt_state, mesh, P()), pj.Monitor.create(**made), batch)[-1]


def under_pmap(params, batch):
    count, index = jax.local_device_count(), jax.process_index()
    own = {key: np.split(x, jax.device_count())[count * index : count * (index + 1)] for key, x in batch.items()}
    example = {key: parts[0] for key, parts in own.items()}
    made = dict(tx=TX, params=params, plan=PLAN, model=Small(), loss_fn=loss_fn, batch=example, axis_names=AXIS)
    state = (params, TX.init(params), pj.Monitor.create(**made))
    state = jax.tree.map(lambda x: np.broadcast_to(x, (count, *np.shape(x))), state)
    step = jax.pmap(trained_step(scan=True), axis_name="data", out_axes=(0, 0, 0, None))
    return step(*state, {key: np.stack(parts) for key, parts in own.items()})[-1]


def train_with_monitors(folder: pathlib.Path) -> dict[str, Any]:
    """The scalars of one step in each form."""
    batch = make_batch(batch=16)
    params = jax.tree.map(np.array, Small().init(jax.random.key(0), batch["tokens"])["params"])
    found = {}
    for form, run in (("shard_map", under_shard_map), ("pmap", under_pmap)):
        report = run(params, batch)
        with pj.Recorder(folder / form, PLAN) as recorder:
            recorder.record(report)
        assert recorder.health.ok, recorder.health
        found[form] = report.scalars()
    return found
