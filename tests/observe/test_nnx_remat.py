"""Transforms inside nnx models: remat reports everything, what cannot report is named."""

from __future__ import annotations

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from probes_jax.observe.names import label_params
from probes_jax.stats.moments import summarize_magnitude
from tests.observe.evaluate import KEY, assert_rows, assert_same, evaluate, make_step, observed_and_plain, start
from tests.observe.nnx_models import Decoder

TOKENS = jnp.arange(6).reshape(2, 3)
X = jnp.linspace(-1.0, 2.0, 12).reshape(3, 4)


def mean_output(model, batch, rngs):
    return jnp.sum(jnp.square(model(batch)))


@functools.cache
def run(forward):
    return observed_and_plain(Decoder(nnx.Rngs(0), forward), mean_output, TOKENS)


@pytest.mark.parametrize("forward", ["remat", "no_updates", "tree"])
def test_l007_a_rematerialized_layer_counts_once_with_the_same_totals(forward):
    plain, observed = run("plain")[0], run(forward)[0]
    assert list(observed.rows) == list(plain.rows)
    for name, row in observed.rows.items():
        assert row == pytest.approx(plain.rows[name], rel=1e-6), name
    assert observed.captured.missing == {}
    np.testing.assert_allclose(observed.loss, plain.loss, rtol=1e-6)


