"""The named chain: updates as optax's, bit for bit; a state of fixed form; the rate that was used."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.core import FrozenDict

from probes_jax.observe.chain import NO_RATE, Chain, ChainState, chain

pytestmark = pytest.mark.slow  # together; the second pair of Python and JAX goes without

WARM_UP = optax.linear_schedule(0.0, 0.2, 2)  # 0, 0.1, 0.2
STAGES = (
    ("clip", optax.clip_by_global_norm(1.0)),
    ("adam", optax.scale_by_adam(b2=0.95)),
    ("decay", optax.add_decayed_weights(0.1)),
    ("lr", optax.scale_by_learning_rate(lambda count: 0.1 * (count + 1))),
)


def plain(stages=STAGES):
    return optax.chain(*(tx for _, tx in stages))


def make_params(dtype=jnp.float32):
    key = jax.random.key(0)
    return {"a": jax.random.normal(key, (3, 2)).astype(dtype), "b": {"c": jnp.ones((4,), dtype)}}


def gradients(params, step):
    return jax.tree.map(lambda p: (jnp.sin(p.astype(jnp.float32) * (step + 3)) * 2).astype(p.dtype), params)


def run(tx, params, steps=4, jit=True, **extra_args):
    update = jax.jit(tx.update) if jit else tx.update
    state, history = tx.init(params), []
    for step in range(steps):
        updates, state = update(gradients(params, step), state, params, **extra_args)
        params = optax.apply_updates(params, updates)
        history.append((updates, params))
    return history, state


def assert_bit_equal(left, right):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), left, right)
    assert [leaf.dtype for leaf in jax.tree.leaves(left)] == [leaf.dtype for leaf in jax.tree.leaves(right)]


def assert_same_form(before, after):
    assert jax.tree.structure(before) == jax.tree.structure(after)
    form = [(leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)) for leaf in jax.tree.leaves(before)]
    assert form == [(leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)) for leaf in jax.tree.leaves(after)]


TREES = {
    "dict": make_params(),
    "bf16": make_params(jnp.bfloat16),
    "mixed": {"a": jnp.ones((2,), jnp.float32), "b": jnp.full((3,), 0.3, jnp.bfloat16)},
    "frozen_dict": FrozenDict(make_params()),
    "none": {"a": jnp.ones((2,)), "b": None},
    "masked_node": {"a": jnp.ones((2,)), "b": optax.MaskedNode()},
    "array": jnp.arange(3.0),
}


@pytest.mark.parametrize(("name", "jit"), [*((name, True) for name in TREES), ("dict", False)])
def test_updates_equal_optax_bit_for_bit(name, jit):
    ours, state = run(chain(*STAGES), TREES[name], jit=jit)
    theirs, inner = run(plain(), TREES[name], jit=jit)
    assert_bit_equal(ours, theirs)
    assert_bit_equal(state.stages, inner)
    assert int(state.stamp) == 4


def test_updates_equal_optax_with_x64():
    with jax.enable_x64(True):
        params = {"a": jnp.linspace(0, 1, 5, dtype=jnp.float64), "b": jnp.ones((2,), jnp.float32)}
        ours, state = run(chain(*STAGES), params)
        theirs, _ = run(plain(), params)
        assert_bit_equal(ours, theirs)
        assert_same_form(chain(*STAGES).init(params), state)
        assert state.learning_rate.dtype == jnp.float32
        assert state.stamp.dtype == jnp.uint32


@pytest.mark.parametrize(
    ("stages", "extra_args"),
    [
        ((("polyak", optax.scale_by_polyak()), ("lr", optax.scale(0.5))), {"value": jnp.float32(2.0)}),
        (
            (("sgd", optax.sgd(0.1)), ("plateau", optax.contrib.reduce_on_plateau(patience=1))),
            {"value": jnp.float32(1.0)},
        ),
        ((("lr", optax.scale(-0.5)),), {"unused": jnp.float32(1.0)}),
    ],
    ids=["polyak", "plateau", "ignored"],
)
def test_extra_arguments_reach_the_stages(stages, extra_args):
    ours, _ = run(chain(*stages), make_params(), **extra_args)
    theirs, _ = run(plain(stages), make_params(), **extra_args)
    assert_bit_equal(ours, theirs)


def test_linesearch_arguments_reach_the_stage():
    def loss(p):
        return jnp.sum((p - 3.0) ** 2)

    stages = (("direction", optax.scale(-1.0)), ("search", optax.scale_by_backtracking_linesearch(10)))
    result = []
    for tx in (chain(*stages), plain(stages)):
        params = jnp.arange(3.0)
        value, grad = jax.value_and_grad(loss)(params)
        updates, _ = tx.update(grad, tx.init(params), params, value=value, grad=grad, value_fn=loss)
        result.append(updates)
    assert_bit_equal(*result)


def wrapped(name, inner):
    labels = {"a": "train", "b": {"c": "freeze"}}
    mask = {"a": True, "b": {"c": False}}
    return {
        "bare": lambda: inner,
        "multi_steps": lambda: optax.MultiSteps(inner, 2),
        "masked": lambda: optax.masked(inner, mask),
        "multi_transform": lambda: optax.multi_transform({"train": inner, "freeze": optax.set_to_zero()}, labels),
        "apply_if_finite": lambda: optax.apply_if_finite(inner, 3),
        "optax_chain": lambda: optax.chain(optax.zero_nans(), inner),
        "nested": lambda: chain(("inner", inner)),
    }[name]()


WRAPPERS = ("bare", "multi_steps", "masked", "multi_transform", "apply_if_finite", "optax_chain", "nested")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, jnp.float32) for name in WRAPPERS), ("bare", jnp.bfloat16), ("multi_steps", jnp.bfloat16)],
)
def test_state_keeps_its_form_and_updates_under_wrappers(name, dtype):
    params = make_params(dtype)
    tx, reference = wrapped(name, chain(*STAGES)), wrapped(name, plain())
    ours, after = run(tx, params)
    theirs, _ = run(reference, params)
    assert_bit_equal(ours, theirs)
    assert_same_form(tx.init(params), after)


@pytest.mark.parametrize("name", ["bare", "multi_steps", "multi_transform"])
def test_scan(name):
    tx, params = wrapped(name, chain(*STAGES)), make_params()

    @jax.jit
    def train(state):
        def body(carry, step):
            return tx.update(gradients(params, step), carry, params)[::-1]

        return jax.lax.scan(body, state, jnp.arange(4))

    state, _ = train(tx.init(params))
    expected, update = tx.init(params), jax.jit(tx.update)
    for step in range(4):
        _, expected = update(gradients(params, step), expected, params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-5, atol=1e-6), state, expected
    )


def test_l144_rate_is_read_before_the_count_is_raised():
    tx = chain(("adam", optax.scale_by_adam()), ("lr", optax.scale_by_learning_rate(WARM_UP)))
    params = make_params()
    state, seen = tx.init(params), []
    assert float(state.learning_rate) == NO_RATE
    for step in range(3):
        assert int(state.stamp) == step
        _, state = jax.jit(tx.update)(gradients(params, step), state, params)
        seen.append(np.float32(state.learning_rate))
    np.testing.assert_array_equal(seen, np.float32([0.0, 0.1, 0.2]))


def test_stamp_stands_still_between_updates_of_multi_steps():
    tx = optax.MultiSteps(chain(*STAGES), 3)
    state, stamps, rates, update = tx.init(make_params()), [], [], jax.jit(tx.update)
    for step in range(7):
        _, state = update(gradients(make_params(), step), state, make_params())
        stamps.append(int(state.inner_opt_state.stamp))
        rates.append(float(state.inner_opt_state.learning_rate))
    assert stamps == [0, 0, 1, 1, 1, 2, 2]
    np.testing.assert_allclose(rates, [NO_RATE, NO_RATE, 0.1, 0.1, 0.1, 0.2, 0.2], rtol=1e-6)


def test_stamp_stands_still_when_the_update_is_dropped():
    tx, params = optax.apply_if_finite(chain(*STAGES), 5), make_params()
    _, state = tx.update(jax.tree.map(lambda p: p * jnp.nan, params), tx.init(params), params)
    assert int(state.inner_state.stamp) == 0


RATE_CASES = {
    "schedule_and_sign": ([("s", optax.scale_by_schedule(lambda c: 0.25)), ("minus", optax.scale(-1.0))], 0.25),
    "product": (
        [("adam", optax.scale_by_adam()), ("half", optax.scale(0.5)), ("lr", optax.scale_by_learning_rate(0.5))],
        0.25,
    ),
    "unscale_before_adam": (
        [("unscale", optax.scale(1 / 128)), ("adam", optax.scale_by_adam()), ("lr", optax.scale_by_learning_rate(0.5))],
        0.5,
    ),
    "sgd_with_gradient_scale": (
        [
            ("half", optax.scale(0.5)),
            ("clip", optax.clip_by_global_norm(1.0)),
            ("lr", optax.scale_by_learning_rate(0.5)),
        ],
        0.25,
    ),
    "rate_before_momentum": ([("lr", optax.scale_by_learning_rate(0.5)), ("momentum", optax.trace(0.9))], 0.5),
    "clip_after_rate": (
        [
            ("adam", optax.scale_by_adam()),
            ("lr", optax.scale_by_learning_rate(0.5)),
            ("clip", optax.clip_by_global_norm(0.1)),
        ],
        0.5,
    ),
    "decay_after_rate": (
        [
            ("lion", optax.scale_by_lion()),
            ("lr", optax.scale_by_learning_rate(0.5)),
            ("decay", optax.masked(optax.add_decayed_weights(0.1), {"a": True, "b": False})),
        ],
        0.5,
    ),
    "injected": ([("lr", optax.inject_hyperparams(optax.scale_by_learning_rate)(learning_rate=lambda c: 0.5))], 0.5),
    "zero": ([("adam", optax.scale_by_adam()), ("lr", optax.scale_by_learning_rate(0.0))], 0.0),
    "not_finite": ([("lr", optax.scale_by_learning_rate(lambda c: jnp.nan * c))], np.nan),
}


@pytest.mark.parametrize("name", RATE_CASES)
def test_rate_is_the_product_of_the_scalings_that_reach_the_parameters(name):
    stages, expected = RATE_CASES[name]
    _, state = run(chain(*stages), make_params(), steps=1)
    np.testing.assert_allclose(np.float64(state.learning_rate), expected, rtol=1e-6)


def test_rate_of_plateau_follows_the_loss():
    tx = chain(
        ("lr", optax.scale_by_learning_rate(1.0)), ("plateau", optax.contrib.reduce_on_plateau(factor=0.5, patience=1))
    )
    params, rates = make_params(), []
    state = tx.init(params)
    for _ in range(4):
        updates, state = tx.update(params, state, params, value=jnp.float32(1.0))
        rates.append(float(state.learning_rate))
        np.testing.assert_allclose(updates["a"], -rates[-1] * params["a"], rtol=1e-6)
    assert min(rates) < 1.0


@pytest.mark.parametrize(
    "stage",
    [
        optax.identity(),
        optax.scale_by_adam(),
        optax.adamw(1e-3),
        optax.masked(optax.scale(0.1), {"a": True, "b": False}),
    ],
)
def test_no_rate_without_a_scaling_stage(stage):
    _, state = run(chain(("only", stage)), make_params(), steps=2)
    assert state.learning_rate is None
    assert int(state.stamp) == 2


def test_a_rate_changed_by_hand_is_the_rate_read():
    tx = chain(
        ("adam", optax.scale_by_adam()),
        ("lr", optax.inject_hyperparams(optax.scale_by_learning_rate)(learning_rate=0.5)),
    )
    params = make_params()
    state = tx.init(params)
    state.stages[1].hyperparams["learning_rate"] = jnp.float32(0.125)
    _, state = tx.update(params, state, params)
    assert float(state.learning_rate) == 0.125


def test_chain_built_from_traced_hyperparameters():
    def make(learning_rate, scale):
        return chain(
            ("s", optax.scale(scale)),
            ("adam", optax.scale_by_adam()),
            ("lr", optax.scale_by_learning_rate(learning_rate)),
        )

    tx = optax.inject_hyperparams(make)(learning_rate=WARM_UP, scale=0.01)
    params = make_params()
    state, seen = tx.init(params), []
    for step in range(3):
        _, after = jax.jit(tx.update)(gradients(params, step), state, params)
        assert_same_form(state, after)
        state = after
        seen.append(np.float32(state.inner_state.learning_rate))
    np.testing.assert_array_equal(seen, np.float32([0.0, 0.1, 0.2]))


def test_works_under_strict_promotion_and_debug_nans():
    params = make_params()
    with jax.numpy_dtype_promotion("strict"):  # optax's Adam itself does not work there
        tx = chain(("s", optax.scale(2.0)), ("momentum", optax.trace(0.9)), ("lr", optax.scale_by_learning_rate(0.25)))
        _, state = jax.jit(tx.update)(params, tx.init(params), params)
    assert float(state.learning_rate) == 0.5
    with jax.debug_nans(True):
        tx = optax.MultiSteps(chain(*STAGES), 2)
        state = jax.jit(tx.init)(params)
        jax.block_until_ready(jax.jit(tx.update)(params, state, params))


def test_saves_and_restores_with_orbax(tmp_path):
    params = make_params()
    for name, tx in {"rate": chain(*STAGES), "none": chain(("adam", optax.adam(1e-3)))}.items():
        _, state = run(tx, params)
        assert all(leaf.size > 0 for leaf in jax.tree.leaves(state))
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / name, state)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(tmp_path / name, jax.eval_shape(tx.init, params))
        assert isinstance(restored, ChainState)
        assert_bit_equal(state, restored)


def test_optax_finds_the_parameters_in_the_state():
    tx, params = chain(*STAGES), make_params()
    state = optax.tree_map_params(tx, lambda leaf: jnp.zeros_like(leaf) + 7, tx.init(params))
    assert float(state.stages[1].mu["a"][0, 0]) == 7.0
    assert int(state.stamp) == 0


def test_is_an_optax_transformation_that_knows_its_stages():
    tx = chain(*STAGES)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    assert isinstance(tx, Chain)
    assert [stage.name for stage in tx.stages] == ["clip", "adam", "decay", "lr"]
    init, update = tx
    assert hash(tx) == hash((init, update))


@pytest.mark.parametrize(
    ("stages", "error", "match"),
    [
        ((), ValueError, "at least one"),
        ((optax.scale(1.0),), TypeError, r'argument 1 .*write \("name", transformation\)'),
        (((optax.scale(1.0), "lr"),), TypeError, "name comes first"),
        ((("lr", "adam"),), TypeError, "name comes first"),
        (
            ([("a", optax.scale(1.0)), ("b", optax.scale(1.0)), ("c", optax.scale(1.0))],),
            TypeError,
            r"chain\(\*pairs\)",
        ),
        ((("a", optax.scale(1.0), 3),), TypeError, "must be a pair"),
        (("lr",), TypeError, "must be a pair"),
        ((("a", optax.scale_by_adam),), TypeError, "call it"),
        ((("a", 3.0),), TypeError, "got float"),
        ((("", optax.scale(1.0)),), ValueError, "may not be empty"),
        ((("a/b", optax.scale(1.0)),), ValueError, "'a/b'"),
        ((("a[0]", optax.scale(1.0)),), ValueError, "brackets"),
        ((("{a}", optax.scale(1.0)),), ValueError, "braces"),
        (((3, optax.scale(1.0)),), ValueError, "got 3"),
        ((("a", optax.scale(1.0)), ("a", optax.scale(1.0))), ValueError, "unique"),
    ],
)
def test_mistakes_are_named(stages, error, match):
    with pytest.raises(error, match=match):
        chain(*stages)


def test_a_foreign_state_is_named():
    tx = chain(*STAGES)
    with pytest.raises(TypeError, match="this chain's init"):
        tx.update(jnp.ones(3), plain().init(jnp.ones(3)), jnp.ones(3))
    with pytest.raises(ValueError, match=r"1 stages, the chain has 4"):
        tx.update(jnp.ones(3), chain(("lr", optax.scale(1.0))).init(jnp.ones(3)), jnp.ones(3))
