"""nnx models without transforms in them: every point, its value and its name."""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from probes_jax.observe.rngs import Rngs
from probes_jax.observe.wrap import wrap
from probes_jax.stats.moments import summarize_magnitude
from tests.observe.evaluate import KEY, assert_rows, assert_same, evaluate, make_step, observed_and_plain, start
from tests.observe.nnx_models import Block, Decoder, arrays, decoder_by_hand

TOKENS = jnp.arange(6).reshape(2, 3)
X = jnp.linspace(-1.0, 2.0, 12).reshape(3, 4)


def mean_output(model, batch, rngs):
    return jnp.sum(jnp.square(model(batch)))


def test_decoder_has_every_point_with_its_value():
    module = Decoder(nnx.Rngs(0))
    before = arrays(module)
    observed, binding, parts = observed_and_plain(module, mean_output, TOKENS)
    bound = binding.bind(parts.params, parts.state, rngs=Rngs(KEY))
    expected = decoder_by_hand(bound._module, TOKENS)
    assert_rows(observed.rows, expected)
    assert list(observed.rows) == list(expected)
    assert observed.captured.missing == {}
    np.testing.assert_allclose(observed.outputs[0], expected["output"], rtol=1e-5)
    means = observed.state["blocks"]["0"]["bn"]["mean"]
    np.testing.assert_allclose(means, bound._module.blocks[0].bn.mean.get_value(), rtol=1e-5)
    assert_same(arrays(module), before)  # the user's module is as it was


def test_loss_and_gradients_equal_the_module_s_own():
    module = Linears(nnx.Rngs(0))
    observed, _, _ = observed_and_plain(module, mean_output, X)
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)

    def plain(params):
        return jnp.sum(jnp.square(nnx.merge(graphdef, params, rest)(X)))

    loss, grads = jax.jit(jax.value_and_grad(plain))(params)
    own = nnx.to_pure_dict(grads)
    assert_same(observed.loss, loss)
    assert_same(observed.grads["layer"], own["layer"])
    assert_same(list(observed.grads["plain"].values()), list(own["plain"].values()))


