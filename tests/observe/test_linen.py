"""linen models without lifted transforms: every point, its value and its name."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from probes_jax.observe.rngs import Rngs
from probes_jax.observe.wrap import wrap
from probes_jax.stats.moments import summarize_magnitude
from tests.observe.evaluate import KEY, assert_rows, assert_same, evaluate, make_step, observed_and_plain, start
from tests.observe.linen_twin import TOKENS, Decoder, capture, decoder, decoder_names

X = jnp.linspace(-1.0, 2.0, 12).reshape(3, 4)


def mean_output(model, batch, rngs):
    return jnp.sum(jnp.square(model(batch)))


def test_decoder_has_every_point_with_its_value():
    observed, _, parts = decoder()
    output, arrays = capture(Decoder(), {"params": parts.params}, TOKENS, name=decoder_names)
    assert_rows(observed.rows, arrays)
    assert observed.captured.missing == {}
    np.testing.assert_array_equal(observed.outputs[0], output)
    order = list(observed.rows)
    assert order[:3] == ["embed", "blocks[0]/LayerNorm[0]", "blocks[0]/attn/query"]
    assert order[-3:] == ["blocks[1]", "head", "output"]


def test_loss_and_gradients_equal_the_module_s_own():
    observed, _, parts = decoder()

    def plain(params):
        streams = Rngs(KEY).streams(("params", "dropout"))
        return jnp.sum(jnp.square(Decoder().apply({"params": params}, TOKENS, rngs=streams)))

    loss, grads = jax.jit(jax.value_and_grad(plain))(parts.params)
    assert_same((observed.loss, observed.grads), (loss, grads))


class Normalized(nn.Module):
    def setup(self):
        self.first = nn.Dense(4)
        self.layers = [nn.Dense(4), nn.Dense(4)]
        self.norm = nn.BatchNorm(use_running_average=False, momentum=0.5)

    def __call__(self, x):
        x = self.norm(self.first(x))
        for layer in self.layers:
            x = layer(x)
        return x


def test_setup_style_and_batch_statistics():
    observed, _, parts = observed_and_plain(Normalized(), mean_output, X)
    variables = {"params": parts.params, **parts.state}
    _, arrays = capture(
        Normalized(),
        variables,
        X,
        mutable=["batch_stats"],
        name=lambda p: "/".join(p).replace("_0", "[0]").replace("_1", "[1]"),
    )
    assert_rows(observed.rows, arrays)
    assert set(observed.rows) == {"first", "norm", "layers[0]", "layers[1]", "output"}
    _, own = jax.jit(lambda v: Normalized().apply(v, X, mutable=["batch_stats"]))(variables)
    assert_same(observed.state, jax.device_get(own))
    assert not np.array_equal(observed.state["batch_stats"]["norm"]["mean"], parts.state["batch_stats"]["norm"]["mean"])


class Shared(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(4, name="layer")
        for _ in range(3):
            x = nn.tanh(layer(x))
        return x


def test_a_module_called_three_times_has_three_points():
    observed, _, parts = observed_and_plain(Shared(), mean_output, X)
    _, arrays = capture(Shared(), {"params": parts.params}, X)
    assert_rows(observed.rows, arrays)
    assert list(observed.rows) == ["layer", "layer#1", "layer#2", "output"]


class Many(nn.Module):
    """Outputs of all kinds, a private helper, and a name with a dot, a digit and a slash."""

    @nn.compact
    def __call__(self, x):
        inner = nn.Dense(4, name="h.1/a")
        return {"y": self._private(inner(x)), "pair": (x, jnp.arange(3)), "n": self.count(), "f": self.function()(x)}

    def _private(self, x):
        return x + 1.0

    def count(self):
        return 3

    def function(self):
        return jnp.sin

    def helper(self, x):
        return None


def test_float_leaves_of_any_output_and_nothing_else():
    observed, _, parts = observed_and_plain(Many(), lambda model, batch, rngs: jnp.sum(model(batch)["y"]), X)
    y = np.asarray(X @ parts.params["h.1/a"]["kernel"] + parts.params["h.1/a"]["bias"])
    expected = {"h.1%2Fa": y, "output:f": np.sin(X), "output:pair.0": X, "output:y": y + 1.0}
    assert_rows(observed.rows, expected)


class Coder(nn.Module):
    width: int = 4

    def setup(self):
        self.encoder = nn.Dense(self.width)
        self.decoders = [nn.Dense(self.width)]
        self.scale = self.param("scale", nn.initializers.ones, ())

    def encode(self, x):
        return self.encoder(x)

    def decode(self, z):
        return self.decoders[0](z) * self.scale


def test_methods_and_submodules_of_a_module_that_is_never_called():
    def loss_fn(model, batch, rngs):
        z = model.encode(batch)
        y = model(z, method="decode")
        u = model.decoders[0](z) + model.encoder(batch)
        assert model.width == 4
        assert len(model.decoders) == 1
        return jnp.sum(y) + jnp.sum(u) * model.scale

    observed, _, parts = observed_and_plain(Coder(), loss_fn, X)
    z = np.asarray(X @ parts.params["encoder"]["kernel"])
    y = np.asarray(z @ parts.params["decoders_0"]["kernel"])
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
    assert [np.shape(output) for output in observed.outputs] == [(3, 4), (3, 4)]  # of the root, not of its parts


def test_missing_attribute_and_wrong_use_are_clear():
    binding, parts = start(Coder(), lambda model, batch, rngs: jnp.sum(model.decode(model.encode(batch))), X)
    bound = binding.bind(parts.params, parts.state)
    with pytest.raises(AttributeError, match="nothing"):
        _ = bound.nothing
    bound.finish()
    with pytest.raises(RuntimeError, match="before"):
        bound.finish()
    with pytest.raises(RuntimeError, match="finished"):
        bound.encode(X)


class Fails(nn.Module):
    fail: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.remat(nn.Dense)(4, name="layer")(x)
        if self.fail:
            raise KeyError("inside the model")
        return x


def test_nothing_stays_patched_after_a_run_or_an_exception():
    from flax.core import lift
    from flax.linen import module as linen_module

    before = (lift.pack, lift._split_in_out_axes, nn.Module.sow)
    binding, parts = start(Fails(), mean_output, X)
    evaluate(binding, mean_output, X, parts, jit=lambda f: f)
    bound = wrap(Fails(fail=True)).bind(parts.params, parts.state, rngs=Rngs(KEY), measure=summarize_magnitude)
    with pytest.raises(KeyError, match="inside the model"):
        bound(X)
    with pytest.raises(KeyError, match="inside the model"):
        wrap(Fails(fail=True)).init(mean_output, X, KEY)
    assert (lift.pack, lift._split_in_out_axes, nn.Module.sow) == before
    assert len(linen_module._global_interceptor_stack) == 0
    assert linen_module._context.capture_stack == []
    np.testing.assert_allclose(
        Fails().apply({"params": parts.params}, X), X @ parts.params["layer"]["kernel"] + parts.params["layer"]["bias"]
    )


class Sower(nn.Module):
    """Sows under the name of a child, and keeps running values by `sow` and by `variable`."""

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(4, name="layer")(x)
        self.sow("intermediates", "layer_in", x)
        self.sow("losses", "aux", jnp.sum(y), reduce_fn=lambda a, b: a + b, init_fn=lambda: 0.0)
        count = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
        count.value += 1
        return y


def test_l001_state_does_not_grow_and_the_step_compiles_once():
    binding, parts = start(Sower(), mean_output, X)
    assert set(parts.state) == {"counters"}
    step, traces = make_step(binding, mean_output)
    step = jax.jit(step)
    params, state = parts
    for _ in range(3):
        (_, (values, state, _)), _ = step(params, state, X, KEY)
    assert len(traces) == 1
    assert len(values) == 2
    assert jax.tree.structure(state) == jax.tree.structure(parts.state)
    assert int(state["counters"]["calls"]) == 4  # one of them while initializing, as in linen itself


def test_l001_a_sown_collection_among_pretrained_variables_keeps_its_length():
    binding = wrap(Sower())
    variables = {"params": binding.init(mean_output, X, KEY).params, "counters": {"calls": jnp.int32(0)}}
    parts = binding.init(mean_output, X, KEY, {**variables, "sown": {"layer": (X,)}, "intermediates": {"x": (X,)}})
    assert set(parts.state) == {"counters", "sown"}
    bound = binding.bind(parts.params, {**parts.state, "extra": {"k": (jnp.zeros(()),)}}, measure=summarize_magnitude)
    bound(X)
    assert jax.tree.structure(bound.finish().state) == jax.tree.structure({**parts.state, "extra": {"k": (0,)}})


class SowsLikeChild(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Child(name="child")(x)


class Child(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.sow("intermediates", "inner", x)
        return nn.Dense(4, name="layer")(x)


def test_l005_the_user_s_own_sown_values_are_untouched():
    kept = {}

    def loss_fn(model, batch, rngs):
        y, kept["own"] = model(batch, mutable=["intermediates"])
        return jnp.sum(y)

    binding, parts = start(SowsLikeChild(), loss_fn, X)
    rows = evaluate(binding, loss_fn, X, parts, jit=lambda f: f).rows
    assert list(rows) == ["child/layer", "child", "output"]
    assert list(kept["own"]) == ["intermediates"]
    (value,) = kept["own"]["intermediates"]["child"]["inner"]
    np.testing.assert_array_equal(value, X)


def test_l005_beside_linen_s_own_capture():
    kept = {}

    def loss_fn(model, batch, rngs):
        y, kept["own"] = model(batch, mutable=True, capture_intermediates=True)
        return jnp.sum(y)

    binding, parts = start(SowsLikeChild(), loss_fn, X)
    rows = evaluate(binding, loss_fn, X, parts, jit=lambda f: f).rows
    _, own = SowsLikeChild().apply({"params": parts.params}, X, mutable=True, capture_intermediates=True)
    assert jax.tree.structure(kept["own"]) == jax.tree.structure(own)
    assert len(rows) == 3


def test_off_traces_the_plain_program():
    binding, parts = start(Decoder(), mean_output, TOKENS)
    step, _ = make_step(binding, mean_output, measure=None)

    def plain(params, state, batch, key):
        def objective(params):
            y = Decoder().apply({"params": params}, batch, rngs=Rngs(key).streams(("params", "dropout")))
            return jnp.sum(jnp.square(y)), ([], {}, [y])

        return jax.value_and_grad(objective, has_aux=True)(params)

    args = (parts.params, parts.state, TOKENS, KEY)
    assert str(jax.make_jaxpr(step)(*args)) == str(jax.make_jaxpr(plain)(*args))


def test_microbatches_in_a_scan_and_eval_shape():
    binding, parts = start(Shared(), mean_output, X)
    step, _ = make_step(binding, mean_output)

    def body(total, x):
        (_, (values, _, _)), _ = step(parts.params, parts.state, x, KEY)
        return [a.merge(b) for a, b in zip(total, values)], None

    def run(xs):
        shapes = jax.eval_shape(step, parts.params, parts.state, xs[0], KEY)[0][1][0]
        first = [jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), s).identity() for s in shapes]
        return jax.lax.scan(body, first, xs)[0]

    halves = jnp.stack([X, 2.0 * X])
    merged = jax.jit(run)(halves)
    step = jax.jit(step)
    one, two = (step(parts.params, parts.state, x, KEY)[0][1][0] for x in halves)
    for got, a, b in zip(merged, one, two):
        for name, leaf in a.merge(b).leaves.items():
            np.testing.assert_allclose(got.leaves[name], leaf, rtol=1e-6)


class Tied(nn.Module):
    """A head that calls `apply` of another module: a fresh root inside the model."""

    def setup(self):
        self.embed = nn.Embed(7, 4)

    def __call__(self, tokens):
        x = self.embed(tokens)
        table = self.embed.variables["params"]
        made = nn.Embed(7, 4, parent=None).init(jax.random.key(0), tokens)
        assert list(made) == ["params"]
        return self.embed.apply({"params": table}, x, method="attend")


def test_a_nested_apply_reports_and_a_nested_init_does_not():
    observed, _, parts = observed_and_plain(Tied(), mean_output, TOKENS)
    table = parts.params["embed"]["embedding"]
    logits = table[TOKENS] @ table.T
    assert_rows(observed.rows, {"embed": table[TOKENS], "embed.attend": logits, "output": logits})
    assert observed.captured.missing == {}


class Base(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="layer")(x)


class Derived(Base):
    @nn.compact
    def __call__(self, x):
        return super().__call__(x) * 2.0


def test_a_super_call_is_not_a_second_point():
    observed, _, _ = observed_and_plain(Derived(), mean_output, X)
    assert list(observed.rows) == ["layer", "output"]


class Wrapped(nn.Module):
    """Shares its scope with the layer it wraps: two modules, one path."""

    base: nn.Module

    def setup(self):
        nn.share_scope(self, self.base)

    def __call__(self, x):
        return self.base(x) + 1.0


class SharesScope(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Wrapped(nn.Dense(4, name="layer"))(x)


def test_two_modules_with_one_path_have_two_names():
    observed, _, parts = observed_and_plain(SharesScope(), mean_output, X)
    assert list(observed.rows) == ["layer", "layer~Wrapped", "output"]
    y = np.asarray(X @ parts.params["layer"]["kernel"])
    assert_rows(observed.rows, {"layer": y, "layer~Wrapped": y + 1.0, "output": y + 1.0})


class AnyStream(nn.Module):
    @nn.compact
    def __call__(self, x):
        keys = [self.make_rng(name) for name in ("dropout", "noise", "routing")]
        return x + sum(jax.random.normal(key, x.shape) for key in keys)


def test_any_random_stream_works_and_depends_on_the_key_only():
    binding = wrap(AnyStream())
    outputs = [binding.bind({}, {}, rngs=Rngs(jax.random.key(seed)))(X) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert not np.array_equal(outputs[0], outputs[2])
    named = wrap(AnyStream(), streams=("dropout", "noise")).bind({}, {}, rngs=Rngs(jax.random.key(0)))(X)
    own = AnyStream().apply({}, X, rngs=Rngs(jax.random.key(0)).streams(("params", "dropout", "noise")))
    np.testing.assert_array_equal(named, own)
