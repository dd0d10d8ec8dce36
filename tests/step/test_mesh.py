"""Sharded equals unsharded, empty shards are absent, and the price is two collectives."""

from __future__ import annotations

import dataclasses
import functools
import re

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import probes_jax as pj
from probes_jax.spec.plan import MORE
from tests.step.small import GROUPS, VOCAB, WIDTH, Block, make_batch, make_sgd, make_state, only
from tests.step.test_microbatches import is_noise

PLAN = pj.Plan(more=MORE, groups=GROUPS, scan_every=2, precision=True, stages=True)
PLANS = {"every family": PLAN, "few families": only("act", "grad", scan_every=2)}


class OneBlock(nn.Module):
    """With the names of `Model`, and half of it: a full program compiles in half of the time."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, name="embed")(tokens)
        return nn.Dense(VOCAB, name="head")(Block(name="block_0")(x))


def mesh_of(**axes):
    devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))])
    return Mesh(devices.reshape(*axes.values()), tuple(axes))


def shard(batch, mesh, *axes):
    return {key: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes))) for key, x in batch.items()}


def replicated(path, shape):
    return PartitionSpec()


def fsdp(path, shape):
    """Every matrix is sharded over `data` on its first divisible axis."""
    return PartitionSpec(*("data" if size % 8 == 0 and index == 0 else None for index, size in enumerate(shape)))


def tensor_parallel(path, shape):
    """Up-projections by column, down-projections by row, the embedding by feature."""
    if path[-2:] == ("up", "kernel") or path[-1] == "embedding":
        return PartitionSpec(None, "model")
    if path[-2:] == ("down", "kernel"):
        return PartitionSpec("model", None)
    return PartitionSpec()


CASES = {
    "data": (dict(data=8), ("data",), replicated, {}),
    "fsdp": (dict(data=8), ("data",), fsdp, {}),
    "tensor": (dict(data=2, model=4), ("data",), tensor_parallel, {}),
    "tensor with a feature guess": (dict(data=2, model=4), ("data",), tensor_parallel, {"feature_axes": ("model",)}),
    "context": (dict(data=4, seq=2), ("data", "seq"), replicated, {}),
}


def run(batches, plan=PLAN, model=None, **kwargs):
    """The state before the first step, that after the last, and what each has reported."""
    first = make_state(OneBlock() if model is None else model, make_sgd(), plan, batches[0], donate=False, **kwargs)
    state, found = first, []
    for batch in batches:
        state, report = pj.monitored_train_step(state, batch)
        found.append(report.scalars())
    return first, state, found


def is_of_backward_pass(name):
    """What a narrow format would lose there: a microbatch's loss has a scale of its own."""
    return name.startswith("grad_act/") and "flow/" in name


def tolerance(name):
    """A count may move by an element whose last bit lies across a threshold."""
    if name.endswith("/kurtosis"):
        return dict(rel=2e-3, abs=2e-3)
    return dict(abs=3e-3) if "flow/" in name else dict(rel=3e-4, abs=1e-5)


BATCHES = [make_batch(seed, batch=16) for seed in range(2)]


@functools.cache
def alone(plan):
    return run(BATCHES, PLANS[plan])[2]


@functools.cache
def sharded(case, microbatches, plan):
    axes, token_axes, rule, settings = CASES[case]
    mesh = mesh_of(**axes)
    batches = [
        {key: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*token_axes[: x.ndim]))) for key, x in batch.items()}
        for batch in BATCHES
    ]
    plan = dataclasses.replace(PLANS[plan], **settings)
    return *run(batches, plan, shardings=rule, microbatches=microbatches), batches[0]


# Every family where parameters, and where tokens and features are cut; `test_mesh_roles.py` has more meshes.
EVERY = [("fsdp", 1, "every family"), ("tensor", 2, "every family")]
OTHERS = [(case, 2, "few families") for case in ("data", "tensor with a feature guess", "context")]


