"""Residual paths of models that nobody edited: every sum is found, named, and measured over the valid tokens."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import probes_jax as pj
from probes_jax.spec.sketch import ERROR, QUANTILES
from tests.stats.test_branch import reference
from tests.step.small import VOCAB, loss_fn, make_batch, make_sgd, make_state, only
from tests.step.test_mesh import count_collectives

WIDTH = 8
PLAN = only("residual")


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH, name="down")(nn.gelu(nn.Dense(2 * WIDTH, name="up")(x)))


class OwnGelu(nn.Module):
    """Adds to what it is given, and is no residual path."""

    @nn.compact
    def __call__(self, x):
        return 0.5 * x * (1.0 + jnp.tanh(0.8 * (x + 0.044715 * x**3)))


class PreNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.SelfAttention(2, name="attn")(nn.LayerNorm(name="ln_1")(x))
        h = OwnGelu(name="act")(Mlp(name="mlp")(nn.LayerNorm(name="ln_2")(x)))
        return x + nn.Dropout(0.1, deterministic=True)(h)


class PostNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm(name="ln_1")(x + nn.SelfAttention(2, name="attn")(x))
        return nn.LayerNorm(name="ln_2")(x + Mlp(name="mlp")(x))


class Parallel(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm(name="ln")(x)
        attended, mixed = nn.SelfAttention(2, name="attn")(h), Mlp(name="mlp")(h)
        return x + attended + mixed


class Gated(nn.Module):
    @nn.compact
    def __call__(self, x):
        gate = self.param("gate", nn.initializers.constant(0.1), (WIDTH,))
        return x + gate * Mlp(name="mlp")(nn.LayerNorm(name="ln")(x))


class SelfOutput(nn.Module):
    @nn.compact
    def __call__(self, hidden, given):
        return nn.LayerNorm(name="ln")(nn.Dense(WIDTH, name="dense")(hidden) + given)


class InChild(nn.Module):
    """The sum is in a module of its own, as in BERT."""

    @nn.compact
    def __call__(self, x):
        return SelfOutput(name="output")(Mlp(name="mlp")(x), x)


class Model(nn.Module):
    block: type[nn.Module]
    scan: bool = False
    remat: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, name="embed")(tokens)
        block = nn.remat(self.block, prevent_cse=False) if self.remat else self.block
        if self.scan:
            body = nn.scan(
                lambda module, x, _: (module(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
            )
            x, _ = body(block(name="block"), x, None)
        else:
            for index in range(2):
                x = block(name=f"block_{index}")(x)
        return nn.Dense(VOCAB, name="head")(x)


def by_hand(block, params, x):
    """(branch name, stream, branch) of every sum of one block, written out."""

    def call(module, name, x):
        return module.apply({"params": params[name]}, x)

    norm = lambda name, x: call(nn.LayerNorm(), name, x)  # noqa: E731
    attend = lambda x: call(nn.SelfAttention(2), "attn", x)  # noqa: E731
    if block is PreNorm:
        b = attend(norm("ln_1", x))
        c = OwnGelu().apply({}, call(Mlp(), "mlp", norm("ln_2", x + b)))
        return x + b + c, [("attn", x, b), ("mlp", x + b, c)]
    if block is PostNorm:
        b = attend(x)
        y = norm("ln_1", x + b)
        c = call(Mlp(), "mlp", y)
        return norm("ln_2", y + c), [("attn", x, b), ("mlp", y, c)]
    if block is Parallel:
        h = norm("ln", x)
        b, c = attend(h), call(Mlp(), "mlp", h)
        return x + b + c, [("attn", x, b), ("mlp", x + b, c)]
    if block is Gated:
        b = params["gate"] * call(Mlp(), "mlp", norm("ln", x))
        return x + b, [("mlp", x, b)]
    b = nn.Dense(WIDTH).apply({"params": params["output"]["dense"]}, call(Mlp(), "mlp", x))
    return nn.LayerNorm().apply({"params": params["output"]["ln"]}, b + x), [("output/dense", x, b)]


def expected(block, params, tokens):
    x = nn.Embed(VOCAB, WIDTH).apply({"params": params["embed"]}, tokens)
    found = {}
    for index in range(2):
        own = (
            params[f"block_{index}"] if "block_0" in params else jax.tree.map(lambda p, i=index: p[i], params["block"])
        )
        x, sums = by_hand(block, own, x)
        for name, stream, branch in sums:
            found[f"block[{index}]/{name}"] = reference(stream, branch)
    return found


def check(scalars, want, mask, rel=1e-3):
    """Mean, maximum and quantiles of every column over the valid tokens, and no other branch."""
    named = {
        name.removeprefix("residual/").rsplit("/", 2)[0]
        for name in scalars
        if name.count("/") > 2 and name.startswith("residual/")
    }
    assert named == set(want)
    for path, columns in want.items():
        for column, values in columns.items():
            values = values[mask > 0]
            get = lambda stat, p=path, c=column: scalars[f"residual/{p}/{c}/{stat}"]  # noqa: E731
            assert get("mean") == pytest.approx(values.mean(), rel=rel, abs=1e-6), (path, column)
            assert get("max") == pytest.approx(values.max(), rel=rel, abs=1e-6), (path, column)
            for stat, share in QUANTILES.items():
                rank = np.sort(values)[max(int(np.ceil(share * values.size)) - 1, 0)]
                assert get(stat) == pytest.approx(rank, rel=ERROR + rel, abs=2e-6), (path, column, stat)


@functools.cache
def reported(block, how="plain"):
    """The parameters of a model, and what a step reports with them."""
    state = make_state(model=Model(block, "scan" in how, "remat" in how), plan=PLAN, donate=False)
    return state.params, pj.monitored_train_step(state, make_batch())[1]


@pytest.mark.parametrize(
    ("block", "how"),
    [(block, "plain") for block in (PreNorm, PostNorm, Parallel, Gated, InChild)]
    + [(Gated, "remat"), (PreNorm, "scan and remat"), (Gated, "scan")],
)
def test_every_sum_of_a_linen_model(block, how):
    batch, (params, report) = make_batch(), reported(block, how)
    check(report.scalars(), expected(block, params, batch["tokens"]), batch["mask"])


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        self.ln_1, self.ln_2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.mlp = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x += self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NNXModel(nnx.Module):
    def __init__(self, rngs, how="plain"):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.how = how
        if how == "scan":
            self.block = nnx.vmap(NNXBlock, in_axes=0)(rngs.fork(split=2))
        else:
            self.block = nnx.List([NNXBlock(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        if self.how == "scan":
            x = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.block)
        else:
            call = nnx.remat(lambda block, x: block(x)) if self.how == "remat" else lambda block, x: block(x)
            for block in self.block:
                x = call(block, x)
        return self.head(x)


@pytest.mark.parametrize("how", ["plain", "remat", "scan"])
def test_every_sum_of_an_nnx_model(how):
    batch, model = make_batch(), NNXModel(nnx.Rngs(0), how)
    _, report = pj.monitored_train_step(make_state(model=model, plan=PLAN), batch)
    x, want = model.embed(batch["tokens"]), {}
    for index in range(2):
        block = model.block[index] if how != "scan" else _layer(model.block, index)
        b = block.attn(block.ln_1(x))
        c = block.mlp(block.ln_2(x + b))
        want[f"block[{index}]/attn"], want[f"block[{index}]/mlp"] = reference(x, b), reference(x + b, c)
        x = x + b + c
    check(report.scalars(), want, batch["mask"])


def _layer(stacked, index):
    graph, state = nnx.split(stacked)
    return nnx.merge(graph, jax.tree.map(lambda x: x[index], state))


def test_a_sum_is_the_worst_of_its_kind_and_says_which():
    _, report = reported(PreNorm)
    (readings,) = report.readings()
    scalars = report.scalars()
    for column in ("stream_norm", "branch_norm", "ratio"):
        means = {n: v for n, v in scalars.items() if n.endswith(f"/{column}/mean")}
        assert scalars[f"residual/{column}"] == max(means.values())
        assert means[f"{readings.which[f'residual/{column}']}/mean"] == max(means.values())


def test_microbatches_are_the_whole():
    _, parts = pj.monitored_train_step(make_state(model=Model(Gated), plan=PLAN, microbatches=4), make_batch())
    _same(reported(Gated)[1].scalars(), parts.scalars())


@pytest.mark.parametrize(("axes", "scan"), [(dict(data=2, seq=2, model=2), True)])
def test_shards_are_the_whole_for_two_collectives(axes, scan):
    batch = make_batch(batch=16)
    model = Model(PreNorm, scan=scan)
    _, alone = pj.monitored_train_step(make_state(model=model, plan=PLAN, batch=batch, tx=make_sgd()), batch)
    mesh = Mesh(np.array(jax.devices()).reshape(*axes.values()), tuple(axes))
    tokens = ("data", "seq") if "seq" in axes else ("data",)
    lies = {k: NamedSharding(mesh, PartitionSpec(*tokens[: x.ndim])) for k, x in batch.items()}
    sharded = {key: jax.device_put(x, lies[key]) for key, x in batch.items()}
    state = make_state(
        model=model,
        plan=PLAN,
        batch=sharded,
        tx=make_sgd(),
        shardings=lambda path, shape: PartitionSpec(),
        donate=False,
    )
    plain, *others = (count_collectives(state, program, sharded) for program in ("off", "light", "full"))
    assert [count - plain for count in others] == [2, 2]
    _, many = pj.monitored_train_step(state, sharded)
    _same(alone.scalars(), many.scalars())


def _same(one, many):
    names = [name for name in one if name.startswith("residual/")]
    assert names == [name for name in many if name.startswith("residual/")]
    for name in names:
        rel = 0.021 if name.rsplit("/")[-1] in QUANTILES else 1e-4  # a last bit may be another bucket
        assert many[name] == pytest.approx(one[name], rel=rel, abs=2e-6), name


def test_a_prompt_is_valid_though_the_loss_does_not_count_it():
    def loss_fn(model, batch, rngs):
        nll = optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["targets"])
        return pj.Loss(nll=nll, mask=batch["mask"], valid=np.ones(batch["mask"].shape, bool))

    batch = make_batch()
    state = make_state(
        model=Model(Gated),
        plan=PLAN,
        loss_fn=loss_fn,
    )
    params = jax.tree.map(jnp.copy, state.params)
    _, report = pj.monitored_train_step(state, batch)
    check(report.scalars(), expected(Gated, params, batch["tokens"]), np.ones(batch["mask"].shape))


def test_positions_that_are_not_those_of_the_loss_are_missing_by_name():
    def loss_fn(model, batch, rngs):
        logits = model(batch["tokens"])[:, 1:]
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"][:, 1:])
        return pj.Loss(nll=nll, mask=batch["mask"][:, 1:])

    _, report = pj.monitored_train_step(
        make_state(
            model=Model(Gated),
            plan=PLAN,
            loss_fn=loss_fn,
        ),
        make_batch(),
    )
    assert not [name for name in report.scalars() if name.startswith("residual/")]
    missing = dict(report.coverage.missing)
    assert "pj.Loss(valid=...)" in missing["residual/block[0]/mlp"]


@pytest.mark.optimized
def test_a_plan_can_do_without_and_training_is_the_same():
    batch, found = make_batch(), {}
    for without in ((), ("residual",)):
        state = make_state(model=Model(PreNorm), plan=only("residual", without=without, scan_every=1))
        for _ in range(2):
            state, report = pj.monitored_train_step(state, batch)
        found[without] = state.params, report.layout
    jax.tree.map(np.testing.assert_array_equal, found[()][0], found["residual",][0])


@pytest.mark.optimized
def test_an_identity_block_does_nothing():
    class Nothing(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.Dense(WIDTH, kernel_init=nn.initializers.zeros, name="mlp")(nn.LayerNorm(name="ln")(x))

    _, report = pj.monitored_train_step(make_state(model=Model(Nothing), plan=PLAN), make_batch())
    scalars = report.scalars()
    for column in ("branch_norm", "ratio", "importance", "angle", "noop", "nonzero"):
        assert scalars[f"residual/block[1]/mlp/{column}/max"] == 0.0, column
    assert scalars["residual/block[1]/mlp/stream_norm/mean"] > 0


def test_a_family_that_the_plan_asks_for_and_the_model_hides_is_missing_by_name():
    class Added(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.add(x, nn.Dense(WIDTH, name="mlp")(nn.LayerNorm(name="ln")(x)))

    state = make_state(model=Model(Added), plan=only("residual", "attention", backward=False))
    _, report = pj.monitored_train_step(state, make_batch())
    missing = dict(report.coverage.missing)
    assert "with +" in missing["residual"] and "jax.nn.dot_product_attention" in missing["attention"]


def test_under_the_users_shard_map():
    batch, model, tx = make_batch(), Model(PreNorm), make_sgd()
    params, alone = jax.tree.map(np.array, reported(PreNorm)[0]), reported(PreNorm)[1].scalars()
    mesh, whole, data = Mesh(np.array(jax.devices()[:4]), ("data",)), PartitionSpec(), PartitionSpec("data")
    monitor = pj.Monitor.create(
        tx=tx, params=params, plan=PLAN, model=model, loss_fn=loss_fn, batch=batch, axis_names=("data",)
    )

    def step(params, monitor, batch):
        (_, seen), gradients = monitor.value_and_grad(params, batch, jax.random.key(0), scan=True)
        return monitor.measure(seen, gradients, params, params, tx.init(params), tx.init(params))[1]

    run = jax.shard_map(step, mesh=mesh, in_specs=(whole, whole, data), out_specs=whole)
    _same(alone, jax.jit(run)(params, monitor, batch).scalars())
