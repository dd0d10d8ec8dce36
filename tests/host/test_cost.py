"""What the monitor costs, from times that the tests give."""

import pytest

from probes_jax.host.cost import HostCost, ScanCost


def _shares(cost, steps, pace, record, threads, begin=0.0):
    """Looks after each step of `pace` seconds; `record` and `threads` are the seconds that a step costs."""
    looked = ((step, cost.look(begin + step * pace, step * record, step * threads)) for step in range(steps))
    return [(step, found) for step, found in looked if found is not None]


def test_shares_are_of_the_wall_time_between_steps():
    found = _shares(HostCost(window=60.0), steps=250, pace=0.5, record=0.001, threads=0.01)
    assert [step for step, _ in found] == [120, 240]
    for _, share in found:
        assert (share.record, share.threads) == (pytest.approx(0.002), pytest.approx(0.02))
        assert share.total == pytest.approx(0.022)


def test_a_window_has_ten_steps_at_least():
    found = _shares(HostCost(window=60.0), steps=25, pace=30.0, record=0.3, threads=0.0)
    assert [step for step, _ in found] == [10, 20]
    assert found[0][1].record == pytest.approx(0.01)


def test_a_window_costs_what_was_spent_in_it():
    """A costly minute after a cheap one, and a long pause: none is averaged into the others."""
    cost, now, record, found = HostCost(window=60.0), 0.0, 0.0, []
    for pace, spent, steps in ((1.0, 0.0, 61), (1.0, 0.1, 60), (100.0, 0.1, 10)):
        for _ in range(steps):
            share = cost.look(now, record, 0.0)
            found += [] if share is None else [share.record]
            now, record = now + pace, record + spent
    assert found == pytest.approx([0.0, 0.1, 0.001], abs=2e-3)


def _run(cost, steps, every, light, full, waited=lambda step: True, begin=0):
    """Steps of `light` and `full` seconds; what each step that scans tells."""
    now, told = 100.0, {}
    for step in range(begin, begin + steps):
        program = "full" if step % every == 0 else "light"
        now += full if program == "full" else light
        share = cost.arrived(step, program, now if waited(step) else None)
        if share is not None:
            told[step] = share
    return told


def test_scans_cost_the_difference_of_the_medians_over_all_steps():
    told = _run(ScanCost(), steps=101, every=20, light=0.1, full=0.15)
    assert list(told) == [60, 80, 100], "three scans with a step before each"
    assert told[100] == pytest.approx(0.05 / (20 * 0.1 + 0.05))


def test_one_slow_step_does_not_count():
    cost = ScanCost()
    _run(cost, steps=15, every=20, light=9.0, full=9.0)  # compiling, say
    told = _run(cost, steps=200, every=20, light=0.1, full=0.15, begin=20)
    assert told[200] == pytest.approx(0.05 / (20 * 0.1 + 0.05))


def test_reports_that_nobody_waited_for_say_nothing():
    """They were there before the host looked: the time between them is the host's, not the device's."""
    cost = ScanCost()
    assert _run(cost, steps=200, every=20, light=0.1, full=0.15, waited=lambda step: False) == {}
    told = _run(cost, steps=200, every=20, light=0.1, full=0.15, waited=lambda step: step % 20 != 1, begin=200)
    assert told[380] == pytest.approx(0.05 / (20 * 0.1 + 0.05))
    assert max(cost._light) == pytest.approx(0.1), "none is two steps long"


def test_a_step_after_a_gap_has_no_time():
    cost = ScanCost()
    now = 0.0
    for step in range(0, 400, 2):
        now += 0.1
        assert cost.arrived(step, "full" if step % 20 == 0 else "light", now) is None


@pytest.mark.parametrize(("full", "budget"), [(0.15, 0.02), (0.3, 0.02), (0.11, 0.5), (0.1, 0.02), (0.05, 0.02)])
def test_the_cadence_that_is_named_meets_the_budget_and_no_smaller_one_does(full, budget):
    cost = ScanCost()
    _run(cost, steps=100, every=10, light=0.1, full=full)
    every = cost.scan_every(budget)

    def share(every):
        return (full - 0.1) / ((every - 1) * 0.1 + full)

    assert share(every) <= budget + 1e-9
    assert every == 1 or share(every - 1) > budget - 1e-9
