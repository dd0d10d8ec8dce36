"""Two real processes: the values of one, and files from process 0 only."""

from __future__ import annotations

import json
import pathlib
import socket
import subprocess
import sys

import jax
import pytest

import probes_jax as pj
from tests.step.small import loss_fn, make_batch, make_sgd, make_state
from tests.step.test_shard_map import TX, Small, compare, trained_step
from tests.step.two_monitors import PLAN

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]


def start(folder, module):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return [
        subprocess.Popen(
            [sys.executable, "-m", f"tests.step.{module}", str(index), str(port), str(folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]


def stop(processes):
    for process in processes:
        process.kill()
        process.communicate()


def finish(folder, processes):
    """What both say that they found, once they have ended."""
    try:
        for process in processes:
            output, _ = process.communicate(timeout=240)
            assert process.returncode == 0, output[-3000:]
    finally:
        stop(processes)
    found = [json.loads((folder / f"found_{index}.json").read_text()) for index in range(2)]
    assert found[0] == found[1]
    return found[0]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The folder of one pair of processes, and what both found."""
    folder = tmp_path_factory.mktemp("two")
    return folder, finish(folder, start(folder, "two_processes"))


def test_values_and_files(both):
    """L094, L096, L098: read locally, reduced by all, written by one."""
    folder, found = both
    state = make_state(plan=PLAN, tx=make_sgd())
    for seed, report_of_two in enumerate(found["steps"]):
        state, report = pj.monitored_train_step(state, make_batch(seed))
        for name, value in report.scalars().items():
            if not name.startswith(("loss/shard", "loss/worst")):
                assert report_of_two[name] == pytest.approx(value, rel=3e-4, abs=1e-5), name
    run = folder / "run"
    assert sorted(path.name for path in (run / "flight").iterdir()) == ["process_0.bin", "process_1.bin"]
    assert len(list((run / "events").iterdir())) == 1
    assert pj.open_run(run).series("loss/mean")[0].tolist() == [0, 1, 2, 3]


def test_a_monitor_under_shard_map_and_pmap_of_two_processes(both):
    """There and back, as on one device: taps too are those of all devices of all processes."""
    folder, found = both
    model, batch = Small(), make_batch(batch=16)
    params = model.init(jax.random.key(0), batch["tokens"])["params"]
    monitor = pj.Monitor.create(tx=TX, params=params, plan=PLAN, model=model, loss_fn=loss_fn, batch=batch)
    wanted = jax.jit(trained_step(scan=True))(params, TX.init(params), monitor, batch)[-1].scalars()
    share = ("grad_act/place", "grad_act/abs_max", "grad_act/finite_abs_max")  # pmap has no types to tell it is whole
    for form, left_out in (("shard_map", ()), ("pmap", share)):
        compare(found[form], wanted, left_out)
        assert sum(name.startswith("loss/shard") for name in found[form]) == 4
        assert len(list((folder / form / "flight").iterdir())) == 2
        assert pj.open_run(folder / form).coverage()[0]["coverage"].points
