import jax
import jax.numpy as jnp
import numpy as np

from probes_jax.detect.counter import count_if, turn_if, zero


def test_counts_only_where_the_condition_holds():
    counter = jnp.zeros((2,), jnp.uint32)
    for _ in range(3):
        counter = count_if(counter, jnp.asarray([True, False]))
    assert counter.tolist() == [3, 0]
    assert zero().dtype == jnp.uint32
    assert zero().shape == ()


def test_the_largest_count_stays():
    counter = jnp.asarray(2**32 - 2, jnp.uint32)
    for _ in range(3):
        counter = count_if(counter, jnp.asarray(True))
    assert int(counter) == 2**32 - 1


def test_a_ring_goes_on_past_the_range_of_its_counter():
    for window in (1, 3, 128, 1000):
        counter = jnp.asarray(2**31 - 2, jnp.uint32)
        slots = []
        turn = jax.jit(lambda c, b, window=window: turn_if(c, b, window))
        for _ in range(6):
            slots.append(int(counter) % window)
            counter = turn(counter, True)
            assert int(counter) >= window  # still full
        assert slots == [(slots[0] + k) % window for k in range(6)]
    assert int(turn_if(jnp.asarray(5, jnp.uint32), jnp.asarray(False), 4)) == 5


def test_strict_promotion_and_x64():
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
        counter = jax.jit(lambda c: turn_if(count_if(c, c < np.uint32(9)), c < np.uint32(9), 4))(zero())
    assert counter.dtype == jnp.uint32
    assert int(counter) == 2
