import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from probes_jax.detect.spike import SpikeScores, is_spike, score_spikes
from probes_jax.detect.window import WindowState, init_window

MIN_HISTORY, FLOOR, THETA = 32, 3e-3, 6.0


def _run(x, *, window=128, min_history=MIN_HISTORY, floor=FLOOR, present=None, state=None):
    """Scores of a series, as NumPy arrays `[T]`, and the last state."""
    x = np.asarray(x, np.float32)
    present = np.ones(len(x), bool) if present is None else np.asarray(present)

    def step(state, inputs):
        value, there = inputs
        return score_spikes(state, value[None], there[None], min_history=min_history, floor=floor)

    start = init_window(1, window) if state is None else state
    end, scores = jax.jit(lambda s, v, p: jax.lax.scan(step, s, (v, p)))(start, x, present)
    return end, SpikeScores(*(np.asarray(field)[:, 0] for field in scores))


def _reference(x, present, *, window, min_history, floor):
    """The definition, in float64, with Python lists."""
    history: list[float] = []
    out = []
    for value, there in zip(np.asarray(x, np.float64), present, strict=True):
        earlier = history[-window:]
        z = None
        if there and not math.isfinite(value):
            z = math.inf
        elif there and value > 0:
            u = math.log(value + 1e-30)
            if len(earlier) >= min_history:
                q = float(np.median(earlier))
                deviation = float(np.median(np.abs(np.asarray(earlier) - q)))
                z = 0.6745 * (u - q) / max(deviation, floor)
            history.append(u)
        out.append(z)
    return out


def test_equals_the_definition_in_float64():
    rng = np.random.default_rng(0)
    x = np.exp(rng.normal(size=120) * 0.3)
    x[[5, 40]] = np.nan
    x[41] = np.inf
    x[60] = 0.0
    x[61] = -3.0
    x[80] = 1e4
    present = rng.random(120) > 0.1
    present[[5, 40, 41, 60, 61, 80]] = True
    want = _reference(x.astype(np.float32), present, window=32, min_history=8, floor=FLOOR)
    _, got = _run(x, window=32, min_history=8, present=present)
    assert got.scored.tolist() == [z is not None for z in want]
    for index, z in enumerate(want):
        if z is not None:
            np.testing.assert_allclose(got.z[index], z, rtol=2e-4, atol=2e-3)


def test_a_scan_equals_step_by_step():
    x = np.exp(np.random.default_rng(1).normal(size=40)).astype(np.float32)
    end, scanned = _run(x, window=16, min_history=4)
    step = jax.jit(lambda s, v: score_spikes(s, v, jnp.ones((1,), bool), min_history=4, floor=FLOOR))
    state = init_window(1, 16)
    for index, value in enumerate(x):
        state, scores = step(state, value[None])
        assert float(scores.z[0]) == scanned.z[index]
    jax.tree.map(np.testing.assert_array_equal, state, end)


def test_the_current_step_is_not_in_its_own_window():
    x = [1.0] * 4 + [100.0]
    _, got = _run(x, window=4, min_history=4)
    assert got.q[-1] == 0.0
    assert got.deviation[-1] == 0.0
    assert got.z[-1] == pytest.approx(0.6745 * math.log(100) / FLOOR, rel=1e-5)


def test_downward_moves_score_negative_and_are_no_spikes():
    _, got = _run([10.0, 10.1, 9.9, 10.0, 0.1], window=8, min_history=4)
    assert got.z[-1] < -THETA
    assert not np.asarray(is_spike(got, THETA))[-1]


def test_signals_are_apart():
    step = jax.jit(lambda s, v: score_spikes(s, v, jnp.ones((2,), bool), min_history=4, floor=FLOOR))
    state = init_window(2, 8)
    for x in (1.0, 1.1, 0.9, 1.0, 50.0):
        state, scores = step(state, np.asarray([x, 3.0], np.float32))
    assert is_spike(scores, THETA).tolist() == [True, False]
    assert float(scores.z[1]) == 0.0


