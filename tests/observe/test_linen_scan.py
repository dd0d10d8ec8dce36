"""linen scan, remat, vmap and jit inside the model: one row per layer, and the unrolled twin's values and names."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import DenyList

from probes_jax.observe.names import label_params
from probes_jax.stats.moments import summarize_magnitude
from tests.observe.evaluate import (
    KEY,
    assert_rows,
    assert_same,
    evaluate,
    make_step,
    observed_and_plain,
    slow_statistics,
    start,
)
from tests.observe.linen_twin import TOKENS, Decoder, capture, decoder, decoder_names, unrolled

X = jnp.linspace(-1.0, 2.0, 12).reshape(3, 4)


def mean_output(model, batch, rngs):
    return jnp.sum(jnp.square(model(batch)))


class NoDropout(nn.Module):
    """The decoder's structure without randomness, so that twins agree in value."""

    depth: int = 2
    scan: bool = False
    remat: bool = False
    axis: int = 0

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, name="embed")(x)
        block = nn.remat(Layer) if self.remat else Layer
        if self.scan:
            layers = nn.scan(block, {"params": self.axis}, split_rngs={"params": True}, length=self.depth)
            x, _ = layers(name="blocks")(x, None)
        else:
            for layer in range(self.depth):
                x, _ = block(name=f"blocks_{layer}")(x, None)
        return nn.Dense(2, name="head")(x)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.Dense(4, name="mlp")(nn.LayerNorm(name="norm")(x))
        return x + nn.tanh(y), None


@functools.cache
def small(scan, remat):
    return observed_and_plain(NoDropout(scan=scan, remat=remat), mean_output, X)


@pytest.mark.parametrize(("depth", "axis", "remat"), [(1, 0, False), (2, 0, True), (3, 1, False)])
def test_l013_scanned_layers_have_the_unrolled_twin_s_names_and_values(depth, axis, remat):
    scanned = NoDropout(depth=depth, scan=True, remat=remat, axis=axis)
    observed, _, parts = observed_and_plain(scanned, mean_output, X)
    twin = {"params": unrolled(parts.params, axis)}
    names = {f"blocks_{layer}": f"blocks[{layer}]" for layer in range(depth)}
    _, arrays = capture(NoDropout(depth=depth), twin, X, name=lambda p: "/".join(names.get(e, e) for e in p))
    assert_rows(observed.rows, arrays)
    assert observed.captured.stacks == {("blocks",): (axis, depth)}
    assert observed.captured.missing == {}


def test_l007_a_rematerialized_layer_counts_once_with_the_same_totals():
    for scan in (False, True):
        without, with_remat = (small(scan, remat)[0] for remat in (False, True))
        assert without.rows == with_remat.rows
        np.testing.assert_array_equal(without.loss, with_remat.loss)
        assert set(without.rows) == set(small(False, False)[0].rows)


def test_a_decoder_scanned_and_rematerialized():
    observed, _, parts = decoder(scan=True, remat=True)
    assert set(observed.rows) == set(decoder()[0].rows)
    assert observed.captured.missing == {}
    assert observed.captured.stacks == {("blocks",): (0, 2)}
    twin = {"params": unrolled(parts.params)}
    _, arrays = capture(Decoder(), twin, TOKENS, name=decoder_names)
    same = (
        "embed",
        "blocks[0]/LayerNorm[0]",
        "blocks[0]/attn",
        "blocks[0]/attn/query",
        "blocks[0]/up",
    )  # before dropout
    assert_rows({name: observed.rows[name] for name in same}, arrays, only=set(same))


