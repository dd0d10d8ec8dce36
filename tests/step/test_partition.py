"""How the numbers of each query and head lie is known from what they are, whatever lengths they share with others."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from probes_jax.spec.plan import Plan
from probes_jax.step.partition import find_mesh, find_partition
from tests.step.test_mesh import mesh_of


def partition_of(axes, batch, kernel):
    mesh = mesh_of(**axes)
    tokens = jax.device_put(np.zeros((4, 32)), NamedSharding(mesh, PartitionSpec(*batch)))
    weight = jax.device_put(np.zeros((32, 32)), NamedSharding(mesh, PartitionSpec(*kernel)))
    return find_partition(Plan(), tokens, find_mesh(tokens)).with_features({"kernel": weight})


def test_heads_are_cut_though_there_are_as_many_tokens_as_features():
    known = partition_of(dict(data=2, model=4), ("data",), (None, "model"))
    assert known.heads((4, 32, 8)).dims == (("data",), (), ("model",))
    assert known.heads((4, 32, 6)).dims == (("data",), (), ())  # six heads do not lie on four devices


def test_tokens_are_cut_where_the_batch_is():
    known = partition_of(dict(data=2, seq=2, model=2), ("data", "seq"), (None, "model"))
    assert known.heads((4, 32, 8)).dims == (("data",), ("seq",), ("model",))
