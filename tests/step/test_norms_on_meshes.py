"""Norms of gradients where each tensor lies on the mesh in its own way, and gradients of sums over devices."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import probes_jax as pj
from tests.step.small import only
from tests.step.test_mesh import mesh_of

TX = optax.sgd(0.1)


def norms(gradients, mesh, specs):
    """What a step reports of these gradients, of parameters that lie as they do."""
    put = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in gradients.items()}
    params = jax.tree.map(jnp.ones_like, put)
    monitor = pj.Monitor.create(tx=TX, params=params, plan=only("grad"))
    state = TX.init(params)
    _, report = jax.jit(lambda g, p: monitor.measure(jnp.float32(1.0), g, p, p, state, state))(put, params)
    return report.scalars()


def test_l018_a_replicated_tensor_counts_once_beside_a_split_one():
    gradients = {"a": np.full((8, 2), 0.75, np.float32), "b": np.full((4,), 2.0, np.float32)}
    found = norms(gradients, mesh_of(model=8), {"a": P("model"), "b": P()})
    assert [found[f"grad/{name}/norm"] for name in ("a", "b")] == pytest.approx([3.0, 4.0])
    assert found["grad/norm"] == pytest.approx(5.0)


def test_l020_a_tensor_split_over_two_axes_is_added_up_over_both():
    gradients = {"experts": np.ones((2, 8), np.float32)}
    found = norms(gradients, mesh_of(expert=2, model=2), {"experts": P("expert", "model")})
    assert found["grad/norm"] == pytest.approx(4.0)


class Scaled(nn.Module):
    @nn.compact
    def __call__(self, x):
        return self.param("w", nn.initializers.ones, ()) * x


def linear(x, devices):
    """A loss with the gradient mean(x), the examples over so many devices."""
    mesh = mesh_of(data=devices)
    batch = {"x": jax.device_put(x, NamedSharding(mesh, P("data")))}
    state = pj.TrainState.create(
        model=pj.wrap(Scaled()), tx=TX,
        loss_fn=lambda model, batch, rngs: pj.Loss(nll=model(batch["x"])), plan=only("grad"), batch=batch,
        rngs=jax.random.key(0),
    )  # fmt: skip
    return pj.monitored_train_step(state, batch)[1].scalars()


def test_l029_a_replicated_parameter_gets_the_mean_over_all_devices():
    x = np.arange(8, dtype=np.float32)
    found = [linear(x, devices)["grad/norm"] for devices in (1, 2, 4)]
    assert found == pytest.approx([x.mean()] * 3)


def test_l027_a_sum_over_devices_inside_of_the_differentiated_function():
    mesh = mesh_of(data=4)
    params = {"w": np.float32(1.0)}
    monitor = pj.Monitor.create(tx=TX, params=params, plan=only("grad"), axis_names=("data",))

    def step(params, x):
        loss, gradients = jax.value_and_grad(lambda p: jax.lax.psum(p["w"] * x[0], "data"))(params)
        return monitor.measure(loss, gradients, params, params, TX.init(params), TX.init(params))[1]

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    assert run(params, np.arange(4, dtype=np.float32)).scalars()["grad/norm"] == pytest.approx(6.0)
