"""linen scans over layers and over time against plain twins: every point, value, gradient and name."""

from __future__ import annotations

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax.linen import partitioning

from tests.observe.linen_twin import assert_twin, unrolled

X = jnp.linspace(-1.0, 2.0, 12).reshape(3, 4)
SEQUENCE = jnp.linspace(-1.0, 1.0, 16).reshape(2, 2, 4)
PER_LAYER = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
SHARED = {"variable_broadcast": "params", "split_rngs": {"params": False}}


def first_call(label):
    """All calls of one method are one row: time steps, or examples."""
    return re.sub(r"#\d+", "", label)


class Layer(nn.Module):
    """Returns a new carry, and an output of its own."""

    @nn.compact
    def __call__(self, carry, x):
        h = nn.tanh(nn.Dense(4, name="mlp")(nn.LayerNorm(name="norm")(carry)) + x)
        return carry + h, 2.0 * h


class Bare(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.tanh(nn.Dense(4, name="mlp")(x))


class Stack(nn.Module):
    """Layers that are given, and used with inputs and outputs of their own on an axis that is not the first."""

    layers: nn.Module

    def __call__(self, x, xs):
        return self.layers(x, xs)


class Unrolled(nn.Module):
    depth: int
    axis: int = 0
    shared: bool = False

    @nn.compact
    def __call__(self, x, xs):
        ys = []
        layer = Layer(name="layers") if self.shared else None
        for i in range(self.depth):
            x, y = (layer or Layer(name=f"layers_{i}"))(x, jnp.take(xs, i, self.axis))
            ys.append(y)
        return x, jnp.stack(ys, self.axis)


def separate(variables, axis=0, name="layers"):
    return {"params": unrolled(variables["params"], axis, name)}


@pytest.mark.parametrize(("axis", "params", "wrap"), [(1, 0, lambda layer: layer), (2, 1, nn.remat)])
def test_scan_over_layers_with_inputs_and_outputs_on_other_axes(wrap, axis, params):
    scanned = nn.scan(
        wrap(Layer), variable_axes={"params": params}, split_rngs={"params": True}, in_axes=axis, out_axes=axis
    )
    xs = jnp.moveaxis(jnp.linspace(0.0, 1.0, 24).reshape(2, 3, 4), 0, axis)
    observed = assert_twin(Stack(wrap(scanned)()), Unrolled(2, axis), (X, xs), functools.partial(separate, axis=params))
    assert observed.captured.stacks == {("layers",): (params, 2)}


def test_scan_over_time_is_one_row_over_all_steps():
    module = Stack(nn.scan(Layer, **SHARED, in_axes=0, out_axes=0)())
    xs = jnp.linspace(0.0, 1.0, 36).reshape(3, 3, 4)
    # The carry and the output of a step are two values of one call.
    observed = assert_twin(module, Unrolled(3, shared=True), (X, xs), merge=first_call)
    assert observed.captured.stacks == {}
    assert observed.rows["layers:0"]["count"] == 3 * X.size


class Nested(nn.Module):
    @nn.compact
    def __call__(self, x):
        inner = nn.scan(nn.remat(Carry), **PER_LAYER, length=2)
        groups = nn.scan(nn.remat(Groups), variable_axes={"params": 1}, split_rngs={"params": True}, length=2)
        return groups(inner, name="groups")(x, None)[0]


class Carry(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(nn.Dense(4, name="mlp")(x)), None


class Groups(nn.Module):
    inner: type[nn.Module]

    @nn.compact
    def __call__(self, x, _):
        return self.inner(name="layers")(x, None)


class NestedUnrolled(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = Group(name=f"groups_{i}")(x)
        return x


class Group(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = Carry(name=f"layers_{i}")(x, None)[0]
        return x


def test_a_scan_in_a_scan_with_layers_on_different_axes():
    def convert(variables):
        groups = unrolled(variables["params"], 1, "groups")
        return {"params": {name: unrolled(group, 0, "layers") for name, group in groups.items()}}

    observed = assert_twin(Nested(), NestedUnrolled(), (X,), convert)
    assert observed.captured.stacks == {("groups",): (1, 2), ("groups", "layers"): (0, 2)}


class Partitioned(nn.Module):
    scan: bool = True

    @nn.compact
    def __call__(self, x):
        if self.scan:
            layers = nn.scan(Boxed, **PER_LAYER, length=2, metadata_params={nn.PARTITION_NAME: "layers"})
            return layers(name="layers")(x, None)[0]
        for i in range(2):
            x, _ = Boxed(name=f"layers_{i}")(x, None)
        return x


class Boxed(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        kernel = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        return nn.tanh(nn.Dense(4, kernel_init=kernel, name="mlp")(x)), None


@pytest.mark.optimized
def test_partition_names_of_layers():
    assert_twin(Partitioned(), Partitioned(scan=False), (X,), separate)


class Loop(nn.Module):
    """`nn.RNN` by a Python loop."""

    cell: nn.Module
    reverse: bool = False

    def __call__(self, x, return_carry=False):
        carry, ys = self.cell.initialize_carry(jax.random.key(0), x[:, 0].shape), {}
        for step in sorted(range(x.shape[1]), reverse=self.reverse):
            carry, ys[step] = self.cell(carry, x[:, step])
        y = jnp.stack([ys[step] for step in range(x.shape[1])], 1)
        return (carry, y) if return_carry else y


class Joined(nn.Module):
    """`nn.Bidirectional` by calls of its parts."""

    forth: nn.Module
    back: nn.Module

    def __call__(self, x):
        return jnp.concatenate([rnn(x, return_carry=True)[1] for rnn in (self.forth, self.back)], -1)


class Recurrent(nn.Module):
    scan: bool = True

    @nn.compact
    def __call__(self, x):
        cells = nn.LSTMCell(3, name="cell"), nn.LSTMCell(3, name="cell_back")
        if self.scan:
            return nn.Bidirectional(nn.RNN(cells[0], name="rnn"), nn.RNN(cells[1], name="back"), name="both")(x)
        return Joined(Loop(cells[0], name="rnn"), Loop(cells[1], True, name="back"), name="both")(x)


def test_recurrent_layers_there_and_back():
    last_carries = [f"{rnn}:0.{part}" for rnn in ("rnn", "back") for part in (0, 1)]
    assert_twin(Recurrent(), Recurrent(scan=False), (SEQUENCE,), merge=first_call, cut=last_carries)


class Tracked(nn.Module):
    """A scanned function of the module that hands a statistic from layer to layer, and keeps one of each layer."""

    scan: bool = True

    @nn.compact
    def __call__(self, x):
        total = self.variable("carried", "total", jnp.zeros, ())

        def body(module, x, number):
            carried = module.variable("carried", "total", jnp.zeros, ()) if self.scan else total
            seen = module.variable("stats", "seen", jnp.zeros, (4,)) if self.scan else None
            x = nn.tanh(nn.Dense(4, name="layers" if self.scan else f"layers_{number}")(x)) + carried.value
            if not module.is_initializing():
                carried.value += x.sum()
                if seen is not None:
                    seen.value += x.sum(0)
            return x, None

        if not self.scan:
            return body(self, body(self, x, 0)[0], 1)[0]
        axes = {"variable_axes": {"params": 0, "stats": 1}, "variable_carry": "carried"}
        return nn.scan(body, **axes, split_rngs={"params": True}, length=2)(self, x, None)[0]


def test_state_that_layers_carry_and_keep():
    observed = assert_twin(Tracked(), Tracked(scan=False), (X,), lambda v: {**separate(v), "carried": {"total": 0.0}})
    assert observed.state["stats"]["seen"].shape == (4, 2)


class Annotated(nn.Module):
    """Parameters with logical axis names, and layers scanned or mapped with them."""

    scan: bool = True

    @nn.compact
    def __call__(self, x):
        if self.scan:
            options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}
            layers = partitioning.scan_with_axes(partitioning.remat(AnnotatedLayer), **options)
            return layers(name="layers")(x, None)[0]
        for i in range(2):
            x, _ = AnnotatedLayer(name=f"layers_{i}")(x, None)
        return x


class AnnotatedLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(AnnotatedMlp(name="mlp")(x)), None


class AnnotatedMlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ partitioning.param_with_axes("kernel", nn.initializers.lecun_normal(), (4, 4), axes=("embed", "mlp"))


@pytest.mark.optimized
def test_scans_with_logical_axes():
    assert_twin(Annotated(), Annotated(scan=False), (X,), separate)
