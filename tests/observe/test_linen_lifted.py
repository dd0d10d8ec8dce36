"""linen transforms other than plain scans against plain twins: every point, value, gradient and name."""

from __future__ import annotations

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from tests.observe.linen_twin import assert_twin, two_indices, unrolled
from tests.observe.test_linen_twins import PER_LAYER, Bare, Carry, X, first_call, separate


class Methods(nn.Module):
    """A method that is not `__call__`, and a private helper."""

    @nn.compact
    def layer(self, x, _):
        return self._helper(x), None

    def _helper(self, x):
        return nn.tanh(nn.Dense(4, name="mlp")(x))


class DecoratedScan(nn.Module):
    """A class whose `__call__` is scanned where it is written."""

    @functools.partial(nn.scan, **PER_LAYER, length=2)
    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(nn.Dense(4, name="mlp")(x)), None


class DecoratedRemat(nn.Module):
    @nn.remat
    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(nn.Dense(4, name="mlp")(x)), None


class DecoratedJit(nn.Module):
    @nn.jit
    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(nn.Dense(4, name="mlp")(x)), None


class WrittenWithTransforms(nn.Module):
    """Decorated methods and transforms of chosen methods, or their plain twins."""

    lifted: bool = True

    @nn.compact
    def __call__(self, x):
        if self.lifted:
            x, _ = DecoratedScan(name="decorated")(x, None)
            x, _ = nn.scan(Methods, **PER_LAYER, length=2, methods=["layer"])(name="methods").layer(x, None)
        for name in ("decorated", "methods"):
            for i in range(0 if self.lifted else 2):
                numbered = f"{name}_{i}"
                x, _ = Methods(name=numbered).layer(x, None) if name == "methods" else Carry(name=numbered)(x, None)
        x, _ = (DecoratedRemat if self.lifted else Carry)(name="remat")(x, None)
        for i in range(2):
            x, _ = (DecoratedJit if self.lifted else Carry)(name=f"jit_{i}")(x, None)
        return (nn.remat(Methods, methods=["layer"]) if self.lifted else Methods)(name="last").layer(x, None)[0]


@pytest.mark.optimized
def test_transforms_that_decorate_a_method_and_transforms_of_chosen_methods():
    def convert(variables):
        return separate({"params": unrolled(variables["params"], 0, "decorated")}, name="methods")

    assert_twin(WrittenWithTransforms(), WrittenWithTransforms(lifted=False), (X,), convert)


class DecoratedHelper(nn.Module):
    """The layers are one method of the model itself, scanned where it is written."""

    def setup(self):
        self.mlp = nn.Dense(4)

    def __call__(self, x):
        return self._layers(x, None)[0]

    @functools.partial(nn.scan, **PER_LAYER, length=2)
    def _layers(self, x, _):
        return nn.tanh(self.mlp(x)), None


