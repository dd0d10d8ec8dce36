"""Every tensor and every odd device by name, also of arrays that no sharding rule of ours has seen."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import probes_jax as pj
from tests.step.copies import corrupted, flip, with_copy
from tests.step.small import make_batch, make_state, only
from tests.step.test_mesh import mesh_of, shard, tensor_parallel
from tests.step.test_two_processes import finish, start

pytestmark = pytest.mark.slow  # together; the second pair of Python and JAX goes without


def name(index: int) -> str:
    return str(jax.devices()[index])


def place(x, mesh, *spec):
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


def test_the_tensor_the_shard_and_the_device_of_a_state():
    batch = shard(make_batch(batch=16), mesh_of(data=4, model=2), "data")
    state = make_state(plan=only("replica"), batch=batch, shardings=tensor_parallel, donate=False)
    assert pj.find_divergence(state) == ()
    broken = corrupted(state, lambda parts: parts["params"]["block_1"]["up"]["kernel"], 5)
    broken = corrupted(broken, lambda parts: parts["opt_state"].stages[1].mu["head"]["bias"], 2)
    first, second = pj.find_divergence(broken)
    assert (first.name, first.shard, first.devices) == ("param/block_1/up/kernel", "[:, 8:16]", (name(5),))
    assert (first.copies, first.elements) == (4, 1)
    assert (second.name, second.shard, second.devices, second.copies) == (
        "opt/stages/1/mu/head/bias", "", (name(2),), 8,
    )  # fmt: skip
    assert str(first).startswith(f"param/block_1/up/kernel[:, 8:16], of 4 copies those on {name(5)} (elements")


def test_what_no_step_compares_is_compared_too():
    batch = shard(make_batch(batch=16), mesh_of(data=8), "data")
    state = make_state(plan=only("replica"), batch=batch, shardings=lambda path, shape: None, donate=False)
    (found,) = pj.find_divergence(dataclasses.replace(state, key=with_copy(state.key, 4, flip)))
    assert (found.name, found.devices, found.largest) == ("key", (name(4),), 1.0)


def test_the_majority_is_right_and_of_a_draw_the_first_device():
    mesh = mesh_of(data=4)
    x = place(np.float32([1.0, 2.0]), mesh)
    two = with_copy(with_copy(x, 0, lambda a: a + 3), 1, lambda a: a + 3)
    (found,) = pj.find_divergence({"x": two})
    assert found.devices == (name(2), name(3))
    three = with_copy(two, 2, lambda a: a + np.float32([3, 5]))
    (found,) = pj.find_divergence({"x": three})
    assert found.devices == (name(2), name(3))
    assert (found.elements, found.largest) == (2, 3.0)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int32, np.bool_, ml_dtypes.float8_e4m3fn])
def test_every_dtype(dtype):
    x = place(np.ones((4, 2)).astype(dtype), mesh_of(data=4, model=2), None, "model")
    assert pj.find_divergence([x]) == ()
    (found,) = pj.find_divergence([with_copy(x, 6, flip)])
    assert (found.shard, found.devices, found.elements) == ("[:, 0:1]", (name(6),), 1)
    assert (found.largest is None) is (dtype is np.bool_)


def test_bits_are_compared_and_not_values():
    x = place(np.float32([0.0, np.nan]), mesh_of(data=4))
    assert pj.find_divergence([x]) == ()
    (found,) = pj.find_divergence([with_copy(x, 1, lambda a: -a)])
    assert (found.elements, np.isnan(found.largest)) == (2, True)


def test_keys_arrays_on_one_device_and_what_is_no_array():
    keys = place(jax.random.split(jax.random.key(0), 3), mesh_of(data=4))
    assert pj.find_divergence({"keys": keys, "here": jnp.ones(3), "host": np.ones(3), "n": 3}) == ()
    assert pj.find_divergence(()) == ()


@pytest.mark.slow
def test_two_processes_find_the_same(tmp_path):
    found = finish(tmp_path, start(tmp_path, "two_copies"))
    assert found["healthy"] == []
    assert found["broken"] == [["param/head/bias", "", 1, 4]]
    assert found["device"].startswith("cpu") or "CPU" in found["device"]
    assert found["counts"] == [0.0, 1.0]
    assert found["which"] == "replica/param/head/bias"