def test_parameter_names_of_the_stack_are_those_of_the_twin():
    scanned, unstacked = small(True, False), small(False, False)

    def names(evaluation, parts):
        shapes = {
            tuple(k.key for k in path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(parts.params)
        }
        return [n for labels, _ in label_params(shapes, evaluation.captured.stacks).values() for n in labels]

    assert sorted(names(scanned[0], scanned[2])) == sorted(names(unstacked[0], unstacked[2]))
    assert "blocks[1]/mlp/kernel" in names(scanned[0], scanned[2])


# Made at import time: it holds the original `scan`.
Imported = nn.scan(Layer, {"params": 0}, split_rngs={"params": True}, length=2)


class MadeAtImport(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Imported(name="blocks")(x, None)[0]


def test_a_class_scanned_at_import_time():
    rows = observed_and_plain(MadeAtImport(), mean_output, X)[0].rows
    assert set(rows) == {f"blocks[{i}]{part}" for i in (0, 1) for part in ("", "/mlp", "/norm")} | {"output"}


class AutoNamed(nn.Module):
    scan: bool = False
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Layer) if self.remat else Layer
        if self.scan:
            return nn.scan(layer, {"params": 0}, split_rngs={"params": True}, length=2)()(x, None)[0]
        for _ in range(2):
            x, _ = layer()(x, None)
        return x


def test_names_flax_makes_for_lifted_classes_are_those_of_the_plain_class():
    names = [
        set(observed_and_plain(AutoNamed(scan, remat), mean_output, X)[0].rows)
        for scan, remat in ((False, False), (False, True), (True, True))
    ]
    assert names[0] == names[1] == names[2]
    assert "Layer[1]/mlp" in names[0]


class FunctionStyle(nn.Module):
    """`nn.scan` of a function of the module itself, called twice, after another layer."""

    @nn.compact
    def __call__(self, x):
        return Body(name="body")(nn.Dense(4, name="first")(x))


class Body(nn.Module):
    @nn.compact
    def __call__(self, x):
        def body(module, carry, _):
            return nn.tanh(nn.Dense(4, name="layer")(carry)), None

        layers = nn.scan(body, {"params": 0}, split_rngs={"params": True}, length=2)
        return layers(self, x, None)[0]


@pytest.mark.optimized
def test_a_scanned_function_of_the_module_itself():
    observed, _, parts = observed_and_plain(FunctionStyle(), mean_output, X)
    layer = parts.params["body"]["layer"]
    x = first = X @ parts.params["first"]["kernel"]
    expected = {"first": first}
    for i in range(2):
        h = x @ layer["kernel"][i] + layer["bias"][i]
        expected[f"body/layer[{i}]"] = h
        x = jnp.tanh(h)
    assert_rows(observed.rows, {**expected, "body": x, "output": x})
    assert observed.captured.stacks == {("body", "layer"): (0, 2)}


class Nested(nn.Module):
    """A scan in a scan, with a second pass over the same layers and a plain call of a submodule before and after."""

    def setup(self):
        inner = nn.scan(Layer, {"params": 0}, split_rngs={"params": True}, length=2)
        self.first = nn.Dense(4)
        self.groups = nn.scan(nn.remat(Group), {"params": 0}, split_rngs={"params": True}, length=3)(inner)

    def __call__(self, x):
        x = self.first(x)
        for _ in range(2):
            x, _ = self.groups(x, None)
        return self.first(x)


class Group(nn.Module):
    inner: type[nn.Module]

    @nn.compact
    def __call__(self, x, _):
        return self.inner(name="layers")(x, None)


@pytest.mark.optimized
def test_a_scan_in_a_scan_called_twice():
    observed, _, parts = observed_and_plain(Nested(), mean_output, X)
    x = X @ parts.params["first"]["kernel"]
    expected, layers = {"first": x}, parts.params["groups"]["layers"]
    for call in ("", "#1"):
        for i in range(3):
            for j in range(2):
                weights = jax.tree.map(lambda w, i=i, j=j: w[i, j], layers)
                normal = nn.LayerNorm().apply({"params": weights["norm"]}, x)
                y = normal @ weights["mlp"]["kernel"] + weights["mlp"]["bias"]
                x = x + jnp.tanh(y)
                expected[f"groups[{i}]/layers[{j}]/norm{call}"] = normal
                expected[f"groups[{i}]/layers[{j}]/mlp{call}"] = y
                expected[f"groups[{i}]/layers[{j}]{call}"] = x
            expected[f"groups[{i}]{call}"] = x
    y = x @ parts.params["first"]["kernel"]
    assert_rows(observed.rows, {**expected, "first#1": y, "output": y})
    assert observed.captured.stacks == {("groups",): (0, 3), ("groups", "layers"): (0, 2)}


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.RNN(nn.SimpleCell(3), name="rnn")(x)


def test_a_scan_over_time_has_one_row_over_all_steps():
    x = jnp.linspace(-1.0, 1.0, 30).reshape(2, 5, 3)
    observed, _, parts = observed_and_plain(Recurrent(), mean_output, x)
    y = Recurrent().apply({"params": parts.params}, x)
    cell = next(name for name in observed.rows if name.endswith(":1"))
    assert observed.rows[cell] == pytest.approx(slow_statistics(y), rel=1e-5)
    assert observed.captured.stacks == {}


class Mapped(nn.Module):
    """Two experts with parameters of their own, then one layer mapped over examples."""

    @nn.compact
    def __call__(self, x):
        experts = nn.vmap(nn.Dense, {"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=2)
        x = experts(4, name="experts")(x).sum(0)
        each = nn.vmap(nn.Dense, {"params": None}, split_rngs={"params": False})
        return each(4, name="each")(x)


def test_vmap_has_a_row_per_expert_and_one_row_for_all_examples():
    observed, _, parts = observed_and_plain(Mapped(), mean_output, X)
    both = jnp.einsum("bi,eij->ebj", X, parts.params["experts"]["kernel"])
    y = both.sum(0) @ parts.params["each"]["kernel"]
    assert_rows(observed.rows, {"experts[0]": both[0], "experts[1]": both[1], "each": y, "output": y})


class Jitted(nn.Module):
    """Two blocks that `nn.jit` traces once."""

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x, _ = nn.jit(Layer)(name=f"block_{i}")(x, None)
        return x


JitLayer = nn.jit(Layer)


class JittedAtImport(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x, _ = JitLayer(name=f"block_{i}")(x, None)
        return x


@pytest.mark.parametrize("model", [Jitted(), JittedAtImport()])
def test_jit_inside_the_model_traced_plain_before_and_observed_twice(model):
    binding, parts = start(model, mean_output, X)
    plain = evaluate(binding, mean_output, X, parts, measure=None)
    first, second = (evaluate(binding, mean_output, X, parts) for _ in range(2))
    assert first.rows == second.rows
    assert set(first.rows) == {f"block[{i}]{part}" for i in (0, 1) for part in ("", "/mlp", "/norm")} | {"output"}
    assert_same(plain.grads, first.grads)
    assert first.rows["block[0]"] != first.rows["block[1]"]
    doubled = evaluate(binding, mean_output, X, parts, measure=lambda x: summarize_magnitude(2.0 * x))
    assert doubled.rows["block[1]/mlp"]["abs_max"] == 2.0 * first.rows["block[1]/mlp"]["abs_max"]
    assert evaluate(binding, mean_output, X, parts, measure=None).captured.seen == ()


class WideFilters(nn.Module):
    """Parameters that every iteration shares, by filters that match any collection."""

    broadcast: bool

    @nn.compact
    def __call__(self, x):
        wide = {"variable_broadcast": True} if self.broadcast else {"variable_carry": DenyList("params")}
        options = {"variable_broadcast": "params", **wide}
        return nn.scan(Layer, **options, split_rngs={"params": False}, length=3)(name="layer")(x, None)[0]


@pytest.mark.parametrize("broadcast", [False, True])
def test_wide_filters_of_a_scan_do_not_catch_our_collection(broadcast):
    observed, _, _ = observed_and_plain(WideFilters(broadcast), mean_output, X)
    assert set(observed.rows) == {"layer/norm", "layer/mlp", "layer", "output"}
    assert observed.rows["layer"]["count"] == 3 * X.size


class Matrix(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x @ self.param("w", nn.initializers.lecun_normal(), (4, 4)), None


def test_a_scan_of_all_collections_over_another_axis():
    class AllOnAxisOne(nn.Module):  # a summary has no second axis
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(Matrix, {True: 1}, split_rngs={"params": True}, length=2)
            return layers(name="layers")(x, None)[0]

    observed, _, parts = observed_and_plain(AllOnAxisOne(), mean_output, X)
    w = parts.params["layers"]["w"]
    assert w.shape == (4, 2, 4)
    first = X @ w[:, 0]
    assert_rows(observed.rows, {"layers[0]": first, "layers[1]": first @ w[:, 1], "output": first @ w[:, 1]})


class OnlyParams(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat(Layer, variables="params")(name="layer")(x, None)[0]


class RematScan(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat_scan(nn.Dense, lengths=(2, 3))(4, name="stack")(x)


def test_remat_of_parameters_only_and_remat_scan():
    assert set(observed_and_plain(OnlyParams(), mean_output, X)[0].rows) == {
        "layer/norm",
        "layer/mlp",
        "layer",
        "output",
    }
    observed, _, parts = observed_and_plain(RematScan(), mean_output, X)
    x, expected = X, {}
    for i in range(2):
        for j in range(3):
            x = x @ parts.params["stack"]["kernel"][i, j]
            expected[f"stack[{i}][{j}]"] = x
    assert_rows(observed.rows, {**expected, "output": x})


def test_no_tracer_leaks():
    binding, parts = start(NoDropout(scan=True, remat=True), mean_output, X)

    def step(params):
        def objective(params):
            bound = binding.bind(params, {}, measure=summarize_magnitude)
            loss = mean_output(bound, X, None)
            return loss, list(bound.finish().points.values())

        return jax.value_and_grad(objective, has_aux=True)(params)

    with jax.checking_leaks():
        jax.jit(step)(parts.params)


def test_scanning_compiles_once_in_three_steps():
    binding, parts = start(NoDropout(scan=True, remat=True), mean_output, X)
    step, traces = make_step(binding, mean_output)
    step = jax.jit(step)
    for _ in range(3):
        step(parts.params, parts.state, X, KEY)
    assert len(traces) == 1
