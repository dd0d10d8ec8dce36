"""The clip: found by what it does, and whether it clips, against optax's own clipping of arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from probes_jax.observe.chain import chain
from probes_jax.observe.clip import clip_threshold, clipped, find_clip

PARAMS = {"a": jnp.ones((3,)), "b": jnp.ones((2, 2))}
CLIP = ("clip", optax.clip_by_global_norm(1.0))
ADAM, RATE = ("adam", optax.scale_by_adam()), ("lr", optax.scale_by_learning_rate(0.1))
FREEZE = ("freeze", optax.freeze({"a": False, "b": True}))


def gradients(norm):
    """A tree of global norm `norm` (in float64)."""
    total = np.sqrt(7.0)
    return jax.tree.map(lambda p: jnp.full(p.shape, norm / total, jnp.float32), PARAMS)


def global_norm(tree):
    return np.sqrt(sum(float(np.sum(np.float64(leaf) ** 2)) for leaf in jax.tree.leaves(tree)))


def ask(tx, norm, state=None):
    probe, reason = find_clip(tx, PARAMS)
    assert reason == ""
    state = tx.init(PARAMS) if state is None else state
    return bool(jax.jit(lambda s, n: clipped(probe, s, n))(state, jnp.float32(norm)))


@pytest.mark.parametrize("threshold", [0.25, 1.0, 7.5, 1e-6, 1e6])
def test_clipped_says_what_optax_does(threshold):
    stage = optax.clip_by_global_norm(threshold)
    tx = chain(("clip", stage), ADAM, RATE)
    probe, _ = find_clip(tx, PARAMS)
    state, hits = tx.init(PARAMS), jax.jit(lambda s, n: clipped(probe, s, n))
    assert float(clip_threshold(probe, state)) == np.float32(threshold)
    for ratio in (0.0, 1e-3, 0.999, 1.001, 3.0, 1e6):
        tree = gradients(threshold * ratio)
        result, _ = stage.update(tree, stage.init(tree))
        changed = global_norm(result) < global_norm(tree) * (1 - 1e-6)
        assert bool(hits(state, jnp.float32(global_norm(tree)))) == changed == (ratio > 1)


def test_norm_equal_to_the_threshold_is_not_clipped():
    assert not ask(chain(CLIP, RATE), 1.0)


@pytest.mark.parametrize(("norm", "expected"), [(np.inf, True), (np.nan, False), (3e38, True), (1e-38, False)])
def test_extreme_norms(norm, expected):
    assert ask(chain(CLIP, RATE), norm) == expected


def test_l036_zero_gradient_and_zero_threshold_make_no_nan():
    tx = chain(("clip", optax.clip_by_global_norm(0.0)), RATE)
    probe, _ = find_clip(tx, PARAMS)
    with jax.debug_nans(True):
        assert not ask(tx, 0.0)
        assert ask(tx, 1e-3)
        assert not clipped(probe, tx.init(PARAMS), jnp.float32(0.0))  # every operation by itself
        assert float(clip_threshold(probe, tx.init(PARAMS))) == 0.0


def test_l038_no_clip_stage_is_absent_with_a_reason():
    probe, reason = find_clip(chain(ADAM, RATE), PARAMS)
    assert probe is None
    assert reason == "no stage clips by the global norm (adam, lr)"


@pytest.mark.parametrize(
    "tx", [optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), optax.MultiSteps(chain(CLIP, ADAM, RATE), 2)]
)
def test_stages_that_cannot_be_seen_are_absent_with_a_reason(tx):
    probe, reason = find_clip(tx, PARAMS)
    assert probe is None
    assert "pj.chain" in reason


OTHERS = {
    "elementwise": optax.clip(1.0),
    "block_rms": optax.clip_by_block_rms(1.0),
    "adaptive": optax.adaptive_grad_clip(0.01),
    "normalize": optax.normalize_by_update_norm(),
    "adam": optax.scale_by_adam(),
    "zero": optax.set_to_zero(),
    "warm_up": optax.scale_by_schedule(lambda count: 0.0 * count),
    "apply_every": optax.apply_every(3),
    "whole_tree_rms": optax.stateless(
        lambda u, p: jax.tree.map(lambda x: x * jnp.minimum(1.0, jnp.sqrt(optax.tree.size(u)) / optax.tree.norm(u)), u)
    ),
    "of_params": optax.stateless(
        lambda u, p: jax.tree.map(lambda x: x * jnp.minimum(1.0, optax.tree.norm(p) / optax.tree.norm(u)), u)
    ),
    "of_largest_param": optax.stateless(
        lambda u, p: jax.tree.map(lambda x: x * jnp.minimum(1.0, optax.tree.max(p) / optax.tree.norm(u)), u)
    ),
    "never": optax.clip_by_global_norm(jnp.inf),
    "fails": optax.stateless(lambda u, p: 1 / 0),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_stages_are_not_taken_for_it(name):
    assert find_clip(chain(("stage", OTHERS[name]), RATE), PARAMS)[0] is None


def test_scheduled_threshold_is_read_at_its_state():
    inject = optax.inject_hyperparams(optax.clip_by_global_norm)
    tx = chain(("clip", inject(max_norm=lambda count: 2.0 / (count + 1))), ADAM, RATE)
    probe, _ = find_clip(tx, PARAMS)
    state, seen = tx.init(PARAMS), []
    for _ in range(3):
        seen.append((float(clip_threshold(probe, state)), bool(clipped(probe, state, jnp.float32(1.5)))))
        _, state = tx.update(gradients(1.5), state, PARAMS)
    assert [hit for _, hit in seen] == [False, True, True]
    np.testing.assert_allclose([threshold for threshold, _ in seen], [2.0, 1.0, 2 / 3], rtol=1e-6)


def test_scalings_before_the_clip_count():
    tx = chain(("minus", optax.scale(-1.0)), ("half", optax.scale_by_schedule(lambda count: 0.5)), CLIP, RATE)
    assert not ask(tx, 1.9)
    assert ask(tx, 2.1)


@pytest.mark.parametrize("stage", [ADAM, ("nan", optax.zero_nans()), ("elementwise", optax.clip(1.0))])
def test_a_changed_gradient_is_not_claimed(stage):
    probe, reason = find_clip(chain(stage, CLIP, RATE), PARAMS)
    assert probe is None
    assert "put the clip first" in reason
    assert repr(stage[0]) in reason


def test_l034_frozen_leaves_count_unless_they_are_zeroed_before():
    """Trained norm 3, frozen norm 40: which of them the clip sees depends on where the leaves are frozen."""
    labels = {"a": "train", "b": "freeze"}
    rest = optax.multi_transform({"train": optax.sgd(0.1), "freeze": optax.set_to_zero()}, labels)
    grads = {"a": jnp.float32([3.0, 0.0, 0.0]), "b": jnp.float32([[40.0, 0.0], [0.0, 0.0]])}
    clip = ("clip", optax.clip_by_global_norm(5.0))
    for tx, counts, norm in (
        (chain(FREEZE, clip, RATE), False, 3.0),
        (chain(clip, ("rest", rest)), True, np.hypot(3, 40)),
    ):
        probe, _ = find_clip(tx, PARAMS)
        assert probe.counts_frozen == counts
        updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
        was_clipped = global_norm(updates) < 0.1 * 3.0 * (1 - 1e-6)
        assert ask(tx, norm) == was_clipped == counts
        np.testing.assert_array_equal(updates["b"], 0.0)


def test_partly_frozen_is_not_claimed():
    rest = optax.masked(optax.set_to_zero(), {"a": True, "b": False})
    probe, reason = find_clip(chain(FREEZE, CLIP, ("rest", rest)), PARAMS)
    assert probe is None
    assert "neither" in reason


def test_the_first_clip_is_meant():
    tx = chain(CLIP, ADAM, RATE, ("update_clip", optax.clip_by_global_norm(0.1)))
    assert find_clip(tx, PARAMS)[0].index == 0


def test_found_from_shapes_and_inside_a_trace():
    tx = chain(CLIP, ADAM, RATE)
    shapes = jax.eval_shape(lambda: PARAMS)
    seen = []
    jax.jit(lambda x: (seen.append(find_clip(tx, shapes)[0].index), x)[1])(1.0)
    assert seen == [0]
