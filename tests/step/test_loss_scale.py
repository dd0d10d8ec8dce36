"""Loss scaling against the slow form in Python, and against flax where the two mean the same."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from probes_jax.step.loss_scale import (
    LossScale,
    as_loss_scale,
    init_loss_scale,
    unscale,
    update_loss_scale,
)

SMALL = LossScale(initial=8.0, growth_interval=3, minimum=2.0, maximum=32.0)


def slow(settings, history):
    """Scale before each step, and (scale, good steps, drops) after the last."""
    scale, good, drops, before = settings.initial, 0, 0, []
    for finite in history:
        before.append(scale)
        if finite:
            good += 1
            if good == settings.growth_interval:
                scale, good = min(scale * settings.factor, settings.maximum), 0
        else:
            lower = max(scale / settings.factor, settings.minimum)
            drops, scale, good = drops + (lower < scale), lower, 0
    return before, (scale, good, drops)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "settings", [SMALL, LossScale(initial=2.0**10, growth_interval=1, factor=4.0)], ids=["small", "fast"]
)
def test_follows_the_slow_form(settings, seed):
    history = np.random.default_rng(seed).random(60) < (0.4, 0.8, 1.0, 0.0)[seed]

    def body(state, finite):
        return update_loss_scale(settings, state, finite), state.scale

    state, before = jax.lax.scan(body, init_loss_scale(settings), jnp.asarray(history))
    expected, last = slow(settings, history)
    np.testing.assert_array_equal(before, np.float32(expected))
    assert (float(state.scale), int(state.good_steps), int(state.drops)) == last
    assert np.all(np.frexp(np.asarray(before))[0] == 0.5)  # a power of two at every step


def test_grows_after_the_interval_and_drops_at_once():
    state, seen = init_loss_scale(SMALL), []
    for finite in (True, True, True, True, True, False, True, True, True):
        state = update_loss_scale(SMALL, state, jnp.bool_(finite))
        seen.append(float(state.scale))
    assert seen == [8, 8, 16, 16, 16, 8, 8, 8, 16]
    assert int(state.drops) == 1


def test_a_drop_at_the_minimum_is_no_drop():
    state = init_loss_scale(LossScale(initial=2.0, minimum=2.0))
    state = update_loss_scale(LossScale(initial=2.0, minimum=2.0), state, jnp.bool_(False))
    assert (float(state.scale), int(state.drops)) == (2.0, 0)


def test_l032_norm_is_that_of_the_unscaled_gradient():
    """Loss scale 128, true gradient norm 1."""
    scale = init_loss_scale(as_loss_scale(128)).scale
    params = {"a": jnp.float32([0.6]), "b": jnp.bfloat16([0.0, 0.8])}

    def loss(p):
        return 0.5 * sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in p.values())

    true, scaled = jax.grad(loss)(params), jax.grad(lambda p: loss(p) * scale)(params)
    gradient = jax.jit(unscale)(scaled, scale)
    jax.tree.map(np.testing.assert_array_equal, gradient, true)  # a power of two: exact
    assert [leaf.dtype for leaf in gradient.values()] == [jnp.float32, jnp.bfloat16]
    norm = np.sqrt(sum(np.sum(np.float64(leaf) ** 2) for leaf in gradient.values()))
    assert float(scale) == 128.0
    np.testing.assert_allclose(norm, 1.0, rtol=2e-3)  # 0.8 is not a bfloat16


def test_unscaling_is_done_in_float32():
    tree = {"half": jnp.float16([60000.0, np.inf, np.nan]), "int": jnp.int32([3]), "none": None}
    result = unscale(tree, jnp.float32(2.0**17))  # more than float16 can hold
    np.testing.assert_array_equal(result["half"], np.float16([60000.0 / 2**17, np.inf, np.nan]))
    np.testing.assert_array_equal(result["int"], [3])
    third = unscale(jnp.bfloat16([1.0]), jnp.float32(3.0))
    np.testing.assert_array_equal(np.float32(third), np.float32(jnp.bfloat16(np.float32(1.0) / np.float32(3.0))))
    with jax.enable_x64(True):
        assert float(unscale(jnp.float64(1.0), jnp.float32(3.0))) == 1.0 / 3.0
        assert update_loss_scale(SMALL, init_loss_scale(SMALL), jnp.bool_(False)).scale.dtype == jnp.float32


def test_small_gradients_survive_a_float16_backward_pass():
    def loss(w):
        return jnp.mean(w.astype(jnp.float16) * jnp.float16(1e-2)).astype(jnp.float32) * 1e-6

    w, scale = jnp.ones((4,), jnp.float32), jnp.float32(2.0**15)
    assert not np.any(np.asarray(jax.grad(loss)(w)))
    kept = unscale(jax.grad(lambda w: loss(w) * scale)(w), scale)
    np.testing.assert_allclose(kept, 2.5e-9, rtol=1e-2)


def test_structure_and_dtypes_are_fixed():
    state = init_loss_scale(SMALL)
    after = jax.eval_shape(lambda s: update_loss_scale(SMALL, s, jnp.bool_(True)), state)
    assert jax.tree.structure(state) == jax.tree.structure(after)
    assert [leaf.dtype for leaf in state] == [leaf.dtype for leaf in after] == [jnp.float32, jnp.uint32, jnp.uint32]
    assert not any(leaf.weak_type for leaf in after)


@pytest.mark.parametrize("settings", [None, as_loss_scale(1000)])
def test_static_and_none_stay(settings):
    state = init_loss_scale(settings)
    after = update_loss_scale(settings, state, jnp.bool_(False))
    assert (float(after.scale), int(after.drops)) == (1.0 if settings is None else 1000.0, 0)


def test_differs_from_flax_only_in_when_it_grows():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from flax.training.dynamic_scale import DynamicScale
    theirs = DynamicScale(growth_interval=3, scale=8.0, minimum_scale=2.0)
    state, pairs = init_loss_scale(SMALL), []
    for finite in (True, True, False, False, False, True, True, True, True):
        theirs = theirs.value_and_grad(lambda x, ok=finite: x * (1.0 if ok else jnp.nan))(
            jnp.float32(1.0)
        ).dynamic_scale
        state = update_loss_scale(SMALL, state, jnp.bool_(finite))
        pairs.append((float(state.scale), float(theirs.scale)))
    assert pairs == [(8, 8), (8, 8), (4, 4), (2, 2), (2, 2), (2, 2), (2, 2), (4, 2), (4, 4)]


@pytest.mark.parametrize(
    ("value", "initial", "dynamic"),
    [(128, 128.0, False), (0.5, 0.5, False), ("dynamic", 2.0**15, True), (LossScale(initial=4), 4.0, True)],
)
def test_as_loss_scale(value, initial, dynamic):
    settings = as_loss_scale(value)
    assert (settings.initial, settings.dynamic) == (initial, dynamic)
    assert hash(settings) == hash(as_loss_scale(value))


@pytest.mark.parametrize("value", ["static", True, [1.0], {}, b"dynamic"])
def test_what_is_no_loss_scale(value):
    with pytest.raises(ValueError, match=r'None, a positive number, "dynamic" or LossScale'):
        as_loss_scale(value)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"initial": 0}, "initial must be a positive"),
        ({"initial": -2.0, "dynamic": False}, "initial must be a positive"),
        ({"initial": float("inf"), "dynamic": False}, "initial must be a positive"),
        ({"initial": float("nan"), "dynamic": False}, "initial must be a positive"),
        ({"initial": True}, "initial must be a positive"),
        ({"initial": 1000.0}, "initial must be a power of two"),
        ({"factor": 3.0}, "factor must be a power of two"),
        ({"factor": 1.0}, "factor must be greater than 1"),
        ({"growth_interval": 0}, "growth_interval"),
        ({"growth_interval": 2.5}, "growth_interval"),
        ({"minimum": 2.0**20}, "minimum <= initial <= maximum"),
        ({"maximum": 2.0**10}, "minimum <= initial <= maximum"),
    ],
)
def test_settings_are_checked_when_built(settings, match):
    with pytest.raises(ValueError, match=match):
        LossScale(**settings)