class Linears(nnx.Module):
    """One layer called three times, a plain list of layers, an array, a pair and a dict of outputs."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(4, 4, rngs=rngs)
        self.plain = nnx.data([nnx.Linear(4, 4, rngs=rngs), nnx.relu, nnx.Linear(4, 4, rngs=rngs)])
        self.table = jnp.arange(4.0)

    def __call__(self, x):
        for _ in range(3):
            x = jnp.tanh(self.layer(x))
        for layer in self.plain:
            x = layer(x)
        self.shapes(x)
        return self.pack(x)["y"] + self.table

    def pack(self, x):
        return {"y": x, "n": 3, "ids": jnp.arange(3), "more": (x + 1.0, None)}

    def shapes(self, x):
        return x.shape

    def _hidden(self, x):
        return x


def test_repeated_calls_lists_and_outputs_of_any_kind():
    module = Linears(nnx.Rngs(0))
    rows = observed_and_plain(module, mean_output, X)[0].rows
    x, expected = X, {}
    for call in range(3):
        h = module.layer(x)
        expected["layer" + (f"#{call}" if call else "")] = h
        x = jnp.tanh(h)
    expected["plain[0]"] = h = module.plain[0](x)
    expected["plain[2]"] = y = module.plain[2](nnx.relu(h))
    expected |= {"output.pack:more.0": y + 1.0, "output.pack:y": y, "output": y + jnp.arange(4.0)}
    assert_rows(rows, expected)


class Coder(nnx.Module):
    width = 4

    def __init__(self, rngs):
        self.encoder = nnx.Linear(4, 4, rngs=rngs)
        self.decoders = nnx.List([nnx.Linear(4, 4, rngs=rngs)])
        self.scale = nnx.Param(jnp.ones(()))

    def encode(self, x):
        return self.encoder(x)

    def decode(self, z):
        return self.decoders[0](z) * self.scale[...]


def test_methods_and_submodules_of_a_module_that_is_never_called():
    def loss_fn(model, batch, rngs):
        z = model.encode(batch)
        y = model.decode(z)
        u = sum(decoder(z) for decoder in model.decoders) + model.encoder(batch)
        assert model.width == 4
        assert len(model.decoders) == 1
        return jnp.sum(y) + jnp.sum(u) * model.scale[...]

    observed, _, parts = observed_and_plain(Coder(nnx.Rngs(0)), loss_fn, X)
    z = np.asarray(X @ parts.params["encoder"]["kernel"])
    y = np.asarray(z @ parts.params["decoders"]["0"]["kernel"])
    expected = {
        "encoder": z,
        "output.encode": z,
        "decoders[0]": y,
        "output.decode": y,
        "decoders[0]#1": y,
        "encoder#1": z,
    }
    assert_rows(observed.rows, expected)
    assert list(observed.rows) == list(expected)
    assert [np.shape(output) for output in observed.outputs] == [(3, 4), (3, 4)]
    assert float(observed.grads["scale"]) != 0.0


class Inherited(Block):
    pass


class Doubled(Block):
    def __call__(self, x):
        return 2.0 * super().__call__(x)

    @staticmethod
    def scaled(x):
        return 3.0 * x

    @classmethod
    def named(cls, x):
        return x


class Family(nnx.Module):
    def __init__(self, rngs):
        self.child = Inherited(4, rngs)
        self.double = Doubled(4, rngs)

    def __call__(self, x):
        return self.double.named(self.double.scaled(self.double(self.child(x))))


def test_inherited_methods_super_calls_and_static_methods():
    rows = observed_and_plain(Family(nnx.Rngs(0)), mean_output, X)[0].rows
    parts = ("norm", "up", "drop", "down", "bn")
    assert set(rows) == {f"{m}/{p}" for m in ("child", "double") for p in parts} | {"child", "double", "output"}
    assert rows["double"]["abs_max"] == pytest.approx(2.0 * rows["double/bn"]["abs_max"])


class LoRAModel(nnx.Module):
    def __init__(self, rngs):
        self.wrapped = nnx.LoRA(4, 2, 4, base_module=nnx.Linear(4, 4, rngs=rngs), rngs=rngs)
        self.linear = nnx.LoRALinear(4, 4, lora_rank=2, rngs=rngs)
        self.seq = nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.relu)

    def __call__(self, x):
        return self.seq(self.linear(self.wrapped(x)))


def test_wrapping_layers():
    observed, _, parts = observed_and_plain(LoRAModel(nnx.Rngs(0)), mean_output, X)
    assert list(observed.rows) == [
        "wrapped/base_module",
        "wrapped",
        "linear/lora",
        "linear",
        "seq/layers[0]",
        "seq",
        "output",
    ]
    assert set(parts.params["linear"]["lora"]) == {"lora_a", "lora_b"}


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(7, 4, rngs=rngs)
        self.again = self.embed

    def __call__(self, tokens):
        return self.again.attend(self.embed(tokens))


def test_a_shared_module_has_one_path_and_one_parameter():
    observed, _, parts = observed_and_plain(Tied(nnx.Rngs(0)), mean_output, TOKENS)
    assert len(jax.tree.leaves(parts.params)) == 1
    assert list(observed.rows) == ["again", "again.attend", "output"]


class Fails(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(4, 4, rngs=rngs)
        self.fail = False

    def __call__(self, x):
        x = nnx.remat(lambda layer, x: layer(x))(self.layer, x)
        if self.fail:
            raise KeyError("inside the model")
        return x


def test_nothing_stays_patched_after_a_run_or_an_exception():
    before = (nnx.Linear.__call__, Fails.__call__)
    module = Fails(nnx.Rngs(0))
    binding, parts = start(module, mean_output, X)
    evaluate(binding, mean_output, X, parts, jit=lambda f: f)
    failing = Fails(nnx.Rngs(0))
    failing.fail = True
    bound = wrap(failing).bind(parts.params, parts.state, rngs=Rngs(KEY), measure=summarize_magnitude)
    with pytest.raises(KeyError, match="inside the model"):
        bound(X)
    assert (nnx.Linear.__call__, Fails.__call__) == before
    for used in (module, failing, bound._module, binding.module(*parts)):
        marks = [name for _, m in nnx.iter_modules(used) for name in vars(m) if "probes" in name]
        assert marks == []
    np.testing.assert_array_equal(module(X), X @ module.layer.kernel[...] + module.layer.bias[...])


def test_random_state_is_a_function_of_the_key_only():
    module = Decoder(nnx.Rngs(0))
    binding, parts = start(module, mean_output, TOKENS)
    assert "drop" not in parts.state["blocks"]["0"]  # random states are no arrays of the model
    outputs = [binding.bind(parts.params, parts.state, rngs=Rngs(jax.random.key(s)))(TOKENS) for s in (0, 0, 1)]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert not np.array_equal(outputs[0], outputs[2])
    keys = [b.drop.rngs.key.get_value() for b in binding.bind(*parts, rngs=Rngs(KEY))._module.blocks]
    assert not np.array_equal(*map(jax.random.key_data, keys))
    own = [b.drop.rngs.key.get_value() for b in module.blocks]
    fresh = [b.drop.rngs.key.get_value() for b in binding.module(*parts).blocks]
    assert_same([jax.random.key_data(k) for k in own], [jax.random.key_data(k) for k in fresh])


def test_l003_three_steps_one_trace_equal_reports():
    binding, parts = start(Decoder(nnx.Rngs(0), "remat"), mean_output, TOKENS)
    step, traces = make_step(binding, mean_output)
    step = jax.jit(step)
    params, state = parts
    shapes = []
    for _ in range(3):
        (_, (values, state, _)), _ = step(params, state, TOKENS, KEY)
        shapes.append(jax.tree.map(jnp.shape, values))
    assert len(traces) == 1
    assert shapes[0] == shapes[1] == shapes[2]
    assert jax.tree.structure(state) == jax.tree.structure(parts.state)


def test_l003_inside_nnx_jit_and_cached_partial():
    binding, parts = start(Linears(nnx.Rngs(0)), mean_output, X)
    step, traces = make_step(binding, mean_output)

    class Holder(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    @nnx.jit
    def train(holder, params, x):
        holder.count[...] += 1
        return step(params, parts.state, x, KEY)[0][1][0]

    cached = nnx.cached_partial(train, Holder())
    reports = [cached(parts.params, X) for _ in range(3)]
    assert len(traces) == 1
    assert jax.tree.map(jnp.shape, reports[0]) == jax.tree.map(jnp.shape, reports[2])


def test_off_traces_the_plain_program():
    module = Linears(nnx.Rngs(0))
    binding, parts = start(module, mean_output, X)
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)
    flat, where = jax.tree.flatten(params)

    def bound(leaves):
        return binding.bind(jax.tree.unflatten(jax.tree.structure(parts.params), leaves), parts.state, rngs=Rngs(KEY))(
            X
        )

    def plain(leaves):
        return nnx.merge(graphdef, jax.tree.unflatten(where, leaves), rest)(X)

    assert str(jax.make_jaxpr(bound)(flat)) == str(jax.make_jaxpr(plain)(flat))


def test_given_parameters_are_used_and_checked():
    module = Linears(nnx.Rngs(0))
    binding = wrap(module)
    other = nnx.state(Linears(nnx.Rngs(1)), nnx.Param)
    for given in (other, nnx.to_pure_dict(other)):
        parts = binding.init(mean_output, X, KEY, given)
        np.testing.assert_array_equal(parts.params["layer"]["kernel"], other["layer"]["kernel"].get_value())
    with pytest.raises(ValueError, match="lacks plain/0"):
        binding.init(mean_output, X, KEY, {"layer": parts.params["layer"]})
    with pytest.raises(ValueError, match="shape"):
        binding.init(mean_output, X, KEY, jax.tree.map(lambda x: x[None], parts.params))
    with pytest.raises(TypeError, match="nested dict"):
        binding.init(mean_output, X, KEY, 3)
    with pytest.raises(ValueError, match="lack layer"):
        binding.bind({"plain": parts.params["plain"]}, parts.state)


def test_the_user_s_module_outlives_donation_unless_it_gives_its_arrays_away():
    def spend(params):
        return jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)(params)

    kept, given = Linears(nnx.Rngs(0)), Linears(nnx.Rngs(0))
    binding = wrap(kept)
    parts = binding.init(mean_output, X, KEY)
    again = binding.module(*parts)
    spend(parts.params)
    assert kept(X).shape == again(X).shape == (3, 4)
    params = wrap(given, take_ownership=True).init(mean_output, X, KEY).params
    assert params["layer"]["kernel"] is given.layer.kernel.get_value()


def test_partition_metadata():
    init = nnx.with_partitioning(nnx.initializers.ones, ("data", None))
    with nnx.use_eager_sharding(False):
        module = nnx.Linear(4, 4, kernel_init=init, rngs=nnx.Rngs(0))
        binding = wrap(module)
        parts = binding.init(mean_output, X, KEY)
        specs = binding.partition_specs(*parts)
        assert specs.params == {"kernel": jax.sharding.PartitionSpec("data", None), "bias": None}
        assert specs.state == {}


def test_base_methods_and_missing_attributes():
    binding, parts = start(Decoder(nnx.Rngs(0)), mean_output, TOKENS)
    bound = binding.bind(*parts, rngs=Rngs(KEY), measure=summarize_magnitude)
    bound.eval()
    bound(TOKENS)
    with pytest.raises(AttributeError, match="nothing"):
        _ = bound.nothing
    captured = bound.finish()
    np.testing.assert_array_equal(captured.state["blocks"]["0"]["bn"]["mean"], parts.state["blocks"]["0"]["bn"]["mean"])
    with pytest.raises(RuntimeError, match="before"):
        bound.finish()
    with pytest.raises(RuntimeError, match="finished"):
        bound(TOKENS)


def test_a_sown_variable_does_not_stay():
    class Sows(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            y = self.layer(x)
            self.seen = nnx.Intermediate(y)
            return y

    observed, _, parts = observed_and_plain(Sows(nnx.Rngs(0)), mean_output, X)
    assert observed.state == parts.state == {}


def test_the_wrapped_module_may_go_on_changing():
    module = Linears(nnx.Rngs(0))
    reference = copy.deepcopy(module)
    binding = wrap(module)
    module.layer.kernel.set_value(jnp.zeros((4, 4)))
    parts = binding.init(mean_output, X, KEY)
    np.testing.assert_array_equal(binding.module(*parts)(X), reference(X))
