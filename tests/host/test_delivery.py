import logging
import threading

import numpy as np
import pytest

from probes_jax.host.backlog import Ticket
from probes_jax.host.delivery import Delivery
from probes_jax.host.health import Complaint
from probes_jax.host.sink import BesideNotSaved
from probes_jax.spec.readings import Readings
from tests.host.recorder_fakes import FailingSink, HangingSink, ListSink, wait_for

NAMES = ("loss/mean", "act/x/rms")


def _readings(step):
    return Readings(step, "light", NAMES, np.array([step, 1.0]), np.ones(2, bool))


def _delivery(sink, **options):
    options = {"capacity": 10_000, "flush_every": 0.02, "backoff": (0.005, 0.02), **options}
    return Delivery("sink", sink if callable(sink) else lambda: sink, **options)


def _finish(delivery):
    delivery.stop()
    assert wait_for(lambda: delivery.finished)


def test_writes_in_order_flushes_in_time_and_closes_in_one_thread():
    sink = ListSink()
    delivery = _delivery(sink)
    delivery.start()
    for step in range(20):
        delivery.put(_readings(step))
    assert wait_for(lambda: sink.flushed == 1), "the timed flush needs no further reading"
    assert sink.steps == list(range(20)) and sink.closed == 0
    assert delivery.health.written == 20 and delivery.health.waiting == 0
    _finish(delivery)
    assert sink.closed == 1 and sink.flushed == 1, "nothing new, so nothing to flush again"
    assert len(sink.threads) == 1 and threading.current_thread() not in sink.threads


def test_what_waits_is_written_before_the_end():
    sink = ListSink()
    delivery = _delivery(sink, flush_every=1000)
    for step in range(500):
        delivery.put(_readings(step))
    delivery.start()
    _finish(delivery)
    assert sink.steps == list(range(500)) and (sink.flushed, sink.closed) == (1, 1)


def test_a_sink_that_recovers_gets_what_waited():
    sink = FailingSink()
    delivery = _delivery(sink)
    delivery.start()
    delivery.put(_readings(0))
    assert wait_for(lambda: delivery.health.failed >= 1)
    assert "No space left" in delivery.health.last_error
    sink.healed = True
    for step in range(1, 10):
        delivery.put(_readings(step))
    assert wait_for(lambda: len(sink.steps) >= 9)
    _finish(delivery)
    health = delivery.health
    assert sink.steps[-9:] == list(range(1, 10)) and health.written + health.dropped == 10


def test_a_reading_that_always_fails_is_given_up_and_the_next_gets_its_chance():
    class Poisoned(ListSink):
        def write(self, readings):
            if readings.step == 1:
                raise ValueError("this one cannot be written")
            super().write(readings)

    sink = Poisoned()
    delivery = _delivery(sink)
    delivery.start()
    for step in range(4):
        delivery.put(_readings(step))
    assert wait_for(lambda: sink.steps == [0, 2, 3])
    _finish(delivery)
    assert (delivery.health.dropped, delivery.health.failed, delivery.health.written) == (1, 3, 3)


def test_waits_between_tries_grow():
    class Clock:
        now = 0.0

    tries = []

    class Sink(FailingSink):
        def write(self, readings):
            tries.append(Clock.now)
            super().write(readings)

    delivery = _delivery(Sink(), backoff=(1.0, 8.0), monotonic=lambda: Clock.now)
    for step in range(10):
        delivery.put(_readings(step))
    while len(tries) < 7:  # in this thread, on a clock that goes in quarters of a second
        if delivery._retry_at <= Clock.now:
            delivery._turn()
        Clock.now += 0.25
    waits = np.diff(tries)
    assert waits.tolist() == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_a_dead_sink_is_left_quickly_at_the_end():
    sink = FailingSink()
    delivery = _delivery(sink, backoff=(1000.0, 1000.0))
    for step in range(400):
        delivery.put(_readings(step))
    delivery.start()
    assert wait_for(lambda: delivery.health.failed == 1)
    _finish(delivery)
    assert delivery.health.dropped == 400 and sink.calls <= 4 and sink.closed == 1


def test_even_system_exit_in_a_sink_does_not_end_its_thread():
    class Exits(ListSink):
        def write(self, readings):
            super().write(readings)
            if readings.step == 0:
                raise SystemExit

    delivery = _delivery(Exits())
    delivery.start()
    for step in range(3):
        delivery.put(_readings(step))
    assert wait_for(lambda: delivery.health.written == 2)
    _finish(delivery)


def test_a_sink_that_cannot_be_made_yet_is_made_later():
    made = []

    def make():
        made.append(1)
        if len(made) < 3:
            raise PermissionError("no mount yet")
        return ListSink()

    delivery = _delivery(make)
    delivery.start()
    delivery.put(_readings(0))
    assert wait_for(lambda: delivery.health.written == 1)
    _finish(delivery)
    assert delivery.health.failed == 2


