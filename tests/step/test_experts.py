"""Balance of experts: padding out, summed before any ratio, whatever the shards and microbatches."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import probes_jax as pj
from probes_jax.signals.experts import balance, find_expert_shards, spread
from probes_jax.signals.parameters import ParameterInfo
from probes_jax.stats.partial import Split
from probes_jax.stats.per_token import NOTHING
from probes_jax.stats.routing import of_tokens
from tests.step.small import VOCAB, make_batch, make_sgd, make_state, only

pytestmark = pytest.mark.slow  # together; the second pair of Python and JAX goes without

WIDTH, EXPERTS, TOP_K = 8, 4, 2
PLAN = only("router", top_k=TOP_K)
EVERY = ("imbalance", "max_violation", "shard_imbalance")


class Moe(nn.Module):
    """Every token through every expert, weighted: the simplest form that routes."""

    named: bool = False

    @nn.compact
    def __call__(self, x):
        scores = nn.Dense(EXPERTS, use_bias=False, name="scores" if self.named else "router")(x)
        best, indices = jax.lax.top_k(scores, TOP_K)
        if self.named:
            pj.observe_routing("choice", indices, experts=EXPERTS, scores=scores)
        weight = (jax.nn.one_hot(indices, EXPERTS) * jax.nn.softmax(best)[..., None]).sum(-2)
        up = self.param("up", nn.initializers.lecun_normal(), (EXPERTS, WIDTH, WIDTH))
        return jnp.einsum("...d,edf,...e->...f", x, up, weight)


class Block(nn.Module):
    named: bool = False

    @nn.compact
    def __call__(self, x):
        return x + Moe(self.named, name="moe")(nn.LayerNorm(name="ln")(x))


class Model(nn.Module):
    named: bool = False
    scan: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, name="embed")(tokens)
        if self.scan:
            body = nn.scan(
                nn.remat(lambda module, x, _: (module(x), None), prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
            )
            x, _ = body(Block(self.named, name="block"), x, None)
        else:
            for index in range(2):
                x = Block(self.named, name=f"block_{index}")(x)
        return nn.Dense(VOCAB, name="head")(x)


def loads_by_hand(params, batch):
    """Valid tokens of each expert of each layer, counted one by one."""
    x, found = np.asarray(params["embed"]["embedding"])[batch["tokens"]], []
    for index in range(2):
        own = (
            params[f"block_{index}"] if "block_0" in params else jax.tree.map(lambda p, i=index: p[i], params["block"])
        )
        h = nn.LayerNorm().apply({"params": own["ln"]}, x)
        router = own["moe"].get("router", own["moe"].get("scores"))
        order = np.argsort(-np.asarray(h @ router["kernel"]), axis=-1)[..., :TOP_K]
        found.append([((order == e).any(-1) & (batch["mask"] > 0)).sum() for e in range(EXPERTS)])
        x = x + Moe().apply({"params": {"router": router, "up": own["moe"]["up"]}}, h)
    return np.asarray(found, np.float64)


def expected(loads):
    total = loads.sum()
    p = loads / total
    entropy = -sum(q * np.log(q) for q in p if q > 0)
    return {
        "imbalance": loads.max() / loads.mean(),
        "max_violation": loads.max() / loads.mean() - 1,
        "entropy": entropy,
        "entropy_norm": entropy / np.log(EXPERTS),
        "dead_experts": (loads == 0).sum(),
        "effective_experts": np.exp(entropy),
        **{f"load/expert[{index}]": q for index, q in enumerate(p)},
    }


def step_twice(state, batch):
    """Scalars of a full and of a light step, each at the parameters that are returned with it."""
    out = []
    for _ in range(2):
        params = jax.tree.map(jnp.copy, state.params)
        state, report = pj.monitored_train_step(state, batch)
        out.append((params, report))
    return out


@pytest.mark.parametrize(("named", "scan"), [(False, False), (False, True), (True, True)])
def test_every_value_is_its_definition_in_every_step(named, scan):
    batch = make_batch()
    model, suffix = Model(named, scan), "moe/choice" if named else "moe/router"
    (params, full), (later, light) = step_twice(make_state(model=model, plan=PLAN), batch)
    for report, loads in ((full, loads_by_hand(params, batch)), (light, loads_by_hand(later, batch))):
        scalars = report.scalars()
        for index in range(2):
            for name, value in expected(loads[index]).items():
                if report is full or name in EVERY:
                    found = scalars[f"router/block[{index}]/{suffix}/{name}"]
                    assert found == pytest.approx(value, rel=1e-5, abs=1e-6), name
        worst = max(expected(layer)["imbalance"] for layer in loads)
        assert scalars["router/imbalance"] == pytest.approx(worst, rel=1e-5)
    assert f"router/block[0]/{suffix}/entropy_norm" in full.scalars()
    assert f"router/block[0]/{suffix}/margin/mean" in full.scalars()
    assert {n.rsplit("/", 1)[-1] for n in light.scalars() if n.startswith("router/")} == {"imbalance", "max_violation"}


def test_padding_does_not_count():
    """L056: 4 real tokens split 2/2 over two experts, 12 padded tokens all sent to expert 1."""

    class Fixed(nn.Module):
        @nn.compact
        def __call__(self, tokens, chosen):
            pj.observe_routing("router", chosen[..., None], experts=2)
            return nn.Dense(VOCAB)(jax.nn.one_hot(tokens, 4))

    def loss_fn(model, batch, rngs):
        logits = model(batch["tokens"], batch["chosen"])
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"])
        return pj.Loss(nll=nll, mask=batch["mask"])

    chosen, mask = np.ones((2, 8), np.int32), np.zeros((2, 8), np.float32)
    mask[0, :2], mask[1, :2], chosen[0, :2] = 1, 1, 0
    batch = {"tokens": np.zeros((2, 8), np.int32), "chosen": chosen, "mask": mask}
    plan = only("router", groups=())
    for microbatches in (1, 2):
        state = make_state(Fixed(), batch=batch, loss_fn=loss_fn, plan=plan, microbatches=microbatches, donate=False)
        _, report = pj.monitored_train_step(state, batch)
        scalars = report.scalars()
        assert [scalars[f"router/router/load/expert[{e}]"] for e in (0, 1)] == [0.5, 0.5]
        assert scalars["router/imbalance"] == 1.0
    empty = dict(batch, mask=np.zeros((2, 8), np.float32))
    _, report = pj.monitored_train_step(state, empty)
    assert not [name for name in report.scalars() if name.startswith("router/")]


def test_known_answers():
    uniform, one = jnp.full((1, 4), 5.0), jnp.asarray([[20.0, 0.0, 0.0, 0.0]])
    assert {name: float(value[0]) for name, (value, _) in (balance(uniform, 2) | spread(uniform)).items()} == {
        "imbalance": 1.0, "max_violation": 0.0, "shard_imbalance": 1.0, "entropy": pytest.approx(np.log(4)),
        "entropy_norm": pytest.approx(1.0), "dead_experts": 0.0, "effective_experts": pytest.approx(4.0),
    }  # fmt: skip
    assert {name: float(value[0]) for name, (value, _) in (balance(one, 2) | spread(one)).items()} == {
        "imbalance": 4.0, "max_violation": 3.0, "shard_imbalance": 2.0, "entropy": 0.0, "entropy_norm": 0.0,
        "dead_experts": 3.0, "effective_experts": 1.0,
    }  # fmt: skip
    assert not any(bool(seen[0]) for _, seen in (balance(jnp.zeros((1, 4)), 2) | spread(jnp.zeros((1, 4)))).values())


def test_experts_over_the_mesh():
    """Expert-parallel shards are found from the parameters; values are those of one device, for two collectives."""
    batch = make_batch(batch=16)
    model = Model(scan=True)
    (_, alone), (_, light) = step_twice(make_state(model=model, plan=PLAN, batch=batch, tx=make_sgd()), batch)
    assert "pj.Plan(expert_shards=...)" in dict(alone.coverage.missing)["router/shard_imbalance"]
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "expert"))
    sharded = {key: jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))) for key, x in batch.items()}

    def rule(path, shape):
        return PartitionSpec(None, "expert") if path[-1] == "up" else PartitionSpec()

    state = make_state(model=model, plan=PLAN, batch=sharded, tx=make_sgd(), shardings=rule, microbatches=2)
    loads = loads_by_hand(jax.device_get(state.params), batch)
    (_, many), (_, later) = step_twice(state, sharded)
    for one, other in ((alone, many), (light, later)):
        one, other = one.scalars(), other.scalars()
        for name in (name for name in one if name.startswith("router/")):
            assert other[name] == pytest.approx(one[name], rel=0.021 if "margin/p" in name else 1e-4), name
    for index in range(2):
        pairs = loads[index].reshape(2, 2).sum(axis=1)
        found = many.scalars()[f"router/block[{index}]/moe/router/shard_imbalance"]
        assert found == pytest.approx(pairs.max() / pairs.mean(), rel=1e-5)


def test_scores_alone_do_not_say_how_many():
    _, report = pj.monitored_train_step(make_state(model=Model(), plan=only("router")), make_batch())
    assert "pj.Plan(top_k=...)" in dict(report.coverage.missing)["router/block[0]/moe/router"]


@pytest.mark.optimized
def test_routers_change_nothing_and_a_plan_can_do_without():
    batch, found = make_batch(), []
    for without in ((), ("router",)):
        plan = only("router", top_k=TOP_K, without=without, scan_every=1)
        state = make_state(model=Model(scan=True), plan=plan)
        for _ in range(2):
            state, report = pj.monitored_train_step(state, batch)
        found.append(state.params)
        assert bool([n for n in report.scalars() if n.startswith("router/")]) == (without == ())
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(name="", indices=jnp.zeros((2, 1), jnp.int32), experts=2), "name"),
        (dict(name="a", indices=jnp.zeros((2, 1)), experts=2), "int"),
        (dict(name="a", indices=jnp.zeros((2, 3), jnp.int32), experts=2), "experts=2"),
        (dict(name="a", indices=jnp.zeros((2, 1), jnp.int32), experts=2, scores=jnp.zeros((2, 3))), "scores"),
    ],
)
def test_routing_that_cannot_be_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        pj.observe_routing(**arguments)


def test_a_closed_expert_has_no_margin():
    closed = jnp.asarray(
        [[1.0, -jnp.inf, -jnp.inf, -jnp.inf], [3.0, 2.0, -jnp.inf, -jnp.inf], [3.0, 2.0, 1.5, -jnp.inf]]
    )
    found = of_tokens(jax.lax.top_k(closed, 2)[1], 4, closed).values[:, -1]
    np.testing.assert_array_equal(found, [NOTHING, NOTHING, 0.5])


def test_only_the_experts_own_first_axis_says_how_they_are_cut():
    def info(*dims, stack=None):
        return ParameterInfo(("x",), stack, Split(dims, (("model", 2),)))

    infos = {
        ("moe", "router", "kernel"): info((), ("model",)),
        ("moe", "up"): info((), (), ("model",), stack=0),
        ("moe", "norm"): info((), ()),
    }
    tensors = {
        ("moe", "router", "kernel"): np.zeros((8, 4)),
        ("moe", "up"): np.zeros((3, 4, 4)),
        ("moe", "norm"): np.zeros((4, 4)),
    }
    assert find_expert_shards(("moe", "router"), 4, tensors, infos) is None
    infos["moe", "up"] = info((), ("model",), (), stack=0)
    assert find_expert_shards(("moe", "router"), 4, tensors, infos) == 2
