"""Two real processes: a slow peer, a dead one, a dead writer, and peers that do not run the same program."""

from __future__ import annotations

import time

import pytest

import probes_jax as pj
from probes_jax.present.unusual import find_unusual
from tests.step.peer import make_batch, make_state
from tests.step.peers import two_peers

STEPS, SCAN_EVERY = 12, 4
JOB = {"steps": STEPS, "plan": {"scan_every": SCAN_EVERY}}


def losses_of_one_process():
    state = make_state(make_batch(0), pj.Plan(scan_every=SCAN_EVERY))
    found = []
    for step in range(STEPS):
        state, report = pj.monitored_train_step(state, make_batch(step))
        found.append(report.scalars()["loss/mean"])
    return found


@pytest.mark.slow
def test_a_slow_peer_holds_up_no_recorder(tmp_path):
    """L096, L152: process 1 sleeps for a second before three steps; everybody takes the same steps."""
    with two_peers(tmp_path, [JOB], [{**JOB, "slow": [3, 4, 9]}]) as peers:
        found = [peer.found()[0] for peer in peers]
    for process in range(2):
        assert found[process]["losses"] == pytest.approx(losses_of_one_process(), rel=1e-5)
        assert found[process]["programs"] == [("light", "full")[step % SCAN_EVERY == 0] for step in range(STEPS)]
        assert found[process]["slowest_record"] < 0.5, "a step waits for a second, a record for nobody"
        assert found[process]["health"]["read"] == STEPS
    run = pj.open_run(tmp_path / "run")
    assert [[s.step for s in run.flight(process)] for process in range(2)] == [list(range(STEPS))] * 2
    assert run.series("loss/mean")[1].tolist() == pytest.approx(found[0]["losses"])
    assert (run.processes(), run.lacking()) == ([0, 1], {})


@pytest.mark.slow
@pytest.mark.parametrize(("dead", "how"), [(1, "exit"), (0, "kill"), (1, "stop")])
def test_a_dead_peer_takes_nothing_along(tmp_path, dead, how):
    """L087: what was done a second before the end of either process can be read; nothing but a kill ends the peer.

    `stop` freezes the peer: then the other one hangs in a collective until JAX aborts it.
    """
    job = {"steps": 500, "plan": {"scan_every": 10}, "pace": 0.05}
    jobs = [[job], [job]]
    jobs[dead] = [{**job, "end_at": 30, "end_by": how}]
    with two_peers(tmp_path, *jobs) as peers:
        survivor = peers[1 - dead]
        assert survivor.ends() != 0
        ended = [time.time()] * 2
        steps = [peer.steps() for peer in peers]
    run = pj.open_run(tmp_path / "run")
    ended[dead] = steps[dead][30] if how != "stop" else ended[dead]
    for process in range(2):
        kept = [s.step for s in run.flight(process)]
        due = [step for step, at in steps[process].items() if at < ended[process] - 1.0]
        assert len(due) >= 10, peers[process].output[-3000:]
        assert kept == list(range(len(kept))) and set(due) <= set(kept), process
    if dead == 1:  # process 0 also writes the run's own files
        saved = run.series("loss/mean")[0].tolist()
        assert {step for step, at in steps[0].items() if at < ended[0] - 1.0} <= set(saved)
    assert None not in run.lacking().values()
    find_unusual(run)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "hang"])
def test_a_dead_writer_on_process_0_stops_nobody(tmp_path, how):
    """L091, L096: training goes on, what was dropped is counted and logged, and both processes end."""
    with two_peers(tmp_path, [{**JOB, "writer": how}], [JOB]) as peers:
        found = [peer.found()[0] for peer in peers]
        output = peers[0].output
    assert found[0]["losses"] == found[1]["losses"] == pytest.approx(losses_of_one_process(), rel=1e-5)
    sinks = found[0]["health"]["sinks"]
    assert sinks["writer"]["dropped"] == STEPS and sinks["writer"]["written"] == 0
    assert sinks["flight"]["written"] == sinks["store"]["written"] == STEPS
    line = "'writer' failed (OSError" if how == "raise" else f"hangs and is left behind; {STEPS} readings are dropped"
    assert line in output
    assert set(found[1]["health"]["sinks"]) == {"flight"}
    assert pj.open_run(tmp_path / "run").series("loss/mean")[0].tolist() == list(range(STEPS))


@pytest.mark.slow
def test_peers_that_would_run_different_programs_are_told_which_and_why(tmp_path):
    """L096: what would be a deadlock, or a report of two programs, is an error on every process."""
    unlike = [
        ({"plan": {"scan_every": 3}}, "process 1 has Plan scan_every: 3 (process 0: 4)"),
        ({"off": True}, "process 1 has PROBES_JAX: 'off' (process 0: 'on')"),
        ({"width": 5}, "process 1 has parameter['head']['kernel']: float32[5, 1] (process 0: float32[3, 1])"),
        ({"named": True}, "process 1 has point between: (4, 3) (process 0: none)"),
        ({"first_step": 8}, "process 1 has step: 8 (process 0: 0)"),
    ]
    jobs = [JOB] * (len(unlike) + 1), [*({**JOB, **change} for change, _ in unlike), JOB]
    with two_peers(tmp_path, *jobs) as peers:
        found = [peer.found() for peer in peers]
    for process in range(2):
        for (_, text), told in zip(unlike, found[process]):
            assert text in told.get("error", "no error"), process
    assert found[0][-1]["losses"] == pytest.approx(losses_of_one_process(), rel=1e-5), "and then all is well"