def test_a_ticket_is_answered_when_what_came_before_it_is_flushed():
    sink = HangingSink()
    delivery = _delivery(sink, flush_every=1000)
    delivery.start()
    for step in range(3):
        delivery.put(_readings(step))
    ticket = Ticket()
    ticket.expect({"sink"})
    delivery.request(ticket)
    assert sink.entered.wait(20)
    assert not ticket.done and sink.flushed == 0
    sink.release.set()
    assert wait_for(lambda: ticket.done)
    assert sink.steps == [0, 1, 2] and sink.flushed == 1 and not ticket.failed
    _finish(delivery)


def test_a_ticket_to_a_failing_sink_is_answered_without_waiting_for_its_backoff():
    sink = FailingSink()
    delivery = _delivery(sink, backoff=(1000.0, 1000.0))
    delivery.start()
    for step in range(50):
        delivery.put(_readings(step))
    assert wait_for(lambda: delivery.health.failed == 1)
    ticket = Ticket()
    ticket.expect({"sink"})
    delivery.request(ticket)
    assert wait_for(lambda: ticket.done)
    assert ticket.failed == {"sink"} and sink.calls <= 3
    _finish(delivery)


def test_a_failing_flush_is_tried_again():
    class Sink(ListSink):
        def flush(self):
            super().flush()
            if self.flushed < 3:
                raise OSError("stale handle")

    sink = Sink()
    delivery = _delivery(sink)
    delivery.start()
    delivery.put(_readings(0))
    assert wait_for(lambda: sink.flushed == 3)
    _finish(delivery)
    assert delivery.health.failed == 2 and delivery.health.dropped == 0


def test_one_log_line_for_many_failures(caplog):
    now = [0.0]
    complaint = Complaint(every=60.0, monotonic=lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for second in range(150):
            now[0] = float(second)
            complaint.say("it failed")
    assert [r.message for r in caplog.records] == [
        "it failed",
        "it failed (59 more since the last such line)",
        "it failed (59 more since the last such line)",
    ]


@pytest.mark.parametrize("sink", [FailingSink, HangingSink])
def test_a_sink_that_never_takes_anything_holds_a_bounded_queue(sink):
    bad = sink()
    delivery = _delivery(bad, capacity=2000, backoff=(1000.0, 1000.0))
    delivery.start()
    for step in range(20_000):
        delivery.put(_readings(step))
    health = delivery.health
    assert health.waiting <= 2000 / 17 + 2
    assert health.dropped + health.waiting >= 20_000 - 1
    if sink is HangingSink:
        bad.release.set()
    _finish(delivery)


def test_what_the_last_flush_cannot_save_is_counted_as_dropped(caplog):
    """A full disk at the end: the sink took the readings, but they are not written."""

    class Full(ListSink):
        def flush(self):
            raise OSError(28, "No space left on device")

    delivery = _delivery(Full(), flush_every=1000)
    for step in range(5):
        delivery.put(_readings(step))
    with caplog.at_level(logging.ERROR):
        delivery.start()
        _finish(delivery)
    assert (delivery.health.written, delivery.health.dropped) == (0, 5)
    assert "could not save its last 5 readings" in caplog.text


def test_what_goes_with_the_readings_and_cannot_be_saved_holds_up_none_of_them(caplog):
    class Beside(ListSink):
        def flush(self):
            super().flush()
            raise BesideNotSaved("no table")

    sink = Beside()
    delivery = _delivery(sink, backoff=(60.0, 60.0))
    delivery.start()
    with caplog.at_level(logging.WARNING, logger="probes_jax"):
        for step in range(3):
            delivery.put(_readings(step))
            assert wait_for(lambda wanted=sink.flushed + 1: sink.flushed > wanted)
        _finish(delivery)
    health = delivery.health
    assert sink.steps == [0, 1, 2] and (health.written, health.dropped) == (3, 0)
    assert health.failed >= sink.flushed - 1 and "no table" in health.last_error
    assert len(caplog.records) == 1


def test_a_sink_that_does_not_come_back_is_named_once_a_minute_and_its_readings_are_dropped_in_the_end(caplog):
    """L091: it raises nothing, and its queue may take hours to fill."""
    sink, now = HangingSink(), [0.0]
    delivery = _delivery(sink, monotonic=lambda: now[0])
    delivery.start()
    delivery.put(_readings(0))
    assert sink.entered.wait(20)
    for step, seconds in enumerate((29.0, 31.0, 60.0, 92.0), 1):
        now[0] = seconds
        delivery.put(_readings(step))
    lines = [record.message for record in caplog.records]
    assert [line.split(" s;")[0] for line in lines] == [
        "sink 'sink' has not come back from a call for 31",
        "sink 'sink' has not come back from a call for 92",
    ]
    assert "2 readings wait for it" in lines[0]
    assert (delivery.health.dropped, delivery.health.waiting) == (0, 4)
    delivery.leave()
    assert (delivery.health.dropped, delivery.health.waiting) == (5, 0)
    sink.release.set()
    _finish(delivery)
    assert (delivery.health.dropped, delivery.health.written) == (0, 5), "it came back after all"
