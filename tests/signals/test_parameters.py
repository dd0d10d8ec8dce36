"""Totals and layers of gradients, whatever their size, role and stacking."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from probes_jax.signals import parameters
from probes_jax.signals.parameters import ParameterInfo, measure_gradients, measure_norms, subtract
from probes_jax.stats.summary import merge_all
from tests.stats.reference import finalized

INFOS = {
    "embed": ParameterInfo(("embed/embedding",), embedding=True),
    "blocks": ParameterInfo(("blocks[0]/w", "blocks[1]/w", "blocks[2]/w"), stack_axis=1),
    "bias": ParameterInfo(("bias",)),
    "trunk": ParameterInfo(("trunk/w",), frozen=True),
}


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    shapes = {"embed": (6, 4), "blocks": (4, 3, 2), "bias": (5,), "trunk": (3, 3)}
    found = {key: rng.normal(size=shape).astype(np.float32) for key, shape in shapes.items()}
    found["embed"][2:] = 0.0
    return found


def value(item):
    return finalized(merge_all(item.parts))


@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("small", [0, 2**16])
def test_totals(tensors, layers, small, monkeypatch):
    monkeypatch.setattr(parameters, "_SMALL", small)
    items = {item.entry.key: item for item in measure_gradients(tensors, INFOS, layers=layers)}
    moved = np.concatenate([tensors[key].astype(np.float64).ravel() for key in ("embed", "blocks", "bias")])
    (total,) = value(items["grad/{stat}"])
    assert total["norm"] == pytest.approx(np.linalg.norm(moved))
    assert total["abs_mean"] == pytest.approx(np.abs(moved).mean())
    assert total["abs_max"] == pytest.approx(np.abs(moved).max())
    assert total["zero_fraction"] == pytest.approx((moved == 0).mean())
    assert value(items["grad/{stat}/embedding"])[0]["zero_fraction"] == pytest.approx(16 / 24)
    assert value(items["grad/{stat}/other"])[0]["zero_fraction"] == 0
    assert value(items["grad_frozen/{stat}"])[0]["norm"] == pytest.approx(np.linalg.norm(tensors["trunk"]))
    assert ("grad/bias/{stat}" in items) is layers
    assert "grad/trunk/w/{stat}" not in items


def test_one_row_per_stacked_layer(tensors):
    items = {item.entry.key: item for item in measure_gradients(tensors, INFOS, layers=True)}
    stacked = items["grad/blocks[0]/w/{stat}"]
    assert stacked.entry.labels == tuple(f"grad/blocks[{layer}]/w/{{stat}}" for layer in range(3))
    for layer, found in enumerate(value(stacked)):
        assert found["norm"] == pytest.approx(np.linalg.norm(tensors["blocks"][:, layer].astype(np.float64)))


def test_norms_hold_every_tensor(tensors):
    """L024: parameter and update norms follow the same rule as the gradient norm; frozen weights are weights too."""
    items = {item.entry.key: item for item in measure_norms("param", tensors, INFOS, layers=True)}
    everything = np.concatenate([x.astype(np.float64).ravel() for x in tensors.values()])
    assert value(items["param/{stat}"])[0]["norm"] == pytest.approx(np.linalg.norm(everything))
    assert value(items["param/trunk/w/{stat}"])[0]["norm"] == pytest.approx(np.linalg.norm(tensors["trunk"]))


def test_the_update_is_what_was_applied():
    old = {"w": jnp.asarray([1.0, 256.0], jnp.bfloat16)}
    new = {"w": old["w"] + jnp.asarray([0.5, 0.5], jnp.bfloat16)}  # the second is lost in rounding
    np.testing.assert_array_equal(subtract(new, old)["w"], [0.5, 0.0])


@pytest.mark.parametrize(("axes", "order"), [((0, 2), "gkld->gldk"), ((2, 0), "gkld->lgdk")])
def test_one_row_per_layer_of_a_stack_of_stacks(axes, order):
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 5)).astype(np.float32)
    names = tuple(f"groups[{i}]/layers[{j}]/w" for i in range(x.shape[axes[0]]) for j in range(x.shape[axes[1]]))
    info = ParameterInfo(names, stack_axis=axes)
    (item,) = [i for i in measure_gradients({"w": x}, {"w": info}, layers=True) if len(i.entry.labels) > 1]
    assert item.entry.labels == tuple(f"grad/{name}/{{stat}}" for name in names)
    rows = np.einsum(order, x).reshape(len(names), -1)
    assert [found["norm"] for found in value(item)] == pytest.approx(np.linalg.norm(rows.astype(np.float64), axis=1))