@pytest.mark.parametrize(("case", "microbatches", "plan"), [*EVERY, *OTHERS])
def test_values_are_those_of_one_device_in_full_and_light_steps(case, microbatches, plan):
    *_, found, _ = sharded(case, microbatches, plan)
    for one, many in zip(alone(plan), found, strict=True):
        for name, value in one.items():
            if name.startswith(("loss/shard", "loss/worst")) or (microbatches > 1 and is_of_backward_pass(name)):
                continue
            assert many[name] == pytest.approx(value, **tolerance(name)), name
        own = ("loss/shard", "replica/")  # one device has no others
        assert {n for n in many if not n.startswith(own) and not is_noise(n)} == {
            n for n in one if not n.startswith(own)
        }


def test_worst_shard_and_an_empty_one():
    """A shard without a valid token is absent; the worst shard is the maximum of the local means."""
    batch = make_batch(batch=16, masked=False)
    batch["mask"][4:6] = 0.0  # shard 2 of 8
    batch["mask"][0, 3:] = 0.0
    mesh = mesh_of(data=8)
    state = make_state(batch=shard(batch, mesh, "data"), shardings=replicated)
    params = jax.tree.map(np.array, state.params)
    _, report = pj.monitored_train_step(state, shard(batch, mesh, "data"))
    found, readings = report.scalars(), report.readings()[0]
    from tests.step.small import plain_loss

    _, (nll, _) = plain_loss(params, batch)
    nll = np.asarray(nll, np.float64)
    local = {}
    for index in range(8):
        rows = slice(2 * index, 2 * index + 2)
        if batch["mask"][rows].sum():
            local[index] = (nll[rows] * batch["mask"][rows]).sum() / batch["mask"][rows].sum()
    assert "loss/shard[2]" not in found
    for index, value in local.items():
        assert found[f"loss/shard[{index}]"] == pytest.approx(value, rel=1e-5)
    worst = max(local, key=local.get)
    assert found["loss/worst_shard"] == pytest.approx(local[worst], rel=1e-5)
    assert readings.which["loss/worst_shard"] == f"loss/shard[{worst}]"


def test_nan_on_one_device_is_seen_by_all():
    """A pmax on CPU may swallow a NaN; the counts are sums and cannot."""
    batch = make_batch(batch=16)
    mesh = mesh_of(data=8)

    def loss_fn(model, batch, rngs):
        logits = model(batch["tokens"]) + batch["hole"][:, None, None]
        return pj.Loss(nll=logits[..., 0] ** 2, logits=logits)

    batch["hole"] = np.zeros((16,), np.float32)
    on_mesh = dict(batch=shard(batch, mesh, "data"), shardings=replicated, donate=False)
    state = make_state(OneBlock(), loss_fn=loss_fn, plan=only("logits", groups=()), **on_mesh)
    for hole in (np.nan, np.inf):
        batch["hole"][9] = hole
        _, report = pj.monitored_train_step(state, shard(batch, mesh, "data"))
        found = report.scalars()
        assert not np.isfinite(found["loss/mean"])
        assert not np.isfinite(found["logits/abs_max"])
        assert np.isfinite(found["logits/finite_abs_max"])
        assert found["logits/nan_count" if np.isnan(hole) else "logits/inf_count"] == 6
        assert not np.isfinite(found["grad/norm"])


COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def count_collectives(state, program, batch):
    from probes_jax.step.train import compiled

    text = compiled(state.settings, program).lower(np.int32(0), state.core, batch).compile().as_text()
    return len(re.findall(rf" = .+ (?:{'|'.join(COLLECTIVES)})(?:-start)?\(", text))


@pytest.mark.parametrize(("case", "microbatches", "plan"), [EVERY[0], OTHERS[0]])
def test_two_more_collectives_whatever_is_probed(case, microbatches, plan):
    state, *_, batch = sharded(case, microbatches, plan)
    plain = count_collectives(state, "off", batch)
    assert plain > 0  # the gradients' own: the count sees something
    for program in ("light", "full"):
        assert 1 <= count_collectives(state, program, batch) - plain <= 2, program


def test_no_collective_on_one_device():
    state = make_state(OneBlock(), donate=False)
    assert count_collectives(state, "full", make_batch()) == 0


