"""Which stages only multiply by a number, against what they really do to arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from probes_jax.observe.marks import ZERO
from probes_jax.observe.stage import Stage, ignores_scale, is_scaling, scale_factor, stage_factors

RAMP = optax.linear_schedule(0.0, 0.2, 2)
JOINED = optax.join_schedules([RAMP, optax.cosine_decay_schedule(0.2, 50)], [5])


def as_stage(tx):
    tx = optax.with_extra_args_support(tx)
    return Stage("stage", tx.init, tx.update)


def stateless(function):
    return optax.stateless(lambda updates, params: jax.tree.map(function, updates, params))


SCALINGS = {
    "scale": optax.scale(-0.3),
    "zero": optax.scale_by_learning_rate(0.0),
    "rate": optax.scale_by_learning_rate(0.1),
    "array_rate": optax.scale_by_learning_rate(jnp.float32(0.1)),
    "ramp": optax.scale_by_learning_rate(RAMP),
    "schedule": optax.scale_by_schedule(lambda count: 1.0 / (count + 1)),
    "cosine": optax.scale_by_learning_rate(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)),
    "piecewise": optax.scale_by_schedule(optax.piecewise_constant_schedule(0.1, {3: 0.1})),
    "joined": optax.scale_by_schedule(JOINED),
    "branching": optax.scale_by_schedule(lambda c: jax.lax.cond(c > 3, lambda: 0.5, lambda: 0.25)),
    "loop": optax.scale_by_schedule(lambda c: jax.lax.fori_loop(0, 3, lambda i, x: x * 0.5, 1.0 + c)),
    "injected": optax.inject_hyperparams(optax.scale_by_learning_rate)(learning_rate=RAMP),
    "injected_number": optax.inject_hyperparams(optax.scale)(step_size=0.1),
    "plateau": optax.contrib.reduce_on_plateau(),
    "two": optax.chain(optax.scale(0.5), optax.scale_by_learning_rate(RAMP)),
    "sgd": optax.sgd(0.1),
    "jitted": stateless(jax.jit(lambda u, p: -(u / 4.0))),
    "sum_of_itself": stateless(lambda u, p: u + 0.5 * u - 2.0 * u),
    "cast": stateless(lambda u, p: (u.astype(jnp.bfloat16) * 0.5).astype(u.dtype)),
}

NOT_SCALINGS = {
    "identity": optax.identity(),
    "adam": optax.scale_by_adam(),
    "momentum": optax.trace(0.9),
    "ema": optax.ema(0.9),
    "apply_every": optax.apply_every(2),
    "decay": optax.add_decayed_weights(0.1),
    "clip": optax.clip(1.0),
    "clip_norm": optax.clip_by_global_norm(1e6),
    "clip_block": optax.clip_by_block_rms(1.0),
    "adaptive": optax.adaptive_grad_clip(0.1),
    "centralize": optax.centralize(),
    "param_rms": optax.scale_by_param_block_rms(),
    "trust": optax.scale_by_trust_ratio(),
    "noise": optax.add_noise(0.1, 0.1, key=0),
    "zero_nans": optax.zero_nans(),
    "normalize": optax.normalize_by_update_norm(),
    "sign": optax.scale_by_sign(),
    "masked": optax.masked(optax.scale(0.1), {"a": True, "b": False}),
    "by_rank": stateless(lambda u, p: u * (0.1 if u.ndim > 1 else 0.2)),
    "by_element": stateless(lambda u, p: u * jnp.linspace(0.1, 1.0, u.size).reshape(u.shape)),
    "affine": stateless(lambda u, p: 2.0 * u + 1.0),
    "of_its_sign": stateless(lambda u, p: jnp.where(u > 0, u, 0.5 * u)),
    "branch_on_update": stateless(lambda u, p: jax.lax.cond(u.sum() > 0, lambda x: 0.5 * x, lambda x: 0.25 * x, u)),
    "integers": stateless(lambda u, p: (u * 2.0).astype(jnp.int32).astype(u.dtype)),
    "reversed": stateless(lambda u, p: jnp.flip(u)),
    "coupled": optax.stateless(lambda u, p: jax.tree.map(lambda x: x * jax.tree.leaves(u)[0].ravel()[0], u)),
    "swapped": optax.stateless(lambda u, p: jax.tree.unflatten(jax.tree.structure(u), jax.tree.leaves(u)[::-1])),
    "fails": optax.stateless(lambda u, p: 1 / 0),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_scalings_are_found_and_multiply_arrays_by_their_factor(name):
    stage = as_stage(SCALINGS[name])
    assert is_scaling(stage)
    params = {"m": jnp.linspace(-2.0, 3.0, 6).reshape(2, 3), "v": jnp.float32([5.0, -1e-3])}
    state, extra_args = stage.init(params), {"value": jnp.float32(1.0)}
    for _ in range(3):
        factor = np.float64(scale_factor(stage, state, extra_args))
        updates, state = stage.update(params, state, params, **extra_args)
        for key, leaf in params.items():  # the slow form: what the stage did to every element
            np.testing.assert_allclose(
                np.float64(updates[key]), factor * np.float64(leaf), rtol=8e-3 if name == "cast" else 1e-6
            )


@pytest.mark.parametrize("name", NOT_SCALINGS)
def test_everything_else_is_not_a_scaling(name):
    assert not is_scaling(as_stage(NOT_SCALINGS[name]))


@pytest.mark.parametrize("name", ["ramp", "injected", "adam", "clip_norm"])
def test_the_answer_is_the_same_while_tracing(name):
    tx = {**SCALINGS, **NOT_SCALINGS}[name]
    seen = []
    jax.jit(lambda x: (seen.append(is_scaling(as_stage(tx))), x)[1])(1.0)
    assert seen == [is_scaling(as_stage(tx))]


def test_a_traced_rate_is_a_scaling():
    seen = []
    jax.jit(lambda rate: (seen.append(is_scaling(as_stage(optax.scale_by_learning_rate(rate)))), rate)[1])(0.1)
    assert seen == [True]


def test_factors_of_leaves_of_one_shape():
    tree = {"a": jnp.ones(2), "b": jnp.ones(2), "c": jnp.ones(2)}

    def factors(tx):
        return stage_factors(as_stage(tx), tree, tx.init(tree))

    swap = optax.stateless(lambda u, p: {"a": u["b"], "b": u["a"], "c": 2.0 * u["c"]})
    assert factors(swap) == [None, None, (("mul", 2.0),)]
    assert factors(optax.freeze({"a": False, "b": True, "c": False})) == [(), ZERO, ()]


IGNORES = {
    "adam": optax.scale_by_adam(),
    "rms": optax.scale_by_rms(),
    "adagrad": optax.scale_by_rss(),
    "lion": optax.scale_by_lion(),
    "sign": optax.scale_by_sign(),
    "adafactor": optax.scale_by_factored_rms(),
    "trust": optax.scale_by_trust_ratio(),
    "normalize": optax.normalize_by_update_norm(),
}
HEEDS = {
    "clip": optax.clip_by_global_norm(1.0),
    "elementwise": optax.clip(1.0),
    "momentum": optax.trace(0.9),
    "decay": optax.add_decayed_weights(0.1),
    "identity": optax.identity(),
    "zero": optax.set_to_zero(),
    "fails": optax.stateless(lambda u, p: 1 / 0),
}


@pytest.mark.parametrize("name", [*IGNORES, *HEEDS])
def test_ignores_scale(name):
    assert ignores_scale(as_stage({**IGNORES, **HEEDS}[name])) == (name in IGNORES)


def test_ignores_scale_while_tracing_a_hyperparameter():
    seen = []
    jax.jit(lambda b1: (seen.append(ignores_scale(as_stage(optax.scale_by_adam(b1=b1)))), b1)[1])(0.9)
    assert seen == [True]
