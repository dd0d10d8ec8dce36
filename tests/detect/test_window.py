import jax
import jax.numpy as jnp
import numpy as np
import pytest

from probes_jax.detect.window import WindowState, filled, init_window, push

X = np.asarray([1.0, 2.0, np.nan, 3.0, np.inf, 4.0, -np.inf, 5.0, 6.0], np.float32)


_push = jax.jit(push)


def _enter(state: WindowState, values: np.ndarray) -> WindowState:
    for value in values:
        state = _push(state, np.asarray([value]), np.asarray([True]))
    return state


def test_only_finite_values_enter():
    state = _enter(init_window(1, 8), X)
    assert int(state.count[0]) == 6
    assert np.asarray(state.values[0, :6]).tolist() == [1, 2, 3, 4, 5, 6]
    assert np.asarray(filled(state)[0]).tolist() == [True] * 6 + [False] * 2


def test_the_oldest_value_leaves():
    state = _enter(init_window(1, 4), X)
    assert sorted(np.asarray(state.values[0]).tolist()) == [3, 4, 5, 6]
    assert bool(filled(state).all())


def test_an_invalid_value_leaves_its_ring_alone_and_no_other():
    state = init_window(2, 3)
    state = push(state, jnp.asarray([1.0, 2.0]), jnp.asarray([True, False]))
    assert state.count.tolist() == [1, 0]
    assert np.asarray(state.values[:, 0]).tolist() == [1.0, 0.0]


def test_a_scan_equals_step_by_step():
    def step(state, value):
        return push(state, value[None], jnp.ones((1,), bool)), None

    scanned, _ = jax.jit(lambda s, x: jax.lax.scan(step, s, x))(init_window(1, 4), jnp.asarray(X))
    by_step = _enter(init_window(1, 4), X)
    for a, b in zip(scanned, by_step, strict=True):
        np.testing.assert_array_equal(a, b)


def test_structure_is_fixed_and_nothing_is_empty():
    before = init_window(3, 5)
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
        after = jax.jit(push)(before, np.ones((3,), np.float32), np.ones((3,), bool))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), before) == jax.tree.map(lambda x: (x.shape, x.dtype), after)
    assert all(leaf.size for leaf in jax.tree.leaves(before))


@pytest.mark.parametrize(("signals", "window"), [(0, 4), (1, 0)])
def test_an_empty_array_is_refused(signals, window):  # L117: no empty arrays in the state
    with pytest.raises(ValueError, match="at least 1"):
        init_window(signals, window)