def test_wrong_axis_names_are_refused():
    mesh = mesh_of(data=8)
    with pytest.raises(ValueError, match="mesh axis 'tokens'"):
        make_state(plan=pj.Plan(token_axes=("tokens",)), batch=shard(make_batch(), mesh, "data"))
    with pytest.raises(ValueError, match="no mesh was found"):
        make_state(plan=pj.Plan(token_axes=("data",)))


def test_shardings_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="shardings was given, but no mesh"):
        make_state(shardings=lambda path, shape: PartitionSpec("data"))
    mesh = mesh_of(data=8)
    with pytest.raises(ValueError, match="mesh axis 'dta'"):
        make_state(batch=shard(make_batch(), mesh, "data"), shardings=lambda path, shape: PartitionSpec("dta"))
    with pytest.raises(ValueError, match="structure of the parameters"):
        make_state(batch=shard(make_batch(), mesh, "data"), shardings={"embed": PartitionSpec()})


def test_an_axis_that_shards_tokens_and_features_is_used_once():
    mesh = mesh_of(data=2, model=4)
    batch = {
        key: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*("data", "model")[: x.ndim])))
        for key, x in make_batch(batch=16, length=8).items()
    }
    *_, (found,) = run([batch], only("act", feature_axes=("model",)), shardings=replicated)
    *_, (one,) = run([make_batch(batch=16, length=8)], only("act"))
    assert found["act/head/rms"] == pytest.approx(one["act/head/rms"], rel=1e-5)


def test_state_keeps_its_shardings():
    mesh = mesh_of(data=8)
    batch = shard(make_batch(batch=16), mesh, "data")
    state = make_state(OneBlock(), batch=batch, shardings=fsdp, donate=False)
    after, _ = pj.monitored_train_step(state, batch)
    for first, last in ((state, after), sharded(*EVERY[0])[:2]):
        lies = [jax.tree.map(lambda x: x.sharding, one.core) for one in (first, last)]
        assert lies[0] == lies[1]
    state = after
    kernel = state.params["block_0"]["up"]["kernel"]
    assert kernel.sharding.spec == PartitionSpec("data", None) or kernel.sharding.spec == PartitionSpec("data")
    moment = state.opt_state.stages[1].mu["block_0"]["up"]["kernel"]
    assert moment.sharding.is_equivalent_to(kernel.sharding, 2)


WRAPPED = {
    "masked": lambda: optax.masked(optax.adam(0.1), lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
    "multi_transform": lambda: optax.multi_transform(
        {"a": optax.adam(0.1), "b": optax.set_to_zero()},
        lambda params: {name: "b" if name == "embed" else "a" for name in params},
    ),
    "muon": lambda: optax.contrib.muon(0.1),
    "chain": lambda: pj.chain(("clip", optax.clip_by_global_norm(1.0)), ("masked", WRAPPED["masked"]())),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_moments_lie_where_their_parameter_lies_however_optax_wraps_them(name):
    mesh = mesh_of(data=8)
    batch = shard(make_batch(batch=16), mesh, "data")
    state = make_state(tx=WRAPPED[name](), batch=batch, shardings=fsdp)
    kernel = state.params["block_0"]["up"]["kernel"]
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.shape == kernel.shape]
    assert moments
    assert {x.sharding for x in moments} == {kernel.sharding}
    state, report = pj.monitored_train_step(state, batch)
    assert np.isfinite(report.scalars()["update/norm"])


def test_shards_of_which_a_microbatch_holds_no_whole_ones_are_absent():
    batch = make_batch(16)
    mesh = mesh_of(data=8)
    state = make_state(batch=shard(batch, mesh, "data"), shardings=replicated, microbatches=8)
    _, report = pj.monitored_train_step(state, shard(batch, mesh, "data"))
    found = report.scalars()
    assert np.isfinite(found["loss/mean"])
    assert not [name for name in found if name.startswith(("loss/shard", "loss/worst_shard"))]
    assert "do not divide" in dict(report.coverage.missing)["loss/shard"]
