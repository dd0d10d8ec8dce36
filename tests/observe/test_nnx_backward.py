"""Backward gradients at every point of an nnx model, against gradients of a perturbation of each output."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from probes_jax.observe.rngs import Rngs
from tests.observe.evaluate import KEY, assert_rows, assert_same, backward_rows, evaluate, start
from tests.observe.nnx_models import Block, Decoder
from tests.observe.test_nnx import TOKENS, Linears, X, mean_output
from tests.observe.test_nnx_remat import Stacked


def decoder_perturbed(model, tokens):
    """The decoder step by step, with a zero added to each output; the gradients of the zeros."""

    def run(zeros):
        shapes = {}

        def add(name, value):
            shapes[name] = value
            return value + zeros[name] if zeros else value

        module = nnx.clone(model)
        x = add("embed", module.embed(tokens))
        for index, block in enumerate(module.blocks):
            name = f"blocks[{index}]"
            h = add(f"{name}/norm", block.norm(x))
            h = add(f"{name}/up", block.up(h))
            h = add(f"{name}/drop", block.drop(nnx.relu(h)))
            h = add(f"{name}/down", block.down(h))
            x = add(name, add(f"{name}/bn", block.bn(x + h)))
        x = add("output", add("head", module.head(x)))
        return jnp.sum(jnp.square(x)), shapes

    zeros = jax.tree.map(jnp.zeros_like, run(None)[1])
    return jax.grad(lambda zeros: run(zeros)[0])(zeros)


@pytest.mark.parametrize("forward", ["plain", "remat", "no_updates"])
def test_every_point_with_its_gradient(forward):
    binding, parts = start(Decoder(nnx.Rngs(0), forward), mean_output, TOKENS)
    observed = evaluate(binding, mean_output, TOKENS, parts)
    loss, grads, rows = backward_rows(binding, mean_output, TOKENS, parts)
    plain, plain_parts = start(Decoder(nnx.Rngs(0)), mean_output, TOKENS)
    bound = plain.bind(plain_parts.params, plain_parts.state, rngs=Rngs(KEY))
    wanted = decoder_perturbed(bound._module, TOKENS)
    assert_rows(rows, wanted, only=set(observed.rows))
    assert set(rows) == set(wanted)
    assert loss == observed.loss
    # Under remat the compiler fuses the backward pass anew with what is measured in it: other roundings.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), grads, observed.grads)


def test_stacked_layers_have_a_gradient_each():
    binding, parts = start(Stacked(nnx.Rngs(0)), mean_output, X)
    _, _, rows = backward_rows(binding, mean_output, X, parts)

    def run(zeros):
        x = X @ parts.params["first"]["kernel"]
        shapes = {"first": x}
        x = x + zeros["first"] if zeros else x
        for stack in range(2):
            for layer, kernel in enumerate(parts.params["stacks"][str(stack)]["inner"]["kernel"]):
                name = f"stacks[{stack}][{layer}]/inner"
                y = shapes[name] = x @ kernel
                x = jnp.tanh(y + zeros[name] if zeros else y)
        shapes["output"] = x
        return jnp.sum(jnp.square(x + zeros["output"] if zeros else x)), shapes

    zeros = jax.tree.map(jnp.zeros_like, run(None)[1])
    assert_rows(rows, jax.grad(lambda zeros: run(zeros)[0])(zeros))


class Empty(nnx.Module):
    """Transforms without a module in them before those that have one."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        scale = jax.lax.scan(lambda total, x: (total + x, None), 0.0, jnp.ones(5))[0]
        scale = jax.lax.cond(scale > 0, lambda s: s, jnp.negative, scale)
        graph, state = nnx.split(self.dense)
        x = jax.lax.map(lambda x: nnx.merge(graph, state)(x), x)
        return scale * jax.lax.cond(scale > 0, lambda x: nnx.merge(graph, state)(x), lambda x: x, x)


def test_a_transform_without_a_module_takes_no_slot_of_another():
    def square(model, batch, rngs):
        return jnp.sum(jnp.square(model(batch)))

    binding, parts = start(Empty(nnx.Rngs(0)), square, X)
    _, _, rows = backward_rows(binding, square, X, parts)
    assert binding.marks.lifted
    kernel, bias = (np.asarray(parts.params["dense"][name], np.float64) for name in ("kernel", "bias"))
    y = (np.asarray(X) @ kernel + bias) @ kernel + bias
    assert_rows(rows, {"dense": 50 * y @ kernel.T, "dense#1": 50 * y, "output": 10 * y})


def test_repeated_calls_and_outputs_of_any_kind():
    binding, parts = start(Linears(nnx.Rngs(0)), mean_output, X)
    observed = evaluate(binding, mean_output, X, parts)
    loss, grads, rows = backward_rows(binding, mean_output, X, parts)
    assert rows.keys() == observed.rows.keys()
    assert_same((loss, grads), (observed.loss, observed.grads))
    for name, row in rows.items():
        assert row["count"] in (0, observed.rows[name]["count"]), name


def test_no_gradient_path_is_absent_and_the_module_keeps_no_tap():
    class Unused(nnx.Module):
        def __init__(self, rngs):
            self.unused, self.cut, self.head = (nnx.Linear(4, 4, rngs=rngs) for _ in range(3))

        def __call__(self, x):
            self.unused(x)
            return self.head(jax.lax.stop_gradient(self.cut(x)))

    module = Unused(nnx.Rngs(0))
    binding, parts = start(module, mean_output, X)
    _, _, rows = backward_rows(binding, mean_output, X, parts)
    assert {name: row["count"] for name, row in rows.items()} == {"unused": 0, "cut": 0, "head": 12, "output": 12}
    bound = binding.bind(parts.params, parts.state, rngs=Rngs(KEY))
    assert not [name for _, m in nnx.iter_modules(bound._module) for name in vars(m) if name.startswith("_probes")]


def test_one_block_in_remat_called_twice_has_two_gradients():
    class Twice(nnx.Module):
        def __init__(self, rngs):
            self.block = Block(4, rngs)

        def __call__(self, x):
            run = nnx.remat(lambda block, x: block(x))
            return run(self.block, run(self.block, x))

    binding, parts = start(Twice(nnx.Rngs(0)), mean_output, X)
    _, _, rows = backward_rows(binding, mean_output, X, parts)
    np.testing.assert_allclose(rows["block#1"]["sum_sq"], rows["output"]["sum_sq"], rtol=1e-6)
    assert rows["block"]["sum_sq"] != rows["block#1"]["sum_sq"]
