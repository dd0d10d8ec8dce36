"""Learning rates by layer, against the formula written out, for scanned and unrolled models of both frameworks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import probes_jax as pj
from tests.step.small import Layers, NNXModel, make_batch, make_state, only

pytestmark = pytest.mark.slow  # together; the second pair of Python and JAX goes without

GROUPS = [("embed|head", 0.5)]


def ones(params):
    return jax.tree.map(lambda x: jnp.ones_like(x), params)


def scaled(tx, params):
    """What a tree of ones becomes."""
    updates, state = tx.update(ones(params), tx.init(params), params)
    assert state == optax.EmptyState()
    return updates


def test_the_first_of_32_layers():
    params = {f"layers_{index}": {"kernel": jnp.ones((2, 3))} for index in range(32)}
    found = scaled(pj.layerwise_learning_rates(0.9), params)
    for index in range(32):
        assert np.allclose(found[f"layers_{index}"]["kernel"], 0.9 ** (31 - index), rtol=1e-6)
    stacked = scaled(
        pj.layerwise_learning_rates(0.9), {"layers": {"kernel": jnp.ones((32, 2, 3)), "bias": jnp.ones((32, 3))}}
    )
    for name in ("kernel", "bias"):
        for index in range(32):
            assert np.allclose(stacked["layers"][name][index], 0.9 ** (31 - index), rtol=1e-6)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_scanned_and_unrolled_linen_layers_are_alike(weight_decay):
    tx = pj.layerwise_learning_rates(0.8, groups=GROUPS, weight_decay=weight_decay)
    params = Layers(scan=False).init(jax.random.key(0), make_batch()["tokens"])["params"]
    unrolled = scaled(tx, params)
    rest = {name: params[name] for name in ("embed", "head")}
    blocks = jax.tree.map(lambda *x: jnp.stack(x), *(params[f"block_{index}"] for index in range(3)))
    stacked = scaled(tx, {**rest, "block": blocks})
    for index in range(3):
        jax.tree.map(
            np.testing.assert_array_equal,
            jax.tree.map(lambda x, i=index: x[i], stacked["block"]),
            unrolled[f"block_{index}"],
        )
        up, factor = params[f"block_{index}"]["up"], 0.8 ** (2 - index)
        wanted = (1 + weight_decay * np.asarray(up["kernel"])) * factor
        np.testing.assert_allclose(unrolled[f"block_{index}"]["up"]["kernel"], wanted, rtol=1e-6)
        np.testing.assert_allclose(unrolled[f"block_{index}"]["up"]["bias"], factor, rtol=1e-6)
        np.testing.assert_allclose(unrolled[f"block_{index}"]["norm"]["scale"], factor, rtol=1e-6)  # it is 1: undecayed
    np.testing.assert_allclose(
        unrolled["embed"]["embedding"], 0.5 * (1 + weight_decay * params["embed"]["embedding"]), rtol=1e-6
    )


def test_an_nnx_state():
    params = nnx.state(NNXModel(nnx.Rngs(0)), nnx.Param)
    found = scaled(pj.layerwise_learning_rates(0.5, groups=GROUPS), params)
    assert np.all(np.asarray(found["block"][0]["up"]["kernel"][...]) == 0.5)
    assert np.all(np.asarray(found["block"][1]["up"]["bias"][...]) == 1.0)
    assert np.all(np.asarray(found["head"]["kernel"][...]) == 0.5)


@pytest.mark.parametrize("model", ["linen", "nnx"])
def test_in_a_chain_the_learning_rate_stays_that_of_the_last_layer(model):
    stages = lambda factor: (  # noqa: E731
        ("adam", optax.scale_by_adam()),
        *((("layers", pj.layerwise_learning_rates(0.5, groups=[("embed|head", factor)])),) if factor else ()),
        ("lr", optax.scale_by_learning_rate(1e-2)),
    )
    found = []
    for factor in (None, 0.25):
        module = NNXModel(nnx.Rngs(0)) if model == "nnx" else None
        _, report = pj.monitored_train_step(
            make_state(model=module, tx=pj.chain(*stages(factor)), plan=only("update")), make_batch()
        )
        found.append(report.scalars())
    plain, layered = found
    assert layered["opt/learning_rate"] == plain["opt/learning_rate"] == pytest.approx(1e-2)
    for path, factor in {"block[0]/up/kernel": 0.5, "block[1]/up/kernel": 1.0, "head/kernel": 0.25}.items():
        assert layered[f"update/{path}/norm"] == pytest.approx(factor * plain[f"update/{path}/norm"], rel=1e-4)


def test_lists_of_layers_count_for_themselves_and_groups_go_first():
    names = (
        "encoder/block_0",
        "encoder/block_1",
        "decoder/block_0",
        "decoder/block_1",
        "decoder/block_2",
        "LayerNorm_0",
    )
    params = {name: jnp.ones(2) for name in names}
    found = scaled(pj.layerwise_learning_rates(0.5, groups=[("LayerNorm", 2.0), ("decoder/block_2", 3.0)]), params)
    assert [float(found[name][0]) for name in names] == [0.5, 1.0, 0.5, 1.0, 3.0, 2.0]


def test_stages_by_a_pattern_of_ones_own_and_another_axis():
    params = {"stage1": {"w": jnp.ones(2)}, "stage2": {"w": jnp.ones(2)}, "deep": {"w": jnp.ones((5, 3))}}
    found = scaled(pj.layerwise_learning_rates(0.5, layers=r"^stage(\d)/", stacked="^deep", axis=1), params)
    assert float(found["stage1"]["w"][0]) == 0.5
    np.testing.assert_allclose(found["deep"]["w"], np.broadcast_to([0.25, 0.5, 1.0], (5, 3)))


def test_updates_keep_their_dtype_and_a_masked_part_is_left_alone():
    params = {"block_0": jnp.ones(3, jnp.bfloat16), "block_1": jnp.ones(3, jnp.bfloat16), "norm": jnp.ones(3)}
    tx = optax.masked(pj.layerwise_learning_rates(0.5), {"block_0": True, "block_1": True, "norm": False})
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["block_0"].dtype == jnp.bfloat16
    assert [float(updates[name][0]) for name in params] == [0.5, 1.0, 1.0]


@pytest.mark.parametrize(
    ("path", "decays"),
    [
        ("block_0/mlp/kernel", True),
        ("embed/embedding", True),
        ("block_0/mlp/bias", False),
        ("block_0/ln_1/scale", False),
        ("LayerNorm_0/scale", False),
        ("ln_f/weight", False),
        ("block_0/rms_norm/weight", False),
        ("block_0/kernels/w", True),
    ],
)
def test_what_is_decayed(path, decays):
    params = {path: jnp.ones(1)}
    found = scaled(pj.layerwise_learning_rates(1.0, groups=[("", 1.0)], weight_decay=0.5), params)
    assert float(found[path][0]) == (1.5 if decays else 1.0)


def test_errors_say_what_to_write():
    with pytest.raises(ValueError, match=r"no layer number in the parameter 'final/w'.*groups="):
        pj.layerwise_learning_rates(0.9).init({"block_0": {"w": jnp.ones(1)}, "final": {"w": jnp.ones(1)}})
    with pytest.raises(ValueError, match=r"do not stack layers on axis 0.*stacked="):
        pj.layerwise_learning_rates(0.9).init({"block": {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}})
    with pytest.raises(ValueError, match="decay must be above 0 and at most 1, got 1.5"):
        pj.layerwise_learning_rates(1.5)
    with pytest.raises(ValueError, match="decay must be a positive number"):
        pj.layerwise_learning_rates(0.0)
    with pytest.raises(ValueError, match="layers must have one group"):
        pj.layerwise_learning_rates(0.9, layers=r"block_\d+")
    with pytest.raises(ValueError, match="groups 'head' must be a number of at least 0"):
        pj.layerwise_learning_rates(0.9, groups=[("head", -1.0)])
    tx, params = pj.layerwise_learning_rates(0.9, weight_decay=0.1), {"block_0": jnp.ones(1)}
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(params, tx.init(params))
