import threading

import pytest

from probes_jax.host.timed import take_wait, timed


class _Clock:
    """A clock that the data source moves on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def source(self, waits):
        for index, wait in enumerate(waits):
            self.now += wait
            yield index


@pytest.fixture(autouse=True)
def _nothing_left():
    take_wait()
    yield
    take_wait()


def test_yields_the_same_batches_and_leaves_each_wait_for_the_record():
    clock = _Clock()
    batches, waits = [], []
    for batch in timed(clock.source([0.5, 0.0, 2.0]), clock=clock):
        clock.now += 10.0  # the step itself is no wait
        batches.append(batch)
        waits.append(take_wait())
    assert batches == [0, 1, 2]
    assert waits == [0.5, 0.0, 2.0]
    assert take_wait() is None


def test_without_timed_there_is_no_wait():
    assert take_wait() is None


def test_several_batches_per_record_add_up():
    clock = _Clock()
    batches = iter(timed(clock.source([1.0, 2.0, 4.0]), clock=clock))
    next(batches), next(batches)
    assert take_wait() == 3.0
    next(batches)
    assert take_wait() == 4.0


def test_an_evaluation_loop_does_not_leak_into_the_training_loop():
    clock = _Clock()
    training = iter(timed(clock.source([1.0, 2.0]), clock=clock))
    next(training)
    assert take_wait() == 1.0
    list(timed(clock.source([100.0, 100.0]), clock=clock))
    next(training)
    assert take_wait() == 2.0


def test_loops_in_several_threads_do_not_mix():
    ready, found = threading.Barrier(2), {}

    def loop(name, wait):
        clock = _Clock()
        waits = []
        for _ in timed(clock.source([wait] * 20), clock=clock):
            ready.wait(20)
            waits.append(take_wait())
        found[name] = waits

    threads = [threading.Thread(target=loop, args=(name, wait)) for name, wait in (("a", 1.0), ("b", 3.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {"a": [1.0] * 20, "b": [3.0] * 20}


def test_length_passes_through_only_if_there_is_one():
    assert len(timed([1, 2, 3])) == 3
    with pytest.raises(TypeError):
        len(timed(iter([1])))
    assert not hasattr(timed(iter([1])), "__len__")


def test_can_be_iterated_again():
    batches = timed([1, 2])
    assert list(batches) == list(batches) == [1, 2]


def test_an_error_of_the_source_passes_through():
    def broken():
        yield 1
        raise OSError("disk")

    batches = iter(timed(broken()))
    assert next(batches) == 1
    with pytest.raises(OSError, match="disk"):
        next(batches)


def test_refuses_what_is_no_iterable():
    with pytest.raises(TypeError, match="timed"):
        timed(3)
