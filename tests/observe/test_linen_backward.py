"""Backward gradients at every point of a linen model, against gradients of a perturbation of each output."""

from __future__ import annotations

import collections

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from probes_jax.observe.rngs import Rngs
from tests.observe.evaluate import KEY, assert_rows, backward_rows, evaluate, start
from tests.observe.linen_twin import TOKENS, Decoder, decoder_names, unrolled
from tests.observe.test_linen_scan import NoDropout, X, mean_output


def loss_of(model, batch, rngs):
    return jnp.sum(jnp.square(model(batch)))


def perturbed(module, params, batch, name=lambda path: "/".join(path)):
    """Name to the gradient of the loss at that output, by adding a zero to every output of every public method."""

    def run(zeros):
        shapes, calls = {}, collections.Counter()

        def intercept(call, args, kwargs, context):
            output = call(*args, **kwargs)
            module, method = context.module, context.method_name
            if method == "setup" or (method.startswith("_") and method != "__call__"):
                return output
            text = (name(module.path) or "output") + ("" if method == "__call__" else f".{method}")
            count = calls[text]
            calls[text] += 1
            text += f"#{count}" if count else ""

            def shifted(leaf):
                if not jnp.issubdtype(leaf.dtype, jnp.floating):
                    return leaf
                assert text not in shapes
                shapes[text] = leaf
                return leaf + zeros[text] if zeros else leaf

            return jax.tree.map(shifted, output)

        with nn.intercept_methods(intercept):
            output = module.apply({"params": params}, batch, rngs=Rngs(KEY).streams(("params", "dropout")))
        return jnp.sum(jnp.square(output)), shapes

    _, shapes = jax.eval_shape(lambda: run(None))
    zeros = {text: jnp.zeros(leaf.shape, leaf.dtype) for text, leaf in shapes.items()}
    return jax.grad(lambda zeros: run(zeros)[0])(zeros)


@pytest.mark.parametrize("remat", [False, True])
def test_an_unrolled_model(remat):
    binding, parts = start(Decoder(remat=remat), loss_of, TOKENS)
    _, _, rows = backward_rows(binding, loss_of, TOKENS, parts)
    wanted = perturbed(Decoder(), parts.params, TOKENS, name=decoder_names)
    assert_rows(rows, wanted)


@pytest.mark.parametrize(("depth", "axis", "remat"), [(1, 0, False), (3, 1, True)])
def test_l013_scanned_layers_each_have_their_own_maximum(depth, axis, remat):
    """A slot shared by the layers would hold the sum of their maxima."""
    binding, parts = start(NoDropout(depth=depth, scan=True, remat=remat, axis=axis), mean_output, X)
    _, _, rows = backward_rows(binding, mean_output, X, parts)
    names = {f"blocks_{layer}": f"blocks[{layer}]" for layer in range(depth)}
    wanted = perturbed(
        NoDropout(depth=depth), unrolled(parts.params, axis), X, name=lambda p: "/".join(names.get(e, e) for e in p)
    )
    assert_rows(rows, wanted)


class Steps(nn.Module):
    """A cell scanned over time, its parameters the same in every step."""

    @nn.compact
    def __call__(self, x):
        cell = nn.scan(nn.SimpleCell, {}, variable_broadcast="params", split_rngs={"params": False})
        _, ys = cell(4, name="cell")(jnp.zeros((4,)), x)
        return ys


class UnrolledSteps(nn.Module):
    @nn.compact
    def __call__(self, x):
        cell, carry, ys = nn.SimpleCell(4, name="cell"), jnp.zeros((4,)), []
        for row in x:
            carry, y = cell(carry, row)
            ys.append(y)
        return jnp.stack(ys)


