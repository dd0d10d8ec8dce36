"""Steps under `shard_map` over several axes, over some of the mesh's, and with models that name the axis themselves."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import probes_jax as pj
from tests.step.small import GROUPS, VOCAB, loss_fn, make_batch, make_sgd, norm64

PLAN = pj.Plan(groups=GROUPS, scan_every=2, backward=False)
TX = make_sgd()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("axes", [("data", "model"), ("data",)])
def test_tensor_and_data_parallel_by_hand_or_in_part(axes, kind):
    """`w` lies in shards over `model`: by hand where that axis is manual, by the compiler where it is not."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    rng = np.random.default_rng(0)
    w, x = (rng.normal(size=(8, n)).astype(np.float32) for n in (4, 8))

    def put(value, spec):
        return jax.device_put(value, NamedSharding(mesh, spec))

    def by_hand(spec):
        return P(*(entry if entry in axes else None for entry in spec))

    params, cut = {"w": put(w, P(None, "model"))}, by_hand(P(None, "model"))
    tx = optax.sgd(0.1)
    monitor = pj.Monitor.create(tx=tx, params=params, axis_names=axes)

    def step(params, monitor, x):
        def objective(params):
            total = jnp.sum((x @ params["w"]) ** 2)
            total = jax.lax.psum(total, "model") if "model" in axes else total
            return jax.lax.pmean(total, "data")

        loss, gradients = jax.value_and_grad(objective)(params)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        return monitor.measure(loss, gradients, params, new, tx.init(params), tx.init(params))

    run = jax.shard_map(
        step, mesh=mesh, in_specs=({"w": cut}, P(), by_hand(P("data"))), out_specs=P(), axis_names=set(axes)
    )
    _, report = jax.jit(run)(params, monitor, put(x, P("data")))
    found = report.scalars()
    w64, x64 = np.float64(w), np.float64(x)
    gradient = x64.T @ (x64 @ w64)  # of sum((x w)^2) / 2
    assert found["loss/mean"] == pytest.approx(((x64 @ w64) ** 2).sum() / 2, rel=1e-5)
    assert found["param/norm"] == pytest.approx(norm64(w), rel=1e-5)
    assert found["grad/w/norm"] == pytest.approx(norm64(gradient), rel=1e-5)
    assert found["grad/w/abs_max"] == pytest.approx(np.abs(gradient).max(), rel=1e-5)
    assert found["update/w/ratio"] == pytest.approx(0.1 * norm64(gradient) / norm64(w), rel=1e-4)


class Normed(nn.Module):
    axis: str | None = None

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, 4, name="embed")(tokens)
        x = nn.BatchNorm(use_running_average=False, axis_name=self.axis, name="norm")(x)
        return nn.Dense(VOCAB, name="head")(x)


class NNXNormed(nnx.Module):
    def __init__(self, axis=None):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(VOCAB, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, axis_name=axis, rngs=rngs)
        self.head = nnx.Linear(4, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


@pytest.mark.parametrize(("model_of", "check_vma"), [(Normed, True), (Normed, False), (NNXNormed, True)])
def test_batch_normalization_over_all_devices(model_of, check_vma):
    """A model that names the axis can be traced only where the axis is: statistics are those of the whole batch."""
    batch = make_batch(batch=16)
    binding = pj.wrap(model_of())
    made = binding.init(loss_fn, batch, jax.random.key(0))
    params, stats = jax.tree.map(np.array, (made.params, made.state))

    def trained(model, axis_names, compiled):
        monitor = pj.Monitor.create(
            tx=TX, params=params, plan=PLAN, model=model, loss_fn=loss_fn, batch=batch, model_state=stats,
            axis_names=axis_names,
        )  # fmt: skip

        def step(params, opt_state, monitor, stats, batch):
            (_, seen), gradients = monitor.value_and_grad(
                params, batch, jax.random.key(0), scan=True, model_state=stats
            )
            updates, later = TX.update(gradients, opt_state, params)
            new = optax.apply_updates(params, updates)
            _, report = monitor.measure(seen, gradients, params, new, opt_state, later)
            return (new, seen.state), report

        after, report = compiled(step)(params, TX.init(params), monitor, stats, batch)
        return after, report.scalars()

    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    per_device = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P(), P(), P(), P("data")), out_specs=P(), check_vma=check_vma
    )
    after, wanted = trained(model_of(), (), jax.jit)
    together, found = trained(model_of("data"), ("data",), lambda step: jax.jit(per_device(step)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), together, after)
    for name, value in wanted.items():
        if not name.startswith(("loss/shard", "loss/worst")):
            assert found[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_reports_of_donated_steps_are_read_later_and_nothing_compiles_twice():
    """Cases L139 and L136: five steps, states donated, scanned every other one; one program, and five reports."""
    params = {"w": np.ones((4,), np.float32)}
    monitor = pj.Monitor.create(tx=TX, params=params, axis_names=("data",), plan=pj.Plan(scan_every=2))
    traced = []

    def step(params, opt_state, monitor, x):
        traced.append(None)
        loss, gradients = jax.value_and_grad(lambda p: jax.lax.pmean(jnp.mean(p["w"] * x), "data"))(params)
        updates, later = TX.update(gradients, opt_state, params)
        new = optax.apply_updates(params, updates)
        return new, later, *monitor.measure(loss, gradients, params, new, opt_state, later)

    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    place = NamedSharding(mesh, P())
    run = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P(), P("data")), out_specs=P()), donate_argnums=(0, 1, 2)
    )
    state = jax.device_put((params, TX.init(params), monitor), place)
    state = jax.tree.map(lambda x: jnp.array(x, copy=True), state)
    reports = []
    for value in range(5):
        *state, report = run(*state, np.full((2, 4), float(value), np.float32))
        reports.append(report)
    assert len(traced) == 1
    wanted, w = [], 1.0
    for value in range(5):
        wanted.append(w * value)
        gradient = value / 4 * np.ones(4)
        w -= 0.1 * value / 4 * min(1.0, 0.5 / max(norm64(gradient), 1e-12))
    assert [r.scalars()["loss/mean"] for r in reports] == pytest.approx(wanted, rel=1e-5)
    assert [r.readings()[0].step for r in reports] == list(range(5))
    assert ["grad/w/norm" in r.scalars() for r in reports] == [True, False, True, False, True]