class HelperUnrolled(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = nn.tanh(nn.Dense(4, name=f"mlp_{i}")(x))
        return x


@pytest.mark.optimized
def test_a_scanned_method_of_the_module_itself():
    convert = functools.partial(separate, name="mlp")
    observed = assert_twin(DecoratedHelper(), HelperUnrolled(), (X,), convert)
    assert observed.captured.stacks == {("mlp",): (0, 2)}


class Flagged(nn.Module):
    """Has an argument that must stay a Python value."""

    @nn.compact
    def __call__(self, x, double, scale=1.0):
        x = nn.tanh(nn.Dense(4, name="mlp")(x)) * scale
        return x + x if double else x


class CallsFlagged(nn.Module):
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        policy = jax.checkpoint_policies.dots_saveable
        remat = functools.partial(nn.remat, static_argnums=(2,), policy=policy, prevent_cse=False)
        layer = remat(Flagged) if self.remat else Flagged
        for i in range(2):
            x = layer(name=f"layers_{i}")(x, i == 1, scale=2.0)
        return x


def test_remat_with_a_policy_and_static_arguments():
    assert_twin(CallsFlagged(remat=True), CallsFlagged(), (X,))


class RematScan(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat_scan(Bare, lengths=(2, 2))(name="layers")(x)


class RematScanUnrolled(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            for j in range(2):
                x = Bare(name=f"layers_{i}_{j}")(x)
        return x


def grid(variables, name, axes):
    """Parameters of a stack with two layer axes, each layer by itself."""
    params = dict(variables["params"])
    stack = params.pop(name)
    for i, j in itertools.product(range(2), range(2)):
        params[f"{name}_{i}_{j}"] = jax.tree.map(lambda w, i=i, j=j: jnp.moveaxis(w, axes, (0, 1))[i, j], stack)
    return {"params": params}


@pytest.mark.optimized
def test_remat_scan():
    convert = functools.partial(grid, name="layers", axes=(0, 1))
    assert_twin(RematScan(), RematScanUnrolled(), (X,), convert, merge=lambda label: two_indices(first_call(label)))


class Experts(nn.Module):
    """Experts with parameters and inputs of their own, each a stack of layers; then a layer mapped over examples."""

    mapped: bool = True

    @nn.compact
    def __call__(self, x):
        inputs = jnp.stack([x, -x], -1)
        if self.mapped:
            layers = nn.scan(Carry, **PER_LAYER, length=2)
            options = {"variable_axes": {"params": 1}, "split_rngs": {"params": True}}
            experts = nn.vmap(layers, **options, in_axes=(-1, None), out_axes=-1)
            y = experts(name="experts")(inputs, None)[0]
            each = nn.vmap(nn.remat(Bare), {"params": None}, split_rngs={"params": False})(name="each")
            return each(y.sum(-1))
        ys = [inputs[..., i] for i in range(2)]
        for i, j in itertools.product(range(2), range(2)):
            ys[i] = Carry(name=f"experts_{i}_{j}")(ys[i], None)[0]
        each = Bare(name="each")
        return jnp.stack([each(row) for row in sum(ys)])


def test_vmap_over_experts_and_over_examples():
    convert = functools.partial(grid, name="experts", axes=(1, 0))
    assert_twin(Experts(), Experts(mapped=False), (X,), convert, merge=lambda label: two_indices(first_call(label)))


class Blocks(nn.Module):
    """Two blocks that `nn.jit` traces once."""

    jit: bool = False

    @nn.compact
    def __call__(self, x):
        block = nn.jit(Bare) if self.jit else Bare
        for i in range(2):
            x = block(name=f"layers_{i}")(x)
        return x


@pytest.mark.parametrize("wrap", [nn.remat, nn.jit])
def test_jit_inside_the_model(wrap):
    assert_twin(wrap(Blocks)(jit=True), Blocks(), (X,))


class Matrix(nn.Module):
    @nn.compact
    def __call__(self, x, transposed=False):
        shape = (7 - x.shape[-1], x.shape[-1]) if transposed else (x.shape[-1], 7 - x.shape[-1])
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        return x @ (kernel.T if transposed else kernel)


class Autoencoder(nn.Module):
    """The decoder is the encoder with its kernel transposed; a last layer is stored transposed."""

    mapped: bool = True

    @nn.compact
    def __call__(self, x):
        encoder, transpose = Matrix(name="encoder"), functools.partial(jax.tree.map, jnp.transpose)
        z = nn.tanh(encoder(x))
        if not self.mapped:
            return Matrix(name="last")(encoder(z, transposed=True))
        x = nn.map_variables(lambda module, z: module(z), "params", transpose, transpose, mutable=True)(encoder, z)
        return nn.map_variables(Matrix, "params", transpose, transpose, init=True)(name="last")(x)


class Normed(nn.Module):
    """Layers whose weights are normalized before each use."""

    plain: bool = False

    @nn.compact
    def __call__(self, x):
        first, second = nn.Dense(4, name="first"), nn.Dense(4, name="second")
        if self.plain:
            return Calls(second, name="spectral")(Calls(first, name="weight")(x))
        x = nn.WeightNorm(first, name="weight")(x)
        return nn.SpectralNorm(second, name="spectral")(x, update_stats=True)


class Calls(nn.Module):
    layer: nn.Module

    def __call__(self, x):
        return self.layer(x)


def test_weight_and_spectral_norm():
    def convert(variables):
        """The weights that the norms compute with."""
        params, u = variables["params"], variables["batch_stats"]["spectral"]["second/kernel/u"]
        first, second = params["first"]["kernel"], params["second"]["kernel"]
        first = first / jnp.linalg.norm(first, axis=0) * params["weight"]["first/kernel/scale"]
        v = u @ second.T / jnp.linalg.norm(u @ second.T)
        u = v @ second / jnp.linalg.norm(v @ second)
        kernels = {"first": first, "second": second / (v @ second @ u.T)[0, 0]}
        return {"params": {name: {**params[name], "kernel": kernel} for name, kernel in kernels.items()}}

    assert_twin(Normed(), Normed(plain=True), (X,), convert, mapped=True)


def test_tied_and_transposed_weights_by_map_variables():
    def convert(variables):
        params = variables["params"]
        return {"params": {**params, "last": {"kernel": params["last"]["kernel"].T}}}

    assert_twin(Autoencoder(), Autoencoder(mapped=False), (X,), convert, mapped=True)