def test_time_steps_are_merged_and_their_maximum_is_no_sum():
    binding, parts = start(Steps(), loss_of, X)
    _, _, rows = backward_rows(binding, loss_of, X, parts)
    unrolled_binding, _ = start(UnrolledSteps(), loss_of, X)
    _, _, twin = backward_rows(unrolled_binding, loss_of, X, parts)
    for name in ("cell/h", "cell/i"):
        calls = [row for label, row in twin.items() if label.partition("#")[0] == name]
        assert len(calls) == len(X)
        assert rows[name]["count"] == sum(call["count"] for call in calls)
        assert rows[name]["abs_max"] == pytest.approx(max(call["abs_max"] for call in calls))
        assert rows[name]["sum_sq"] == pytest.approx(sum(call["sum_sq"] for call in calls), rel=1e-5)


class Mixed(nn.Module):
    """One module inside and outside of transforms of itself, in this order: plain, scan, plain, remat of a scan."""

    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(4, name="dense")
        scan = nn.scan(
            lambda module, x, _: (module(x), None),
            {},
            variable_broadcast="params",
            split_rngs={"params": False},
            length=2,
        )
        x = dense(x)
        x, _ = scan(dense, x, None)
        x = nn.tanh(dense(x))
        x, _ = nn.remat(scan)(dense, x, None)
        return x


class MixedPlain(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(4, name="dense")
        for call in range(6):
            x = dense(x)
            x = nn.tanh(x) if call == 3 else x
        return x


def test_slots_of_one_module_in_several_transforms_do_not_mix():
    binding, parts = start(Mixed(), loss_of, X)
    observed = evaluate(binding, loss_of, X, parts)
    _, _, rows = backward_rows(binding, loss_of, X, parts)
    wanted = perturbed(MixedPlain(), parts.params, X)
    calls = [wanted[f"dense#{call}" if call else "dense"] for call in range(6)]
    merged = {"dense": calls[:1], "dense#1": calls[1:3], "dense#2": calls[3:4], "dense#3": calls[4:6]}
    assert rows.keys() == observed.rows.keys()
    for name, arrays in merged.items():
        assert rows[name]["abs_max"] == pytest.approx(max(np.abs(a).max() for a in arrays), rel=1e-5), name
        assert rows[name]["count"] == sum(a.size for a in arrays)
        assert rows[name]["sum_sq"] == pytest.approx(
            sum(float((np.asarray(a, float) ** 2).sum()) for a in arrays), rel=1e-5
        )


class Unused(nn.Module):
    @nn.compact
    def __call__(self, x):
        nn.Dense(3, name="unused")(x)
        return nn.Dense(2, name="head")(jax.lax.stop_gradient(nn.Dense(4, name="cut")(x)))


def test_no_gradient_path_is_absent_and_not_zero():
    binding, parts = start(Unused(), loss_of, X)
    _, _, rows = backward_rows(binding, loss_of, X, parts)
    assert {name: row["count"] for name, row in rows.items()} == {"unused": 0, "cut": 0, "head": 6, "output": 6}


@pytest.mark.optimized
@pytest.mark.parametrize("options", [{}, {"scan": True, "remat": True}])
def test_loss_and_gradients_are_bit_equal(options):
    binding, parts = start(Decoder(**options), loss_of, TOKENS)
    loss, grads, _ = backward_rows(binding, loss_of, TOKENS, parts)

    def plain(params):
        streams = Rngs(KEY).streams(("params", "dropout"))
        return jnp.sum(jnp.square(Decoder(**options).apply({"params": params}, TOKENS, rngs=streams)))

    want, want_grads = jax.jit(jax.value_and_grad(plain))(parts.params)
    assert loss == want
    jax.tree.map(np.testing.assert_array_equal, grads, want_grads)


def test_nan_in_the_backward_pass_alone_shows_where_it_begins():
    class Root(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Dense(4, name="before")(x)
            z = jnp.sqrt(jnp.abs(nn.Dense(4, name="zero", kernel_init=nn.initializers.zeros)(y)))
            return nn.Dense(2, name="after")(z)

    binding, parts = start(Root(), loss_of, X)
    _, _, rows = backward_rows(binding, lambda m, b, r: jnp.sum(m(b) * 2.0), X, parts)
    assert np.isfinite(rows["after"]["sum_sq"])
    assert not np.isfinite(rows["zero"]["sum_sq"])
    assert not np.isfinite(rows["before"]["sum_sq"])
