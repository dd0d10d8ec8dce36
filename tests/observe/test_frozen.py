"""Leaves that never move, against what the optimizer does to them in real updates."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict

from probes_jax.observe.chain import chain
from probes_jax.observe.frozen import frozen_leaves

PARAMS = {"head": jnp.ones((3,)), "trunk": {"w": jnp.full((2, 2), 0.5), "b": jnp.ones((2,))}}
MASK = {"head": False, "trunk": {"w": True, "b": True}}
LABELS = {"head": "train", "trunk": {"w": "freeze", "b": "freeze"}}
TRUNK = {"head": False, "trunk": {"w": True, "b": True}}
NONE = {"head": False, "trunk": {"w": False, "b": False}}
FREEZE = optax.freeze(MASK)


def split(inner):
    return optax.multi_transform({"train": inner, "freeze": optax.set_to_zero()}, LABELS)


FROZEN = {
    "multi_transform": split(optax.adam(1e-2)),
    "multi_transform_of_chain": split(chain(("adam", optax.scale_by_adam()), ("lr", optax.scale(-0.1)))),
    "selective": optax.selective_transform(optax.adamw(1e-2), freeze_mask=MASK),
    "freeze_last": optax.chain(optax.adamw(1e-2), FREEZE),
    "freeze_first": optax.chain(FREEZE, optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
    "freeze_first_of_chain": chain(("f", FREEZE), ("clip", optax.clip_by_global_norm(1.0)), ("adam", optax.adam(1e-2))),
    "freeze_before_momentum": optax.chain(FREEZE, optax.sgd(0.1, momentum=0.9, nesterov=True)),
    "freeze_before_lion": optax.chain(FREEZE, optax.scale_by_lion(), optax.scale(-0.1)),
    "no_decay": optax.chain(FREEZE, optax.adamw(1e-2, weight_decay=0.0)),
    "multi_steps": optax.MultiSteps(split(optax.adam(1e-2)), 2),
    "freeze_in_multi_steps": optax.MultiSteps(optax.chain(FREEZE, optax.adam(1e-2)), 2),
    "apply_if_finite": optax.apply_if_finite(split(optax.adam(1e-2)), 2),
    "injected": optax.inject_hyperparams(lambda learning_rate: optax.chain(FREEZE, optax.adam(learning_rate)))(
        learning_rate=optax.linear_schedule(0.0, 0.1, 2)
    ),
    "times_zero": optax.chain(
        optax.stateless(lambda u, p: {**u, "trunk": jax.tree.map(lambda x: x * 0.0, u["trunk"])}), optax.sgd(0.1)
    ),
}


class Delay(NamedTuple):
    last: dict
    before: dict


def delay_by_two():
    """Hands on the gradient of two steps ago: only the third update moves anything."""
    return optax.GradientTransformation(
        lambda params: Delay(optax.tree.zeros_like(params), optax.tree.zeros_like(params)),
        lambda updates, state, params=None: (state.before, Delay(updates, state.last)),
    )


TRAINED = {
    "delayed": delay_by_two(),
    "adam": optax.adam(1e-2),
    "warm_up_from_zero": optax.adam(optax.linear_schedule(0.0, 0.1, 2)),
    "only_decayed": optax.chain(FREEZE, optax.adamw(1e-2, weight_decay=0.1)),
    "decay_after": optax.chain(split(optax.sgd(0.1)), optax.add_decayed_weights(0.1)),
    "multi_steps": optax.MultiSteps(optax.adam(1e-2), 2),
    "noise": optax.chain(FREEZE, optax.add_noise(0.1, 0.1, key=0)),
    "masked_adam_passes_the_rest_through": optax.masked(optax.adam(1e-2), jax.tree.map(lambda m: not m, MASK)),
    "apply_every": optax.apply_every(2),
}


def moved(tx):
    """Which leaves six updates change, by running them. Non-zero gradients, from two different places."""
    params, state = PARAMS, tx.init(PARAMS)
    changed, update = NONE, jax.jit(tx.update)
    for step in range(6):
        grads = jax.tree.map(lambda p, s=step: p * (s + 1.0) + 0.25, PARAMS)
        updates, state = update(grads, state, params)
        changed = jax.tree.map(lambda c, u: c or bool(np.any(np.asarray(u) != 0)), changed, updates)
        params = optax.apply_updates(params, updates)
    return changed


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_leaves_are_found_and_do_not_move(name):
    assert frozen_leaves(FROZEN[name], PARAMS) == TRUNK
    assert moved(FROZEN[name]) == jax.tree.map(lambda frozen: not frozen, TRUNK)


@pytest.mark.parametrize("name", TRAINED)
def test_moving_leaves_are_not_frozen(name):
    assert frozen_leaves(TRAINED[name], PARAMS) == NONE
    assert all(jax.tree.leaves(moved(TRAINED[name])))


def test_from_shapes_alone_with_no_computation():
    shapes = jax.eval_shape(lambda: PARAMS)
    assert frozen_leaves(FROZEN["freeze_first"], shapes) == TRUNK
    huge = {
        "head": jax.ShapeDtypeStruct((3,), jnp.float32),
        "trunk": jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.bfloat16),
    }
    mask = {"head": False, "trunk": True}
    assert frozen_leaves(optax.chain(optax.freeze(mask), optax.adam(1e-2)), huge) == mask


def test_l034_trained_and_frozen_norms_stand_apart():
    grads = {
        "head": jnp.float32([3.0, 0.0, 0.0]),
        "trunk": {"w": jnp.zeros((2, 2)).at[0, 0].set(40.0), "b": jnp.zeros(2)},
    }
    frozen = frozen_leaves(FROZEN["multi_transform"], PARAMS)

    def norm(of_frozen):
        pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(frozen), strict=True)
        return np.sqrt(sum(float(np.sum(np.float64(g) ** 2)) for g, f in pairs if f == of_frozen))

    assert (norm(False), norm(True)) == (3.0, 40.0)


def test_structures_of_every_kind():
    assert frozen_leaves(optax.set_to_zero(), FrozenDict(PARAMS)) == FrozenDict(jax.tree.map(lambda _: True, PARAMS))
    assert frozen_leaves(optax.set_to_zero(), [jnp.ones(2), None, ()]) == [True, None, ()]
    assert frozen_leaves(optax.adam(0.1), {}) == {}


def test_extra_arguments_are_handed_on():
    tx = optax.chain(FREEZE, optax.sgd(0.1), optax.contrib.reduce_on_plateau())
    assert frozen_leaves(tx, PARAMS, value=jnp.float32(1.0)) == TRUNK
    with pytest.raises(TypeError, match="value"):
        frozen_leaves(tx, PARAMS)
