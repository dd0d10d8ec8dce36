import jax
import jax.numpy as jnp
import numpy as np

from probes_jax.detect.co_spike import init_co_spike, update_co_spike

THETA = 6.0
_update = jax.jit(update_co_spike)


def _run(scores):
    """State after steps of (z_L, z_G); None is a signal without a score."""
    state = init_co_spike()
    for loss, grad in scores:
        flag = all(z is not None and z > THETA for z in (loss, grad))
        z = (np.float32(np.nan if value is None else value) for value in (loss, grad))
        state = _update(state, *z, flag)
    return state


def test_counts_and_adds_the_smaller_score():
    state = _run([(7.0, 9.0), (9.0, 5.0), (5.0, 9.0), (100.0, 8.0), (6.0, 6.0)])
    assert int(state.count) == 2
    assert float(state.magnitude) == 15.0
    assert int(state.nonfinite) == 0


def test_an_infinite_co_spike_is_counted_but_does_not_drown_the_magnitude():
    state = _run([(np.inf, np.inf), (7.0, np.inf), (8.0, 8.0)])
    assert int(state.count) == 3
    assert int(state.nonfinite) == 1
    assert float(state.magnitude) == 15.0


def test_without_a_score_nothing_happens_and_no_nan_enters():
    state = _run([(None, 9.0), (9.0, None), (None, None)])
    assert (int(state.count), float(state.magnitude), int(state.nonfinite)) == (0, 0.0, 0)


def test_structure_is_fixed_under_scan_x64_and_strict_promotion():
    start = init_co_spike()

    def step(state, z):
        return update_co_spike(state, z, z, z > np.float32(THETA)), None

    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
        end, _ = jax.lax.scan(step, start, jnp.asarray([1.0, 7.0, 8.0], jnp.float32))
    assert [leaf.dtype for leaf in end] == [leaf.dtype for leaf in start]
    assert (int(end.count), float(end.magnitude)) == (2, 15.0)
