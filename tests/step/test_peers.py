"""Two real processes: a slow peer, a dead one, a dead writer, and peers that do not run the same program."""

from __future__ import annotations

import contextlib
import functools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import probes_jax as pj
from probes_jax.present.unusual import find_unusual
from tests.step.peer import make_batch, make_state
from tests.step.peers import two_peers
from tests.step.small import only

pytestmark = pytest.mark.slow

STEPS, SCAN_EVERY = 12, 4
JOB = {"steps": STEPS, "plan": {"scan_every": SCAN_EVERY}}
WRITERS = ("raise", "hang")
DEAD = ((1, "exit"), (0, "kill"), (1, "stop"))
UNLIKE = (
    ({"plan": {"scan_every": 3}}, "process 1 has Plan scan_every: 3 (process 0: 4)"),
    ({"off": True}, "process 1 has PROBES_JAX: 'off' (process 0: 'on')"),
    ({"width": 5}, "process 1 has parameter['head']['kernel']: float32[5, 1] (process 0: float32[3, 1])"),
    ({"named": True}, "process 1 has point between: (4, 3) (process 0: none)"),
    ({"first_step": 8}, "process 1 has step: 8 (process 0: 0)"),
)


@functools.cache
def losses_of_one_process():
    state = make_state(make_batch(0), only(groups=(), scan_every=SCAN_EVERY))
    found = []
    for step in range(STEPS):
        state, report = pj.monitored_train_step(state, make_batch(step))
        found.append(report.scalars()["loss/mean"])
    return found


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """One pair of processes does all that ends well, job after job: the folder, what became of each, the output."""
    folder = tmp_path_factory.mktemp("jobs")
    both = {"slow": ({}, {"slow": [3, 4, 9]}), **{how: ({"writer": how}, {}) for how in WRITERS}}
    both |= {f"unlike_{index}": ({}, change) for index, (change, _) in enumerate(UNLIKE)}
    both["alike"] = ({}, {})
    sides = [[{**JOB, "run": run, **pair[index]} for run, pair in both.items()] for index in range(2)]
    with two_peers(folder, *sides) as peers:
        found = [dict(zip(both, peer.found(), strict=True)) for peer in peers]
        return folder, found, peers[0].output


def test_a_slow_peer_holds_up_no_recorder(jobs):
    """L096, L152: process 1 sleeps for a second before three steps; everybody takes the same steps."""
    folder, both, _ = jobs
    found = [one["slow"] for one in both]
    for process in range(2):
        assert found[process]["losses"] == pytest.approx(losses_of_one_process(), rel=1e-5)
        assert found[process]["programs"] == [("light", "full")[step % SCAN_EVERY == 0] for step in range(STEPS)]
        assert found[process]["slowest_record"] < 0.5, "a step waits for a second, a record for nobody"
        assert found[process]["health"]["read"] == STEPS
    run = pj.open_run(folder / "slow")
    assert [[s.step for s in run.flight(process)] for process in range(2)] == [list(range(STEPS))] * 2
    assert run.series("loss/mean")[1].tolist() == pytest.approx(found[0]["losses"])
    assert (run.processes(), run.lacking()) == ([0, 1], {})


@pytest.fixture(scope="module")
def dead(tmp_path_factory):
    """Pairs of which one process dies, all at once: by case its folder, its peers, how and when the other ended."""
    job = {"steps": 500, "plan": {"scan_every": 10}, "pace": 0.05}
    folders = [tmp_path_factory.mktemp("dead") for _ in DEAD]

    def end(peer):
        return peer.ends(), time.time()

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(DEAD)) as pool:
        pairs = []
        for folder, (index, how) in zip(folders, DEAD):
            sides = [[job], [job]]
            sides[index] = [{**job, "end_at": 30, "end_by": how}]
            pairs.append(stack.enter_context(two_peers(folder, *sides)))
        ends = pool.map(end, [pair[1 - index] for pair, (index, _) in zip(pairs, DEAD)])
        return dict(zip(DEAD, zip(folders, pairs, ends)))


@pytest.mark.parametrize(("index", "how"), DEAD)
def test_a_dead_peer_takes_nothing_along(dead, index, how):
    """L087: what was done a second before the end of either process can be read; nothing but a kill ends the peer.

    `stop` freezes the peer: then the other one hangs in a collective until JAX aborts it.
    """
    folder, peers, (status, at) = dead[index, how]
    assert status != 0
    ended = [at] * 2
    steps = [peer.steps() for peer in peers]
    run = pj.open_run(folder / "run")
    ended[index] = steps[index][30] if how != "stop" else ended[index]
    for process in range(2):
        kept = [s.step for s in run.flight(process)]
        due = [step for step, at in steps[process].items() if at < ended[process] - 1.0]
        assert len(due) >= 10, peers[process].output[-3000:]
        assert kept == list(range(len(kept))) and set(due) <= set(kept), process
    if index == 1:  # process 0 also writes the run's own files
        saved = run.series("loss/mean")[0].tolist()
        assert {step for step, at in steps[0].items() if at < ended[0] - 1.0} <= set(saved)
    assert None not in run.lacking().values()
    find_unusual(run)


@pytest.mark.parametrize("how", WRITERS)
def test_a_dead_writer_on_process_0_stops_nobody(jobs, how):
    """L091, L096: training goes on, what was dropped is counted and logged, and both processes end."""
    folder, both, output = jobs
    found = [one[how] for one in both]
    assert found[0]["losses"] == found[1]["losses"] == pytest.approx(losses_of_one_process(), rel=1e-5)
    sinks = found[0]["health"]["sinks"]
    assert sinks["writer"]["dropped"] == STEPS and sinks["writer"]["written"] == 0
    assert sinks["flight"]["written"] == sinks["store"]["written"] == STEPS
    line = "'writer' failed (OSError" if how == "raise" else f"hangs and is left behind; {STEPS} readings are dropped"
    assert line in output
    assert set(found[1]["health"]["sinks"]) == {"flight"}
    assert pj.open_run(folder / how).series("loss/mean")[0].tolist() == list(range(STEPS))


def test_peers_that_would_run_different_programs_are_told_which_and_why(jobs):
    """L096: what would be a deadlock, or a report of two programs, is an error on every process."""
    _, found, _ = jobs
    for process in range(2):
        for index, (_, text) in enumerate(UNLIKE):
            assert text in found[process][f"unlike_{index}"].get("error", "no error"), process
    assert found[0]["alike"]["losses"] == pytest.approx(losses_of_one_process(), rel=1e-5), "and then all is well"
