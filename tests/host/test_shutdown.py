import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest

from probes_jax.host import shutdown
from probes_jax.host.read_flight import read_flight

ROOT = pathlib.Path(__file__).parents[2]


class _Target:
    def __init__(self):
        self.flushed, self.closed = 0, 0

    def flush(self, limit):
        assert 0 < limit <= 10
        self.flushed += 1
        return True

    def close(self):
        self.closed += 1


@pytest.fixture
def earlier():
    """A SIGTERM handler of the user's; the test ends with the one it began with."""
    before = signal.getsignal(signal.SIGTERM)
    calls = []

    def handler(number, stack):
        calls.append(number)

    signal.signal(signal.SIGTERM, handler)
    yield handler, calls
    signal.signal(signal.SIGTERM, before)


def test_flushes_all_then_calls_the_handler_before_once(earlier):
    handler, calls = earlier
    first, second = _Target(), _Target()
    shutdown.watch(first, signals=True)
    shutdown.watch(second, signals=True)
    os.kill(os.getpid(), signal.SIGTERM)
    assert (first.flushed, second.flushed, calls) == (1, 1, [signal.SIGTERM])
    shutdown.unwatch(first)  # out of order
    os.kill(os.getpid(), signal.SIGTERM)
    assert (first.flushed, second.flushed, len(calls)) == (1, 2, 2)
    assert signal.getsignal(signal.SIGTERM) is not handler
    shutdown.unwatch(second)
    assert signal.getsignal(signal.SIGTERM) is handler


def test_without_signals_no_handler_is_installed(earlier):
    target = _Target()
    shutdown.watch(target, signals=False)
    assert signal.getsignal(signal.SIGTERM) is earlier[0]
    shutdown.unwatch(target)
    shutdown.unwatch(target)


def test_a_handler_put_over_ours_stays(earlier):
    target, later = _Target(), _Target()
    shutdown.watch(target, signals=True)
    signal.signal(signal.SIGTERM, replaced := lambda *_: None)
    shutdown.unwatch(target)
    assert signal.getsignal(signal.SIGTERM) is replaced
    signal.signal(signal.SIGTERM, earlier[0])
    shutdown.watch(target, signals=True)
    ours = signal.getsignal(signal.SIGTERM)

    def theirs(number, stack):
        ours(number, stack)

    signal.signal(signal.SIGTERM, theirs)
    shutdown.watch(later, signals=True)
    os.kill(os.getpid(), signal.SIGTERM)
    assert target.flushed >= 1 and later.flushed >= 1 and len(earlier[1]) == 1, "and no endless chain"
    shutdown.unwatch(target)
    shutdown.unwatch(later)
    os.kill(os.getpid(), signal.SIGTERM)
    assert len(earlier[1]) == 2


def test_an_ignored_signal_stays_ignored(earlier):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    target = _Target()
    shutdown.watch(target, signals=True)
    os.kill(os.getpid(), signal.SIGTERM)
    assert target.flushed == 1
    shutdown.unwatch(target)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


SCRIPT = """
import os, signal, sys, threading, time
import numpy as np
from probes_jax.host.recorder import Recorder
from tests.host.recorder_fakes import *

class FileSink:
    '''Keeps steps in memory until a flush puts them into a file.'''
    def __init__(self, path): self.path, self.kept = path, []
    def write(self, readings): self.kept.append(readings.step)
    def flush(self):
        with open(self.path, "a") as file: file.write("".join(f"{step}\\n" for step in self.kept))
        self.kept.clear()
    def close(self): self.flush()

def recorder(**options):
    return Recorder(sys.argv[1], sinks=[FileSink(sys.argv[2])], **{"flush_every": 1000.0, **options})
"""


def _run(tmp_path, body, timeout=60, **options):
    """Runs a script in a process of its own: (exit status, steps in the sink's file, steps in the flight record)."""
    out = tmp_path / "steps.txt"
    script = SCRIPT + textwrap.dedent(body)
    command = [sys.executable, "-c", script, str(tmp_path / "run"), str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, **options)
    steps = [int(line) for line in out.read_text().split()] if out.exists() else []
    flight = tmp_path / "run" / "flight" / "process_0.bin"
    return done, steps, [s.step for s in read_flight(flight)] if flight.exists() else []


THROUGH_37 = list(range(38))


def test_an_exception_at_step_37_leaves_all_records(tmp_path):
    """L087."""
    done, steps, flight = _run(
        tmp_path,
        """
        with recorder() as r:
            for step in range(100):
                r.record(report(step))
                if step == 37:
                    raise ZeroDivisionError("the step failed")
        """,
    )
    assert done.returncode == 1 and "ZeroDivisionError: the step failed" in done.stderr
    assert steps == flight == THROUGH_37


