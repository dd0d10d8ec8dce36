import jax
import jax.numpy as jnp
import numpy as np
import pytest

from probes_jax.detect.clip_rate import init_clip, push_clip

_push = jax.jit(push_clip)


def _run(flags, window):
    """Rates (None where absent) after each answer; an answer of None is absent."""
    state, out = init_clip(window), []
    for flag in flags:
        state, rate, known = _push(state, bool(flag), flag is not None)
        out.append(float(rate) if bool(known) else None)
    return state, out


def test_equals_the_mean_of_the_last_answers():
    flags = np.random.default_rng(0).random(40) < 0.4
    _, rates = _run(flags.tolist(), window=7)
    want = [np.mean(flags[max(0, t - 6) : t + 1]) for t in range(len(flags))]
    np.testing.assert_allclose(rates, want, rtol=1e-6)


def test_steps_seen_so_far_are_the_denominator_at_first():
    assert _run([True, False, False], window=128)[1] == [1.0, 0.5, pytest.approx(1 / 3)]


def test_an_absent_answer_enters_nothing():
    state, rates = _run([None, True, None, False], window=4)
    assert rates == [None, 1.0, 1.0, 0.5]
    assert int(state.steps) == 2


def test_structure_is_fixed_under_scan_x64_and_strict_promotion():
    start = init_clip(4)

    def step(state, flag):
        state, rate, known = push_clip(state, flag, jnp.ones((), bool))
        return state, (rate, known)

    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
        end, (rate, known) = jax.lax.scan(step, start, jnp.asarray([True, False]))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), start) == jax.tree.map(lambda x: (x.shape, x.dtype), end)
    assert rate.dtype == jnp.float32
    assert rate.tolist() == [1.0, 0.5]
    assert known.all()


def test_a_window_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        init_clip(0)
