"""The rate used at a step, from whatever keeps it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from probes_jax.observe.chain import chain
from probes_jax.observe.learning_rate import find_learning_rate, learning_rates

WARM_UP = optax.linear_schedule(0.0, 0.2, 2)
PARAMS = {"a": jnp.ones((3,)), "b": jnp.ones((2,))}


def ours():
    return chain(("adam", optax.scale_by_adam()), ("lr", optax.scale_by_learning_rate(WARM_UP)))


def injected():
    return optax.inject_hyperparams(optax.adamw)(learning_rate=WARM_UP)


OPTIMIZERS = {
    "chain": ours,
    "inject": injected,
    "inject_chain": lambda: optax.inject_hyperparams(lambda learning_rate: chain(("lr", optax.scale(learning_rate))))(
        WARM_UP
    ),
    "stage_injects": lambda: chain(("all", injected())),
    "inside_optax_chain": lambda: optax.chain(optax.zero_nans(), ours()),
    "inject_inside": lambda: optax.chain(optax.clip_by_global_norm(1.0), injected()),
    "masked": lambda: optax.masked(ours(), {"a": True, "b": False}),
    "frozen": lambda: optax.multi_transform({"t": ours(), "f": optax.set_to_zero()}, {"a": "t", "b": "f"}),
    "apply_if_finite": lambda: optax.apply_if_finite(ours(), 2),
    "lookahead_free": lambda: optax.named_chain(("inner", ours()), ("id", optax.identity())),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_l144_series_is_the_rate_of_each_step(name):
    tx = OPTIMIZERS[name]()
    state = tx.init(PARAMS)
    probe, reason = find_learning_rate(jax.eval_shape(tx.init, PARAMS))
    assert probe is not None
    assert reason == ""

    @jax.jit
    def step(state):
        updates, after = tx.update(PARAMS, state, PARAMS)
        return after, probe.read(state, after), updates

    rates, fresh = [], []
    for _ in range(3):
        state, rate, _ = step(state)
        rates.append(rate.value)
        fresh.append(bool(rate.fresh))
    np.testing.assert_array_equal(np.asarray(rates), np.float32([0.0, 0.1, 0.2]))
    assert fresh == [True] * 3


@pytest.mark.parametrize("inner", [ours, injected], ids=["chain", "inject"])
def test_multi_steps_applies_at_its_boundaries(inner):
    tx = optax.MultiSteps(inner(), 2)
    state, seen, update = tx.init(PARAMS), [], jax.jit(tx.update)
    for _ in range(6):
        _, after = update(PARAMS, state, PARAMS)
        rate = learning_rates(state, after)[""]
        seen.append((bool(rate.fresh), round(float(rate.value), 6) if rate.fresh else None))
        state = after
    assert seen == [(False, None), (True, 0.0), (False, None), (True, 0.1), (False, None), (True, 0.2)]


def test_a_dropped_update_uses_no_rate():
    tx = optax.apply_if_finite(ours(), 5)
    before = tx.init(PARAMS)
    _, after = tx.update(jax.tree.map(lambda p: p * jnp.nan, PARAMS), before, PARAMS)
    assert not learning_rates(before, after)[""].fresh


def test_several_rates_read_as_the_largest():
    tx = optax.multi_transform(
        {"x": chain(("lr", optax.scale(0.5))), "y": chain(("lr", optax.scale(-2.0)))}, {"a": "x", "b": "y"}
    )
    before = tx.init(PARAMS)
    _, after = tx.update(PARAMS, before, PARAMS)
    probe, _ = find_learning_rate(before)
    assert len(probe.paths) == 2
    found = {label: float(rate.value) for label, rate in learning_rates(before, after).items()}
    assert found == {"": 2.0, "x": 0.5, "y": 2.0}


def test_a_group_that_waits_for_its_update_is_not_the_largest():
    """Its rate is an old one, or none yet."""
    slow = optax.MultiSteps(chain(("lr", optax.scale(0.75))), 3)
    tx = optax.multi_transform({"x": slow, "y": chain(("lr", optax.scale(0.5)))}, {"a": "x", "b": "y"})
    state, found = tx.init(PARAMS), []
    for _ in range(4):
        _, after = tx.update(PARAMS, state, PARAMS)
        rates = learning_rates(state, after)
        found.append((float(rates[""].value), bool(rates[""].fresh), bool(rates["x"].fresh)))
        state = after
    assert found == [(0.5, True, False), (0.5, True, False), (0.75, True, True), (0.5, True, False)]


@pytest.mark.parametrize("inner", [ours, injected], ids=["chain", "inject"])
@pytest.mark.parametrize("params", [PARAMS, nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))], ids=["dict", "nnx"])
def test_a_group_that_no_parameter_belongs_to_has_no_rate(inner, params):
    def groups(*names):
        return optax.multi_transform(dict.fromkeys(names, inner()), jax.tree.map(lambda _: "used", params))

    found = []
    for tx in (groups("used"), groups("used", "unused")):
        before = tx.init(params)
        _, after = jax.jit(tx.update)(params, before, params)
        assert jax.tree.structure(before) == jax.tree.structure(after)
        found.append({label: float(rate.value) for label, rate in learning_rates(before, after).items()})
    assert found[0] == found[1] and found[0].keys() == {""}, "one rate: neither the largest of two nor one by label"


def test_rates_without_a_label_are_numbered_and_no_label_breaks_a_name():
    def of(name):
        return {key: key == name for key in PARAMS}

    beside = optax.chain(*(optax.masked(chain(("lr", optax.scale(x))), of(n)) for n, x in (("a", 0.5), ("b", 2.0))))
    labelled = optax.multi_transform(
        {"the x/y": chain(("lr", optax.scale(0.5))), "1": chain(("lr", optax.scale(2.0)))}, {"a": "the x/y", "b": "1"}
    )
    for tx, wanted in ((beside, {"0": 0.5, "1": 2.0}), (labelled, {"the_x_y": 0.5, "1": 2.0})):
        before = tx.init(PARAMS)
        found = learning_rates(before, tx.update(PARAMS, before, PARAMS)[1])
        assert {label: float(rate.value) for label, rate in found.items() if label} == wanted


def test_scan_and_bf16_hyperparameters():
    tx = optax.inject_hyperparams(optax.adamw, hyperparam_dtype=jnp.bfloat16)(learning_rate=0.1)

    def body(state, _):
        _, after = tx.update(PARAMS, state, PARAMS)
        return after, learning_rates(state, after)[""]

    _, rates = jax.lax.scan(body, tx.init(PARAMS), None, length=3)
    assert rates.value.dtype == jnp.float32
    # The rate that Adam multiplied by: rounded to the dtype it was injected in.
    np.testing.assert_array_equal(rates.value, np.asarray(jnp.bfloat16([0.1, 0.1, 0.1]), np.float32))


@pytest.mark.parametrize(
    "tx",
    [
        optax.adamw(WARM_UP),
        optax.sgd(0.1),
        chain(("adamw", optax.adamw(1e-3))),
        optax.inject_hyperparams(optax.clip_by_global_norm)(max_norm=1.0),
    ],
)
def test_absent_with_a_reason_that_says_what_to_do(tx):
    state = tx.init(PARAMS)
    probe, reason = find_learning_rate(state)
    assert probe is None
    assert "pj.chain" in reason
    assert learning_rates(state, tx.update(PARAMS, state, PARAMS)[1]) == {}


def test_another_state_is_refused():
    probe, _ = find_learning_rate(ours().init(PARAMS))
    other = optax.chain(injected(), optax.identity()).init(PARAMS)
    with pytest.raises(ValueError, match="expected"):
        probe.read(other, other)
