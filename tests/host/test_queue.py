import itertools
import sys
import threading
import time

import numpy as np
import pytest

from probes_jax.host.backlog import ITEM_BYTES, STOP, Backlog, Pending, Ticket
from probes_jax.host.priority import shed
from probes_jax.host.queue import OBJECT_COST, ReadingsQueue, cost_of
from probes_jax.spec.metric import Priority
from probes_jax.spec.online import priority_of
from probes_jax.spec.readings import Readings
from tests.host.recorder_fakes import FULL, LIGHT, DeviceBuffer, buffer_of, full_layout

P0_NAMES = ("loss/mean", "grad/norm")
FULL_NAMES = (*P0_NAMES, *(f"act/block[{i}]/rms" for i in range(20)))


def _readings(step, names=FULL_NAMES):
    return Readings(step, "full", names, np.arange(len(names)) + float(step), np.ones(len(names), bool))


def _drain(queue):
    out = []
    while (readings := queue.get(0)) is not None:
        out.append(readings)
    return out


def test_priorities_come_from_the_registry_and_unknown_names_are_p1():
    assert priority_of("loss/mean") == Priority.P0
    assert priority_of("act/block[3]/mlp/rms") == Priority.P1
    assert priority_of("nobody/knows/this") == Priority.P1


def test_shed_keeps_values_presence_and_labels_of_what_stays():
    names = ("act/x/rms", "loss/worst_shard", "grad/norm")
    whole = Readings(
        7, "full", names, np.array([1.0, np.nan, 3.0]), np.array([True, True, False]),
        {"loss/worst_shard": "loss/shard[2]", "act/x/rms": "no P0"}, 12.5,
    )  # fmt: skip
    less = shed(whole, Priority.P0)
    assert less.names == ("loss/worst_shard", "grad/norm")
    assert np.isnan(less.values[0]) and less.present.tolist() == [True, False]
    assert less.which == {"loss/worst_shard": "loss/shard[2]"} and (less.step, less.wall_time) == (7, 12.5)
    assert shed(whole, Priority.P0).names is less.names, "one tuple per layout, so that sinks can cache on it"
    assert shed(less, Priority.P0) is less


def test_p2_goes_before_p1_and_p1_before_p0(monkeypatch):
    def priority(name):
        return {"loss": Priority.P0, "act": Priority.P1, "deep": Priority.P2}[name.split("/")[0]]

    monkeypatch.setattr("probes_jax.host.priority.priority_of", priority)
    names = ("loss/mean", *(f"act/{i}" for i in range(40)), *(f"deep/{i}" for i in range(40)))
    queue = ReadingsQueue(6 * (len(names) + OBJECT_COST))
    sizes = []
    for step in range(60):
        queue.put(_readings(step, names))
        sizes.append([len(r.names) for r, _ in queue._items])
    for row in sizes:
        assert row == sorted(row), "the older, the less"
    assert {size for row in sizes for size in row} == {1, 41, 81}
    for before, after in itertools.pairwise(sizes):
        if after.count(1) > before.count(1):
            assert 81 not in after[:-1], "P1 goes only when no P2 is left"
    first_drop = next(i for i, row in enumerate(sizes) if len(row) <= i)
    assert set(sizes[first_drop][:-1]) == {1}, "a reading goes only when P0 is all that is left"
    assert queue.dropped + len(queue) == 60


def test_full_queue_degrades_the_oldest_to_p0_and_keeps_the_newest_whole():
    capacity = 10 * (len(FULL_NAMES) + OBJECT_COST)
    queue = ReadingsQueue(capacity)
    for step in range(12):
        queue.put(_readings(step))
    found = _drain(queue)
    assert [r.step for r in found] == list(range(12)), "P0 of every step is still there"
    assert found[0].names == P0_NAMES and found[-1].names is FULL_NAMES
    assert found[0].values.tolist() == [0.0, 1.0]
    assert queue.thinned == sum(r.names == P0_NAMES for r in found) > 0 and queue.dropped == 0


def test_memory_is_bounded_whatever_is_put_and_every_loss_is_counted():
    queue = ReadingsQueue(2000)
    for step in range(5000):
        queue.put(_readings(step))
        assert sum(cost_of(r) for r, _ in queue._items) == queue._cost <= 2000
    found = _drain(queue)
    assert len(found) + queue.dropped == queue.added == 5000
    assert queue.thinned == sum(len(r.names) < len(FULL_NAMES) for r in found)
    assert [r.step for r in found] == list(range(5000 - len(found), 5000)), "the newest stay"


def test_a_reading_larger_than_the_queue_is_kept_while_it_is_the_newest():
    queue = ReadingsQueue(4)
    queue.put(_readings(0))
    queue.put(_readings(1))
    (newest,) = _drain(queue)
    assert newest.step == 1 and newest.names is FULL_NAMES


def test_shedding_is_linear_in_the_number_of_readings():
    queue = ReadingsQueue(100_000)
    start = time.perf_counter()
    for step in range(20_000):
        queue.put(_readings(step, P0_NAMES))
    assert time.perf_counter() - start < 20  # one pass per put would take minutes


