"""Two real processes under `jax.distributed`."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap

from probes_jax.host.read_flight import read_flight
from tests.host.recorder_fakes import wait_for

ROOT = pathlib.Path(__file__).parents[2]

SCRIPT = """
import os, signal, sys, time
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
process, port, run = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
import probes_jax as pj
from tests.host.recorder_fakes import LIGHT, FakeReport, buffer_of
mesh = jax.make_mesh((jax.device_count(),), ("data",))

@jax.jit
def step_fn(total, start):
    total = total + start.sum()
    buffer = jax.numpy.asarray(buffer_of(0)).at[1].set(total.astype("uint32"))
    return total, jax.lax.with_sharding_constraint(buffer, NamedSharding(mesh, PartitionSpec()))

ones = jax.make_array_from_callback((2,), NamedSharding(mesh, PartitionSpec("data")), lambda _: np.array([0.5]))
total = jax.device_put(np.float32(-1), NamedSharding(mesh, PartitionSpec()))
recorder = pj.Recorder(run, pj.Plan())
for step in range(30):
    total, buffer = step_fn(total, ones)
    assert not buffer.is_fully_addressable
    recorder.record(FakeReport(buffer, LIGHT))
split = jax.make_array_from_callback(
    (2, LIGHT.size), NamedSharding(mesh, PartitionSpec("data")), lambda _: buffer_of(99)[None])
recorder.record(FakeReport(split, LIGHT))  # L094: refused, not read in part
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
jax.block_until_ready(buffer)
time.sleep(1.0)
assert recorder.health.read == 30 and recorder.health.refused == 1, recorder.health
print("recorded", flush=True)
if process == 1:
    os._exit(3)
time.sleep(60)
"""


def test_flight_records_are_complete_when_a_peer_dies_and_only_process_0_writes(tmp_path):
    """L094, L098."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    outputs = [open(tmp_path / f"out{process}", "w+") for process in range(2)]  # noqa: SIM115
    run = tmp_path / "run"
    both = [
        subprocess.Popen(
            [*command, str(process), str(port), str(run)],
            stdout=outputs[process], stderr=subprocess.STDOUT, env=environment, cwd=tmp_path,
        )
        for process in range(2)
    ]  # fmt: skip
    try:
        status = both[1].wait(120)
        assert status == 3, (tmp_path / "out1").read_text()
        assert wait_for(lambda: "recorded" in (tmp_path / "out0").read_text() or both[0].poll() is not None, 30)
        both[0].send_signal(signal.SIGKILL)
        both[0].wait(30)
        assert "recorded" in (tmp_path / "out0").read_text(), (tmp_path / "out0").read_text()
    finally:
        for process, output in zip(both, outputs):
            process.kill()
            process.wait(30)
            output.close()
    for process in range(2):
        steps = read_flight(run / "flight" / f"process_{process}.bin")
        assert [s.step for s in steps] == list(range(30))
    folders = sorted({path.relative_to(run).parts[0] for path in run.rglob("*") if path.is_file()})
    assert folders in (["events", "flight"], ["entries", "events", "flight", "series"]), "those of process 0"
    events = list(run.rglob("events.out*"))
    assert len(events) == 1 and f".{both[0].pid}." in events[0].name
