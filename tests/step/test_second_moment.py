"""The optimizer's second moment, wherever optax keeps it, against the sorted values of the state itself."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import probes_jax as pj
from probes_jax.spec.orders import ERROR
from tests.stats.test_orders import check
from tests.step.small import Layers, NNXModel, make_batch, make_state, make_tx, only

pytestmark = pytest.mark.slow  # together; the second pair of Python and JAX goes without

PLAN = only("second_moment", scan_every=2)
STATS = {"p10", "p50", "p90", "p99", "spread", "max", "zero_fraction"}


def labels(params):
    return {name: "b" if name == "embed" else "a" for name in params}


def is_matrix(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


# Each with how its state leads to the tree of second moments.
KEPT = {
    "chain": (make_tx, lambda s: s.stages[1].nu),
    "adamw": (lambda: optax.adamw(1e-2), lambda s: s[0].nu),
    "rmsprop": (lambda: optax.rmsprop(1e-2), lambda s: s[0].nu),
    "adagrad": (lambda: optax.adagrad(1e-2), lambda s: s[0].sum_of_squares),
    "inject": (lambda: optax.inject_hyperparams(optax.adam)(1e-2), lambda s: s.inner_state[0].nu),
    "masked": (lambda: optax.masked(optax.adam(1e-2), is_matrix), lambda s: s.inner_state[0].nu),
    "several": (lambda: optax.MultiSteps(optax.adam(1e-2), 1), lambda s: s.inner_opt_state[0].nu),
    "partition": (
        lambda: optax.partition({"a": optax.adam(1e-2), "b": optax.sgd(1e-2)}, labels),
        lambda s: s.inner_states["a"].inner_state[0].nu,
    ),
}


ONE = Layers(scan=False, layers=1)


def run(tx=None, batch=None, steps=1, **kwargs):
    batch = make_batch() if batch is None else batch
    state = make_state(tx=make_tx() if tx is None else tx, batch=batch, **{"plan": PLAN, **kwargs})
    for _ in range(steps):
        state, report = pj.monitored_train_step(state, batch)
    return state, report


def moments_of(scalars):
    found: dict[str, dict[str, float]] = {}
    for name, value in scalars.items():
        if name.startswith("opt/second_moment/"):
            path, stat = name.removeprefix("opt/second_moment/").rsplit("/", 1)
            found.setdefault(path, {})[stat] = value
    return found


@pytest.mark.parametrize("kind", KEPT)
def test_it_is_found_wherever_it_is_kept(kind):
    tx, kept = KEPT[kind]
    state, report = run(tx(), model=ONE)
    found, tree = moments_of(report.scalars()), kept(state.opt_state)
    leaves = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in jax.tree.leaves_with_path(tree)}
    leaves = {name.replace("block_0", "block[0]"): x for name, x in leaves.items()}
    assert leaves
    assert set(found) == set(leaves)
    for name, x in leaves.items():
        if np.any(x):
            assert set(found[name]) == STATS
            check(found[name], x)
        else:
            assert set(found[name]) == {"max", "zero_fraction"}


def test_adafactor_has_rows_and_columns():
    state, report = run(optax.adafactor(1e-2, min_dim_size_to_factor=8))
    found, kept = moments_of(report.scalars()), state.opt_state[0]
    assert "head/kernel" not in found
    check(found["head/kernel/v_row"], kept.v_row["head"]["kernel"])
    check(found["head/kernel/v_col"], kept.v_col["head"]["kernel"])
    check(found["head/bias"], kept.v["head"]["bias"])


def test_an_optimizer_without_one_says_so_and_a_plan_can_do_without():
    _, report = run(optax.sgd(1e-2), model=ONE)
    assert not moments_of(report.scalars())
    assert "no second moment" in dict(report.coverage.missing)["opt/second_moment"]
    _, report = run(model=ONE, plan=only("second_moment", without=("second_moment",)))
    assert not moments_of(report.scalars())
    assert "Plan without" in dict(report.coverage.missing)["second_moment"]
    _, light = run(model=ONE, steps=2)
    assert light.layout.program == "light"
    assert not moments_of(light.scalars())
    assert "opt/second_moment" not in dict(light.coverage.missing)


def test_the_histogram_stays_on_the_device():
    _, report = run()
    words = [entry for entry in report.layout.entries if "second_moment" in entry.key]
    assert {entry.kind for entry in words} == {"orders", "scalar"}
    assert report.layout.size < 4096


@pytest.mark.parametrize("tx", [make_tx, lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8)])
def test_scanned_layers_have_a_row_each(tx):
    _, report = run(tx(), model=Layers(scan=False, layers=2))
    wanted = moments_of(report.scalars())
    params = jax.tree.map(np.array, make_state(model=Layers(scan=False, layers=2)).params)
    blocks = [params.pop(f"block_{index}") for index in range(2)]
    variables = {"params": {**params, "block": jax.tree.map(lambda *x: np.stack(x), *blocks)}}
    _, report = run(tx(), model=Layers(scan=True, layers=2), variables=variables)
    found = moments_of(report.scalars())
    assert set(found) == set(wanted)
    for name, stats in wanted.items():
        assert found[name] == {stat: pytest.approx(value, rel=2 * ERROR, abs=0.054) for stat, value in stats.items()}


def test_an_nnx_model():
    state, report = run(model=NNXModel(nnx.Rngs(0)))
    found = moments_of(report.scalars())
    check(found["block[1]/up/kernel"], state.opt_state.stages[1].nu["block"]["1"]["up"]["kernel"])