def test_get_waits_for_a_reading_and_wake_ends_the_wait():
    queue = ReadingsQueue(100)
    threading.Timer(0.05, lambda: queue.put(_readings(1))).start()
    assert queue.get(30).step == 1
    threading.Timer(0.05, queue.wake).start()
    assert queue.get(30) is None
    queue.wake()  # before the wait: not lost
    start = time.monotonic()
    assert queue.get(30) is None
    queue.wake()
    queue.pause(30)
    assert time.monotonic() - start < 20
    start = time.monotonic()
    queue.pause(0.1)  # a wake ends one wait, not all
    assert queue.get(0.1) is None and time.monotonic() - start > 0.15


def test_capacity_is_checked():
    with pytest.raises(ValueError, match="capacity"):
        ReadingsQueue(0)
    with pytest.raises(ValueError, match="queue_size"):
        Backlog(0, 1)


def _pending(number, layout=LIGHT, ready=True):
    buffer = DeviceBuffer(buffer_of(number, layout), None if ready else threading.Event())
    return Pending(buffer, layout, None, 0.0, number, buffer.nbytes)


def _held(backlog):
    """Bytes that the backlog holds, by its own items."""
    items = [*backlog._whole.values(), *backlog._thin.values()]
    return sum(item.nbytes for item in items) + ITEM_BYTES * backlog.waiting


def test_a_full_backlog_thins_the_oldest_in_its_place():
    backlog = Backlog(3, 1 << 20)
    for number in range(8):
        backlog.put(_pending(number, FULL if number % 2 else LIGHT))
    assert (backlog.waiting, backlog.thinned, backlog.lost, backlog.pressure) == (8, 5, 0, 1.0)
    found = [backlog.get() for _ in range(8)]
    assert [item.number for item in found] == list(range(8))
    assert [item.thinned for item in found] == [True] * 5 + [False] * 3
    assert found[1].nbytes < found[7].nbytes / 2 and backlog.pressure == 0


def test_a_report_that_the_device_has_not_delivered_is_lost_and_said_to_be():
    backlog, lost = Backlog(3, 1 << 20), []
    backlog.on_lost = lambda: lost.append(1)
    for number in range(2):
        backlog.put(_pending(number))
    for number in range(2, 9):
        backlog.put(_pending(number, ready=False))
    assert (backlog.lost, len(lost), backlog.thinned) == (4, 4, 2)
    assert [backlog.get().number for _ in range(5)] == [0, 1, 6, 7, 8]
    assert backlog.waiting == 0 and backlog.pressure == 0


def test_backlog_is_bounded_in_bytes_too():
    size = 4 * LIGHT.size + ITEM_BYTES
    backlog = Backlog(1000, 10 * size)
    for number in range(50):
        backlog.put(_pending(number))
        assert _held(backlog) == backlog._held <= 10 * size
    assert (backlog.waiting, backlog.lost) == (10, 40) and 0.9 < backlog.pressure <= 1
    assert backlog.thinned == 9, "only those that are still to be read"
    backlog.put(_pending(99, full_layout(1000)))  # larger than all: alone
    assert backlog.waiting == 1 and _held(backlog) == backlog._held


def test_backlog_never_loses_a_message():
    backlog = Backlog(2, 2 * (4 * LIGHT.size + ITEM_BYTES))
    ticket = Ticket()
    backlog.send(ticket)
    for number in range(4):
        backlog.put(_pending(number))
    backlog.send(STOP)
    items = [backlog.get() for _ in range(backlog.waiting)]
    assert ticket in items and items[-1] is STOP and backlog.lost


def test_a_ticket_behind_thinned_reports_stays_behind_them():
    backlog, ticket = Backlog(1, 1 << 20), Ticket()
    for number in range(3):
        backlog.put(_pending(number))
    backlog.send(ticket)
    backlog.put(_pending(3))
    assert [item if item is ticket else item.number for item in (backlog.get() for _ in range(5))] == [
        0,
        1,
        2,
        ticket,
        3,
    ]


def test_worker_and_producers_at_the_same_reports_lose_none_and_take_none_twice():
    """Thinning and reading meet at the oldest report all the time, since the queue holds one."""
    backlog, found = Backlog(1, 64 << 20), []

    def read():
        while (item := backlog.get()) is not STOP:
            found.append((item.number, item.thinned))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        worker = threading.Thread(target=read)
        worker.start()
        for number in range(5000):
            backlog.put(_pending(number))
        backlog.send(STOP)
        worker.join(60)
    finally:
        sys.setswitchinterval(before)
    assert [number for number, _ in found] == list(range(5000))
    assert sum(thinned for _, thinned in found) == backlog.thinned and backlog.lost == 0
    assert backlog._held == 0 and not backlog._whole and not backlog._thin


def test_a_ticket_is_done_when_all_have_answered():
    ticket = Ticket()
    assert not ticket.done
    ticket.expect({"a", "b"})
    ticket.answer("a", ok=True)
    assert not ticket.done
    ticket.answer("b", ok=False)
    assert ticket.done and ticket.failed == {"b"}
