"""Two real processes: the values of one, files from process 0 only, and a flight record that outlives a dead peer."""

from __future__ import annotations

import json
import pathlib
import socket
import subprocess
import sys
import time

import jax
import pytest

import probes_jax as pj
from probes_jax.host.read_flight import read_flight
from tests.step.small import GROUPS, loss_fn, make_batch, make_sgd, make_state
from tests.step.test_shard_map import PLAN, TX, Small, compare, trained_step

ROOT = pathlib.Path(__file__).parents[2]


def start(folder, *numbers, module="two_processes"):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return [
        subprocess.Popen(
            [sys.executable, "-m", f"tests.step.{module}", str(index), str(port), str(folder), *map(str, numbers)],
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


@pytest.mark.slow
def test_values_and_files(tmp_path):
    """L094, L096, L098: read locally, reduced by all, written by one."""
    found = finish(tmp_path, start(tmp_path, 4))
    state = make_state(plan=pj.Plan(groups=GROUPS, scan_every=2), tx=make_sgd())
    for seed, report_of_two in enumerate(found):
        state, report = pj.monitored_train_step(state, make_batch(seed))
        for name, value in report.scalars().items():
            if not name.startswith(("loss/shard", "loss/worst")):
                assert report_of_two[name] == pytest.approx(value, rel=3e-4, abs=1e-5), name
    run = tmp_path / "run"
    assert sorted(path.name for path in (run / "flight").iterdir()) == ["process_0.bin", "process_1.bin"]
    assert len(list((run / "events").iterdir())) == 1
    assert pj.open_run(run).series("loss/mean")[0].tolist() == [0, 1, 2, 3]


@pytest.mark.slow
def test_the_flight_record_outlives_a_dead_peer(tmp_path):
    """A dead peer ends a JAX process by abort: what the record held up to a second before must be on disk."""
    processes = start(tmp_path, 1000, 5)
    try:
        processes[1].communicate(timeout=240)
        assert processes[1].returncode == 9
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not (tmp_path / "steps_0").exists():
            time.sleep(0.1)
        time.sleep(1.0)
        processes[0].kill()  # it hangs in a collective; its end must not matter
    finally:
        stop(processes)
    for index in range(2):
        steps = [record.step for record in read_flight(tmp_path / "run" / "flight" / f"process_{index}.bin")]
        assert steps == list(range(6)), index


@pytest.mark.slow
def test_a_monitor_under_shard_map_and_pmap_of_two_processes(tmp_path):
    """There and back, as on one device: taps too are those of all devices of all processes."""
    found = finish(tmp_path, start(tmp_path, module="two_monitors"))
    model, batch = Small(), make_batch(batch=16)
    params = model.init(jax.random.key(0), batch["tokens"])["params"]
    monitor = pj.Monitor.create(tx=TX, params=params, plan=PLAN, model=model, loss_fn=loss_fn, batch=batch)
    wanted = jax.jit(trained_step(scan=True))(params, TX.init(params), monitor, batch)[-1].scalars()
    share = ("grad_act/place", "grad_act/abs_max", "grad_act/finite_abs_max")  # pmap has no types to tell it is whole
    for form, left_out in (("shard_map", ()), ("pmap", share)):
        compare(found[form], wanted, left_out)
        assert sum(name.startswith("loss/shard") for name in found[form]) == 4
        assert len(list((tmp_path / form / "flight").iterdir())) == 2
        assert pj.open_run(tmp_path / form).coverage()[0]["coverage"].points