class SharedInRemat(nnx.Module):
    """One layer: twice through the same rematerialized function, once directly, once through its own."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(4, 4, rngs=rngs)
        self.method = Method(rngs)

    def __call__(self, x):
        block = nnx.remat(lambda layer, x: jnp.tanh(layer(x)))
        x = block(self.layer, block(self.layer, x))
        return self.method(self.layer(x))


class Method(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(4, 4, rngs=rngs)

    @nnx.remat
    def __call__(self, x):
        return self.inner(x)


def test_a_shared_layer_in_remat_and_a_rematerialized_method():
    observed, _, parts = observed_and_plain(SharedInRemat(nnx.Rngs(0)), mean_output, X)
    kernel, x, expected = parts.params["layer"]["kernel"], X, {}
    for name in ("layer", "layer#1"):
        expected[name] = x @ kernel
        x = jnp.tanh(x @ kernel)
    expected["layer#2"] = x @ kernel
    y = x @ kernel @ parts.params["method"]["inner"]["kernel"]
    assert_rows(observed.rows, {**expected, "method/inner": y, "method": y, "output": y})
    assert list(observed.rows) == ["layer", "layer#1", "layer#2", "method/inner", "method", "output"]


class Raw(nnx.Module):
    """JAX's own jit around one layer, nnx's remat around another."""

    def __init__(self, rngs):
        self.raw = nnx.Linear(4, 4, rngs=rngs)
        self.good = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        x = jax.jit(lambda x: self.raw(x))(x)
        return nnx.remat(lambda layer, x: layer(x))(self.good, x)


def test_a_layer_that_a_transform_closes_over_is_named():
    observed, _, _ = observed_and_plain(Raw(nnx.Rngs(0)), mean_output, X)
    assert list(observed.rows) == ["good", "output"]
    ((point, reason),) = observed.captured.missing.items()
    assert str(point) == "raw"
    assert "nnx.jit instead of closing over it" in reason


class Stacked(nnx.Module):
    """Stacked layers in a scan."""

    def __init__(self, rngs):
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.stacks = nnx.List([nnx.vmap(Method)(rngs.split(2)), nnx.vmap(Method)(rngs.split(3))])

    def __call__(self, x):
        run = nnx.scan(lambda layer, x: jnp.tanh(layer.inner(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return run(self.stacks[1], run(self.stacks[0], self.first(x)))


@pytest.mark.optimized
def test_stacked_layers_have_a_row_each():
    observed, _, parts = observed_and_plain(Stacked(nnx.Rngs(0)), mean_output, X)
    x = X @ parts.params["first"]["kernel"]
    expected = {"first": x}
    for stack in range(2):
        inner = parts.params["stacks"][str(stack)]["inner"]
        for layer, kernel in enumerate(inner["kernel"]):
            y = x @ kernel
            expected[f"stacks[{stack}][{layer}]/inner"] = y
            x = jnp.tanh(y)
    assert_rows(observed.rows, {**expected, "output": x})


class Jitted(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])

    @nnx.jit
    def __call__(self, x):
        for layer in self.layers:
            x = jitted(layer, x)
        return x

    @nnx.jit
    def encode(self, x):
        return self.layers[0](x)


@nnx.jit
def jitted(layer, x):
    return layer(x)


def test_jit_inside_the_model_traced_plain_before_and_observed_twice():
    module = Jitted(nnx.Rngs(0))
    module(X)
    binding, parts = start(module, mean_output, X)
    plain = evaluate(binding, mean_output, X, parts, measure=None)
    first, second = (evaluate(binding, mean_output, X, parts) for _ in range(2))
    assert list(first.rows) == ["layers[0]", "layers[1]", "output"]
    assert first.rows == second.rows
    assert first.rows["layers[0]"] != first.rows["layers[1]"]
    doubled = evaluate(binding, mean_output, X, parts, measure=lambda x: summarize_magnitude(2.0 * x))
    assert doubled.rows["layers[1]"]["abs_max"] == 2.0 * first.rows["layers[1]"]["abs_max"]
    assert_same(plain.grads, first.grads)


def test_a_jitted_method_of_a_bound_model():
    observed, _, _ = observed_and_plain(Jitted(nnx.Rngs(0)), lambda m, x, rngs: jnp.sum(m.encode(m.layers[1](x))), X)
    assert list(observed.rows) == ["layers[1]", "layers[0]", "output.encode"]
    assert len(observed.outputs) == 1


@pytest.mark.parametrize("transform", [jax.checkpoint, jax.vmap])
def test_a_model_called_inside_a_transform_in_the_loss_function(transform):
    def loss_fn(model, batch, rngs):
        return jnp.sum(model(batch)) + jnp.sum(transform(model)(batch))

    observed, _, _ = observed_and_plain(nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0))), loss_fn, X)
    assert list(observed.rows) == ["layers[0]", "output"]
    assert {str(p) for p in observed.captured.missing} == {"layers[0]#1", "output#1"}
    assert all("loss_fn" in reason for reason in observed.captured.missing.values())
    assert len(observed.outputs) == 1


def test_microbatches_in_a_scan():
    binding, parts = start(SharedInRemat(nnx.Rngs(0)), mean_output, X)
    step, _ = make_step(binding, mean_output)

    def body(state, x):
        (_, (values, state, _)), _ = step(parts.params, state, x, KEY)
        return state, values

    both = jax.jit(lambda xs: jax.lax.scan(body, parts.state, xs))(jnp.stack([X, 2.0 * X]))[1]
    assert [value.stack_shape() for value in both] == [(2,)] * 6
    np.testing.assert_allclose(both[0].leaves["abs_max"][1], 2.0 * both[0].leaves["abs_max"][0], rtol=1e-6)


@pytest.mark.parametrize("observe", [True, False])
def test_no_tracer_leaks(observe):
    binding, parts = start(SharedInRemat(nnx.Rngs(0)), mean_output, X)

    def step(params):
        def objective(params):
            bound = binding.bind(params, {}, rngs=None, measure=summarize_magnitude if observe else None)
            loss = mean_output(bound, X, None)
            return loss, list(bound.finish().points.values())

        return jax.value_and_grad(objective, has_aux=True)(params)

    with jax.checking_leaks():
        jax.jit(step)(parts.params)


def test_the_parameters_of_both_styles_have_the_same_names():
    _, _, parts = run("remat")
    shapes = {
        tuple(k.key for k in path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(parts.params)
    }
    names = [labels[0] for labels, _ in label_params(shapes, {}).values()]
    assert "blocks[1]/up/kernel" in names
    assert len(set(names)) == len(names)


def test_two_threads_observe_and_a_third_runs_plain():
    before = nnx.Linear.__call__
    binding, parts = start(SharedInRemat(nnx.Rngs(0)), mean_output, X)
    results, errors = {}, []
    gate = threading.Barrier(3)

    def work(name, measure):
        try:
            gate.wait()
            for _ in range(2):
                results[name] = evaluate(binding, mean_output, X, parts, measure=measure, jit=lambda f: f)
        except Exception as error:
            errors.append(error)

    jobs = (("a", summarize_magnitude), ("b", summarize_magnitude), ("plain", None))
    threads = [threading.Thread(target=work, args=args) for args in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert results["a"].rows == results["b"].rows
    assert len(results["a"].rows) == 6
    assert results["plain"].captured.seen == ()
    assert nnx.Linear.__call__ is before


class OtherAxis(nnx.Module):
    """Stacked kernels over their last axis, biases over their first, and a layer that is square in every way."""

    def __init__(self, rngs):
        axes = nnx.StateAxes({nnx.PathContains("kernel"): 2, ...: 0})
        self.layers = nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs), out_axes=axes)(rngs.split(3))
        metadata = {nnx.PARTITION_NAME: "layers"}
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("in", "out"))
        self.square = nnx.vmap(
            lambda rngs: nnx.Linear(4, 4, kernel_init=kernel, rngs=rngs),
            out_axes=nnx.StateAxes({nnx.PathContains("kernel"): 1, ...: 0}),
            transform_metadata=metadata,
        )(rngs.split(4))
        self.axes, self.metadata = axes, metadata

    def __call__(self, x):
        x = nnx.scan(lambda layer, x: layer(x), in_axes=(self.axes, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)
        square = nnx.StateAxes({nnx.PathContains("kernel"): 1, ...: 0})
        run = nnx.scan(
            lambda layer, x: layer(x), in_axes=(square, nnx.Carry), out_axes=nnx.Carry, transform_metadata=self.metadata
        )
        return run(self.square, x)


def test_the_layer_axis_of_each_parameter():
    with nnx.use_eager_sharding(False):  # names of axes without a mesh
        observed, _, parts = observed_and_plain(OtherAxis(nnx.Rngs(0)), mean_output, X)
    shapes = {(name, leaf): x.shape for name, layer in parts.params.items() for leaf, x in layer.items()}
    labels = label_params(shapes, observed.captured.stacks, observed.captured.axes)
    assert labels["layers", "kernel"] == (tuple(f"layers[{i}]/kernel" for i in range(3)), 2)
    assert labels["layers", "bias"] == (tuple(f"layers[{i}]/bias" for i in range(3)), 0)
    assert labels["square", "kernel"] == (tuple(f"square[{i}]/kernel" for i in range(4)), 1)
    assert labels["square", "bias"] == (tuple(f"square[{i}]/bias" for i in range(4)), 0)
    expected = X
    for layer in range(3):
        expected = expected @ parts.params["layers"]["kernel"][:, :, layer] + parts.params["layers"]["bias"][layer]
    assert observed.rows["layers[2]"]["abs_max"] == pytest.approx(float(jnp.abs(expected).max()), rel=1e-5)


@pytest.mark.optimized
def test_parameters_of_stacked_layers_have_the_names_of_their_activations():
    observed, _, parts = observed_and_plain(Stacked(nnx.Rngs(0)), mean_output, X)
    shapes = {
        tuple(key.key for key in keys): leaf.shape for keys, leaf in jax.tree_util.tree_leaves_with_path(parts.params)
    }
    labels = label_params(shapes, observed.captured.stacks, observed.captured.axes)
    assert labels["stacks", "1", "inner", "kernel"] == (tuple(f"stacks[1][{i}]/inner/kernel" for i in range(3)), 0)
    assert labels["first", "kernel"] == (("first/kernel",), None)