def test_sigterm_at_step_37_leaves_all_records(tmp_path):
    """L087."""
    done, steps, flight = _run(
        tmp_path,
        """
        r = recorder()
        for step in range(100):
            r.record(report(step))
            if step == 37:
                os.kill(os.getpid(), signal.SIGTERM)
        """,
    )
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert steps == flight == THROUGH_37


def test_sigterm_while_the_sink_is_in_the_middle_of_a_write(tmp_path):
    done, steps, _ = _run(
        tmp_path,
        """
        class Slow(FileSink):
            def write(self, readings):
                time.sleep(0.02)
                super().write(readings)
        r = Recorder(sys.argv[1], sinks=[Slow(sys.argv[2])], flush_every=1000.0)
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        for step in range(38):
            r.record(report(step))
        while True:  # the main thread is in our own code when the signal strikes
            r.health, r._backlog.pressure
        """,
    )
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert steps == THROUGH_37


def test_sigterm_in_the_middle_of_record(tmp_path):
    """Wherever the signal strikes, no lock is in the way of the flush."""
    done, steps, flight = _run(
        tmp_path,
        """
        r = recorder()
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        step = 0
        while True:
            r.record(report(step))
            step += 1
            if step % 500 == 0:
                r.flush()
        """,
    )
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert flight == list(range(len(flight))) and len(flight) > 100
    assert steps == list(range(len(steps))) and len(steps) >= len(flight) - 1


def test_a_hanging_sink_delays_the_end_by_a_bounded_time(tmp_path):
    done, _, flight = _run(
        tmp_path,
        """
        class Hangs(FileSink):
            def write(self, readings): time.sleep(1000)
        r = Recorder(sys.argv[1], sinks=[Hangs(sys.argv[2])], patience=0.5)
        for step in range(38):
            r.record(report(step))
        start = time.monotonic()
        r.close()
        assert time.monotonic() - start < 5
        """,
    )
    assert done.returncode == 0, done.stderr
    assert flight == THROUGH_37
    assert "hangs and is left behind" in done.stderr


def test_the_users_own_handler_runs_and_training_goes_on(tmp_path):
    done, steps, _ = _run(
        tmp_path,
        """
        asked = []
        signal.signal(signal.SIGTERM, lambda *_: asked.append(open(sys.argv[2]).read().split()[-1]))
        with recorder() as r:
            for step in range(50):
                r.record(report(step))
                if step == 37:
                    os.kill(os.getpid(), signal.SIGTERM)
        assert asked == ["37"], asked
        assert not r.health.lost
        """,
    )
    assert done.returncode == 0, done.stderr
    assert steps == list(range(50))


def test_the_interpreter_ends_without_close(tmp_path):
    done, steps, flight = _run(tmp_path, "r = recorder()\nfor step in range(38):\n    r.record(report(step))\n")
    assert done.returncode == 0, done.stderr
    assert steps == flight == THROUGH_37


def test_sys_exit_inside_the_context(tmp_path):
    done, steps, _ = _run(
        tmp_path,
        """
        with recorder() as r:
            for step in range(38):
                r.record(report(step))
            sys.exit(7)
        """,
    )
    assert (done.returncode, steps) == (7, THROUGH_37)


def test_a_process_that_dies_at_once_leaves_its_flight_record(tmp_path):
    """A dead peer ends a JAX process by abort: no exception, no atexit, no finally."""
    done, steps, flight = _run(
        tmp_path,
        """
        r = recorder()
        for step in range(100):
            r.record(report(step))
            if step == 37:
                time.sleep(1.0)  # "complete up to one second before"
            if step == 40:
                os._exit(3)
        """,
    )
    assert done.returncode == 3 and steps == []
    assert flight[:38] == THROUGH_37


def test_a_forked_child_is_not_held_up(tmp_path):
    done, steps, _ = _run(
        tmp_path,
        """
        r = recorder()
        for step in range(38):
            r.record(report(step))
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        start = time.monotonic()
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM and time.monotonic() - start < 5
        child = os.fork()
        if child == 0:
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0 and time.monotonic() - start < 8
        child = os.fork()
        if child == 0:  # it leaves the loop's context: there is nothing of its own to write
            r.flush()
            r.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0 and time.monotonic() - start < 12
        """,
    )
    assert done.returncode == 0, done.stderr
    assert steps == THROUGH_37


def test_records_from_another_thread_install_no_handler(tmp_path):
    done, steps, _ = _run(
        tmp_path,
        """
        r = recorder()
        thread = threading.Thread(target=lambda: [r.record(report(step)) for step in range(38)])
        thread.start(); thread.join()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        """,
    )
    assert done.returncode == 0, done.stderr
    assert steps == THROUGH_37
