"""Initial variables of linen models: made, given, checked, and their partition metadata."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import freeze
from jax.sharding import PartitionSpec as P

from probes_jax.observe.linen_variables import conform
from probes_jax.observe.wrap import wrap
from tests.observe.evaluate import assert_same, start

X = jnp.ones((3, 4))
KEY = jax.random.key(0)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False, name="norm")(nn.Dense(4, name="layer")(x))


def loss_fn(model, batch, rngs):
    return jnp.sum(model(batch))


class Boxed(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.initializers.ones
        x = nn.Dense(4, kernel_init=nn.with_partitioning(init, ("data", None)), name="mesh")(x)
        x = nn.Dense(4, kernel_init=nn.with_logical_partitioning(init, ("embed", "mlp")), name="logical")(x)
        scanned = nn.scan(
            BoxedLayer,
            {"params": 0},
            split_rngs={"params": True},
            length=2,
            metadata_params={nn.PARTITION_NAME: "layer"},
        )
        return scanned(name="layers")(x, None)[0]


class BoxedLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(4, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, "model")))(x), None


def test_init_equals_linen_s_own_and_runs_the_loss_function():
    _, parts = start(Model(), loss_fn, X)
    own = jax.jit(lambda k: Model().init({"params": k}, X))
    assert jax.tree.structure({"params": parts.params, **parts.state}) == jax.tree.structure(own(KEY))
    assert np.all(np.asarray(parts.state["batch_stats"]["norm"]["var"]) == 1.0)


class Pair(nn.Module):
    def setup(self):
        self.encoder, self.decoder = nn.Dense(3), nn.Dense(4)

    def encode(self, x):
        return self.encoder(x)

    def decode(self, z):
        return self.decoder(z)


def test_several_calls_make_all_parameters():
    _, parts = start(Pair(), lambda model, batch, rngs: jnp.sum(model.decode(model.encode(batch))), X)
    assert jax.tree.map(jnp.shape, parts.params) == {
        "encoder": {"kernel": (4, 3), "bias": (3,)},
        "decoder": {"kernel": (3, 4), "bias": (4,)},
    }
    assert not np.array_equal(parts.params["encoder"]["kernel"].ravel()[:12], parts.params["decoder"]["kernel"].ravel())


def test_partition_metadata():
    rules = (("embed", "model"), ("mlp", None))
    binding = wrap(Boxed())
    with nn.logical_axis_rules(rules):
        parts = jax.eval_shape(lambda key: binding.init(loss_fn, X, key), KEY)
    specs = binding.partition_specs(*parts)
    assert specs.params["mesh"] == {"kernel": P("data", None), "bias": None}
    assert specs.params["logical"]["kernel"] == P("model", None)
    assert specs.params["layers"]["Dense_0"]["kernel"] == P("layer", None, "model")
    assert specs.state == {}
    plain = wrap(Model())
    parts = plain.init(loss_fn, X, KEY)
    assert jax.tree.leaves(plain.partition_specs(*parts)) == []


def test_given_variables_are_used():
    binding, own = start(Model(), loss_fn, X)
    variables = {"params": jax.tree.map(lambda x: x + 1, own.params), **own.state}
    for given in (variables, freeze(variables), {**variables, "intermediates": {"x": (X,)}}):
        parts = jax.jit(lambda v: binding.init(loss_fn, X, KEY, v))(given)
        assert_same(jax.device_get(parts.params), jax.device_get(variables["params"]))
        assert set(parts.state) == {"batch_stats"}
    alone = binding.init(loss_fn, X, KEY, variables["params"])
    assert_same(jax.device_get(alone.params), jax.device_get(variables["params"]))
    assert_same(jax.device_get(alone.state), jax.device_get(own.state))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: {"batch_stats": v["batch_stats"]}, "has no 'params'"),
        (lambda v: {"params": v["params"]}, "no collection 'batch_stats'"),
        (lambda v: {**v, "params": {"layer": v["params"]["layer"]}}, "lacks norm/"),
        (lambda v: {**v, "params": {**v["params"], "more": {"w": X}}}, "the model does not have, more/w"),
        (lambda v: {**v, "params": jax.tree.map(lambda x: x[None], v["params"])}, r"layer/bias has shape \(1, 4\)"),
    ],
)
def test_variables_that_do_not_fit_are_refused(change, message):
    binding, own = start(Model(), loss_fn, X)
    with pytest.raises(ValueError, match=message):
        binding.init(loss_fn, X, KEY, change({"params": own.params, **own.state}))


def test_variables_of_another_type_are_refused():
    with pytest.raises(TypeError, match="dict"):
        wrap(Model()).init(loss_fn, X, KEY, [1])


def test_conform_keeps_the_structure():
    old = {"a": {"w": 1.0}, "sown": (1.0,)}
    new = {"a": {"w": 2.0, "more": 3.0}, "sown": (1.0, 5.0), "other": 1.0}
    assert conform(old, new) == {"a": {"w": 2.0}, "sown": (5.0,)}
    assert conform(old, {}) == old


def test_module_gives_usable_variables_that_outlive_donation():
    binding, parts = start(Model(), loss_fn, X)
    variables = binding.module(*parts)
    jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)(parts.params)
    y, _ = Model().apply(variables, X, mutable=["batch_stats"])
    assert y.shape == (3, 4)