def test_zero_and_below_are_not_applicable_and_do_not_enter():
    state, got = _run([1.0, 0.0, -1.0, 2.0], window=4, min_history=1)
    assert got.applicable.tolist() == [True, False, False, True]
    assert got.scored.tolist() == [False, False, False, True]
    assert int(state.count[0]) == 2


def test_an_absent_value_leaves_the_state_alone():
    state, got = _run([1.0, 99.0, 1.0], window=4, min_history=1, present=[True, False, True])
    assert got.applicable.tolist() == [True, False, True]
    assert int(state.count[0]) == 2
    assert got.z[2] == 0.0


def test_a_nonfinite_value_scores_inf_with_and_without_a_history():
    _, got = _run([np.nan, np.inf, -np.inf, 1.0, 1.0, np.nan], window=4, min_history=2)
    assert got.scored.tolist() == [True, True, True, False, False, True]
    assert np.isposinf(got.z[[0, 1, 2, 5]]).all()


def test_after_a_quiet_stretch_the_floor_decides():  # design: a 1 % rise scores 6,711 / 6.7 / 0.7
    for floor, want in ((1e-6, 6711), (1e-3, 6.7), (1e-2, 0.67)):
        _, got = _run([2.0] * 40 + [2.02], floor=floor)
        assert got.z[-1] == pytest.approx(want, rel=2e-3)


def _simulation(length: int) -> np.ndarray:
    return np.exp(np.random.default_rng(0).normal(size=length) * 0.05).astype(np.float32) * 2.0


def test_one_spike_does_not_hide_a_second_one_twenty_steps_later():
    x = _simulation(200)
    x[64] *= 50.0  # half-full window
    x[84] *= 8.0
    _, got = _run(x)
    spikes = np.flatnonzero(got.scored & (got.z > THETA))
    assert spikes.tolist() == [64, 84]
    assert got.z[84] > 30.0
    # The rule of mean and standard deviation over all values, for comparison, is blind to the second.
    earlier = x[:84]
    assert (x[84] - earlier.mean()) / earlier.std() < THETA


def test_a_nan_rejects_its_own_step_and_no_other():
    x = _simulation(200)
    x[64] = np.nan
    state, got = _run(x)
    assert np.flatnonzero(got.scored & (got.z > THETA)).tolist() == [64]
    assert np.isfinite(np.asarray(state.values)).all()
    assert np.isfinite(got.z[65:]).all()


def test_l080_a_value_near_the_mean_is_no_spike():
    rng = np.random.default_rng(3)
    losses = 2.02 + 0.01425 * rng.permutation(np.tile([-1.0, 1.0], 64))  # mean 2.02, deviation 0.01425
    _, got = _run([*losses, 2.03])
    assert 0.0 < got.z[-1] < 1.0
    assert not (got.scored & (got.z > THETA)).any()


def test_l082_no_alert_before_the_minimum_history():
    _, got = _run([11.0, 10.0, 9.0, 8.0, 7.0])
    assert not got.scored.any()


def test_l082_a_constant_window_scores_zero():
    _, got = _run([3.0] * 40)
    assert got.scored[MIN_HISTORY:].all()
    assert (got.z[MIN_HISTORY:] == 0.0).all()
    assert not got.scored[:MIN_HISTORY].any()


def test_dtypes_hold_under_x64_and_strict_promotion():
    state = init_window(2, 8)
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
        step = jax.jit(lambda s, v, p: score_spikes(s, v, p, min_history=2, floor=FLOOR))
        after, scores = step(state, np.ones((2,), jnp.bfloat16), np.ones((2,), bool))
        flags = is_spike(scores, THETA)
    assert isinstance(after, WindowState)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert all(field.dtype in (jnp.float32, bool) for field in (*scores, flags))


@pytest.mark.parametrize(("settings", "word"), [({"min_history": 9}, "min_history"), ({"floor": 0.0}, "floor")])
def test_wrong_settings_are_named(settings, word):
    settings = {"min_history": 2, "floor": FLOOR, **settings}
    with pytest.raises(ValueError, match=word):
        score_spikes(init_window(1, 8), jnp.ones((1,)), jnp.ones((1,), bool), **settings)
