"""A copy that differs by one bit is seen, at no collective's price; copies that are the same never alarm."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import probes_jax as pj
from probes_jax.spec.coverage import ONE_DEVICE
from probes_jax.step.replica import UNDER_SHARD_MAP, weights
from tests.step.copies import corrupted, swap, with_copy
from tests.step.small import VOCAB, WIDTH, make_batch, make_state, only
from tests.step.test_mesh import OneBlock, count_collectives, fsdp, mesh_of, replicated, shard, tensor_parallel

pytestmark = pytest.mark.slow  # together; the second pair of Python and JAX goes without

COUNT = "replica/divergent_tensors"
PLAN = only("replica", scan_every=1)
WITHOUT = only("replica", scan_every=1, without=("replica",))
UP = ("block_0", "up", "kernel")


def hybrid(path, shape):
    """Cut over `fsdp`, replicated over `data`."""
    return PartitionSpec(*("fsdp" if size % 4 == 0 and index == 0 else None for index, size in enumerate(shape)))


MESHES = {
    "eight copies": (dict(data=8), replicated),
    "three copies": (dict(data=3), replicated),
    "four by two": (dict(data=4, model=2), replicated),
    "tensor parallel": (dict(data=4, model=2), tensor_parallel),
    "hybrid": (dict(data=2, fsdp=4), hybrid),
    "fsdp": (dict(data=8), fsdp),
}


@functools.cache
def made(case, plan=PLAN, **kwargs):
    """A state and a batch; of one case it is one program, which nothing is donated to."""
    axes, rule = MESHES[case]
    batch = shard(make_batch(batch=24), mesh_of(**axes), "data")
    given = {"model": OneBlock(), **kwargs}
    return make_state(plan=plan, batch=batch, shardings=rule, donate=False, **given), batch


def read(state, batch):
    _, report = pj.monitored_train_step(state, batch)
    reading = report.readings()[0]
    return report.scalars(), reading.which.get(COUNT)


def get(tree, path):
    for key in path:
        tree = tree[key]
    return tree


def of_params(parts):
    return get(parts["params"], UP)


def of_moments(parts):
    return get(parts["opt_state"].stages[1].nu, UP)


@pytest.mark.parametrize("case", [case for case in MESHES if case != "fsdp"])  # that has no second copy
def test_one_bit_of_one_copy_of_one_tensor(case):
    state, batch = made(case)
    healthy, which = read(state, batch)
    assert (healthy[COUNT], which) == (0.0, None)
    last = jax.tree.leaves(state.params)[0].sharding.mesh.devices.flat[-1].id
    for where, name in ((of_params, "replica/param/block_0/up/kernel"),
                        (of_moments, "replica/opt/stages/1/nu/block_0/up/kernel")):  # fmt: skip
        for device in (0, 1, last):
            found, which = read(corrupted(state, where, device), batch)
            assert (found[COUNT], which) == (1.0, name), device
            wrong = [key for key, value in found.items() if key.endswith("/diverged") and value]
            assert wrong == [f"{name}/diverged"]


def test_swapped_elements_and_the_optimizers_counter():
    state, batch = made("eight copies")
    found, which = read(corrupted(state, lambda parts: parts["params"]["embed"]["embedding"], 5, swap), batch)
    assert (found[COUNT], which) == (1.0, "replica/param/embed/embedding")
    found, which = read(corrupted(state, lambda parts: parts["opt_state"].stages[1].count, 3), batch)
    assert (found[COUNT], which) == (1.0, "replica/opt/stages/1/count")


def test_half_of_the_copies_alike_and_several_tensors():
    """A sum with weights of plus and minus one would cancel."""
    state, batch = made("eight copies")
    for devices in ((0, 1), (2, 5), (0, 1, 2, 3), (4, 5, 6, 7), (1, 3, 5, 7)):
        broken = state
        for device in devices:
            broken = corrupted(corrupted(broken, of_params, device), of_moments, device)
        found, which = read(broken, batch)
        assert (found[COUNT], which) == (2.0, "replica/param/block_0/up/kernel"), devices


@pytest.mark.parametrize("copies", [2, 3, 4, 5, 8, 255, 256, 4096])
def test_weights_add_up_to_nothing_and_no_group_of_few_does(copies):
    found = weights(copies)
    assert found.sum(dtype=np.uint64) % 2**32 == 0
    assert (found % 2).sum() == copies - copies % 2
    assert len(set(found.tolist())) == copies
    if copies <= 8:
        groups = [sum(int(w) for i, w in enumerate(found) if group >> i & 1) for group in range(1, 2**copies - 1)]
        assert all(total % 2**32 for total in groups)


def test_l026_a_tensor_declared_replicated_of_which_one_copy_is_another():
    mesh = mesh_of(data=4)
    w = jax.device_put(np.float32([1.0]), NamedSharding(mesh, PartitionSpec()))
    tx, params = optax.sgd(0.0), {"w": with_copy(w, 3, lambda x: x + 1)}
    monitor = pj.Monitor.create(tx=tx, params={"w": w}, plan=only("replica", scan_every=1))
    measure = jax.jit(lambda m, p: m.measure(np.float32(1.0), p, p, p, tx.init(p), tx.init(p)))
    assert measure(monitor, {"w": w})[1].scalars()[COUNT] == 0
    _, report = measure(monitor, params)
    assert report.scalars()[COUNT] == 1
    assert report.readings()[0].which[COUNT] == "replica/param/w"
    (found,) = pj.find_divergence(params)
    assert (found.name, found.devices, found.largest) == ("w", (str(jax.devices()[3]),), 1.0)


def test_a_monitor_does_not_know_how_the_optimizer_state_lies():
    mesh = mesh_of(data=4)
    w = jax.device_put(np.float32([1.0]), NamedSharding(mesh, PartitionSpec()))
    monitor = pj.Monitor.create(tx=optax.adam(0.1), params={"w": w}, plan=PLAN)
    assert "pj.find_divergence" in monitor.settings.missing["replica/opt"]


def test_no_copy_is_absent_and_says_why():
    state, batch = make_state(plan=PLAN, donate=False), make_batch()
    _, report = pj.monitored_train_step(state, batch)
    assert not [name for name in report.scalars() if name.startswith("replica")]
    assert dict(report.coverage.missing)["replica"] == ONE_DEVICE
    # With everything cut there is nothing to compare: a plain matrix, and an optimizer without a counter.
    mesh = mesh_of(data=8)
    x = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, PartitionSpec("data")))
    state = pj.TrainState.create(
        model=pj.wrap(nn.Dense(8, use_bias=False)),
        tx=optax.sgd(0.1),
        loss_fn=lambda model, batch, rngs: (model(batch["x"]) ** 2).mean(),
        plan=PLAN,
        batch={"x": x},
        rngs=jax.random.key(0),
        shardings=lambda path, shape: PartitionSpec("data"),
    )
    _, report = pj.monitored_train_step(state, {"x": x})
    assert not [name for name in report.scalars() if name.startswith("replica")]
    assert "no copies" in dict(report.coverage.missing)["replica"]


def test_what_fsdp_cuts_is_left_out_and_the_rest_compared():
    state, batch = made("fsdp")
    found, _ = read(state, batch)
    kernel = state.params["block_0"]["up"]["kernel"]
    assert kernel.sharding.spec[0] == "data"
    assert "replica/param/block_0/up/kernel/diverged" not in found
    assert found["replica/opt/stages/1/count/diverged"] == found[COUNT] == 0


@pytest.mark.parametrize("check", [True, False])
def test_under_shard_map_each_device_compares_what_it_holds(check):
    """L027: unchecked, a sum over devices inside of what is differentiated gives every device a gradient of its own."""
    mesh, tx = mesh_of(data=4), optax.sgd(0.1)
    params = jax.device_put({"w": np.ones(4, np.float32)}, NamedSharding(mesh, PartitionSpec()))
    monitor = pj.Monitor.create(tx=tx, params=params, plan=PLAN, axis_names=("data",))
    assert monitor.settings.missing["replica/opt"] == UNDER_SHARD_MAP

    def step(params, x):
        loss, gradients = jax.value_and_grad(lambda p: jax.lax.psum(p["w"].sum() * x[0], "data"))(params)
        return monitor.measure(loss, gradients, params, params, tx.init(params), tx.init(params))[1]

    data, whole = PartitionSpec("data"), PartitionSpec()
    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(whole, data), out_specs=whole, check_vma=check))
    report = run(params, np.arange(4, dtype=np.float32))
    assert report.scalars()[COUNT] == (0 if check else 1)
    if not check:
        assert report.readings()[0].which[COUNT] == "replica/grad/w"
    broken = {"w": with_copy(params["w"], 3, lambda x: x + 1)}
    found = run(broken, np.ones(4, np.float32)).scalars()
    assert found["replica/param/w/diverged"] == 1


def test_without_it():
    state, batch = made("eight copies", WITHOUT)
    found, _ = read(state, batch)
    assert not [name for name in found if name.startswith("replica")]


@pytest.mark.parametrize("case", ["eight copies", "tensor parallel"])
def test_it_costs_no_collective_and_twenty_bytes_a_tensor(case):
    (state, batch), (bare, _) = made(case), made(case, WITHOUT)
    assert count_collectives(state, "full", batch) == count_collectives(bare, "full", batch)
    assert count_collectives(state, "light", batch) == count_collectives(bare, "light", batch)
    reports = [pj.monitored_train_step(s, batch)[1] for s in (state, bare)]
    tensors = sum(name.endswith("/diverged") for name in reports[0].scalars())
    assert reports[0].layout.size - reports[1].layout.size == 5 * tensors


def test_inside_of_a_scan_over_steps_and_with_microbatches():
    state, batch = made("tensor parallel", only("replica", scan_every=2), microbatches=2)
    run = jax.jit(lambda s, b: jax.lax.scan(lambda s, _: pj.monitored_train_step(s, b), s, length=4))
    for one, want in ((state, 0.0), (corrupted(state, of_params, 5), 1.0)):
        values = run(one, batch)[1].scalars()[COUNT]
        assert values[1] is None and values[3] is None
        assert values[0] == want
        assert (values[2] > 0) is (want > 0)  # the optimizer carries it on


class Stacked(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, name="embed")(tokens)
        x, _ = nn.scan(
            lambda module, x, _: (nn.tanh(module(x)), None),
            variable_axes={"params": 0}, split_rngs={"params": True}, length=3,
        )(nn.Dense(WIDTH, name="layer"), x, None)  # fmt: skip
        return nn.Dense(VOCAB, name="head")(x)


def test_stacked_parameters_are_one_tensor():
    state, batch = made("eight copies", model=Stacked())
    name = next(n for n in read(state, batch)[0] if n.startswith("replica/param/layer") and "kernel" in n)
    found, which = read(corrupted(state, lambda parts: parts["params"]["layer"]["kernel"], 6), batch)
    assert (found[COUNT], f"{which}/diverged") == (1.0, name)


class Noisy(nn.Module):
    """Dropout and batch norm: what differs from device to device in a step must not reach a parameter."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, name="embed")(tokens)
        x = nn.BatchNorm(use_running_average=False, name="norm")(nn.Dense(WIDTH, name="up")(x))
        x = nn.Dropout(0.3, deterministic=False)(nn.gelu(x))
        return nn.Dense(VOCAB, name="head")(x)


@pytest.mark.parametrize("case", ["eight copies", "tensor parallel"])
def test_a_hundred_healthy_steps(case):
    state, batch = made(case, only("replica", scan_every=20), model=Noisy())
    run = jax.jit(lambda s, b: jax.lax.scan(lambda s, _: pj.monitored_train_step(s, b), s, length=100))
    after, report = run(state, batch)
    found = report.scalars()
    values = [value for value in found[COUNT] if value is not None]
    assert values == [0.0] * 5
    assert found["loss/mean"][-1] < found["loss/mean"][0]
    assert pj.find_divergence(after) == ()


def test_training_is_unchanged():
    ends = []
    for plan in (PLAN, WITHOUT):
        state, batch = made("tensor parallel", plan)
        for _ in range(3):
            state, _ = pj.monitored_train_step(state, batch)
        ends.append(jax.tree.map(np.asarray, (state.params, state.opt_state)))
    jax.tree.map(np.testing.assert_array_equal, *ends)
