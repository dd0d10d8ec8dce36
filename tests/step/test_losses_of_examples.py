"""Losses that are not of tokens: images, batch normalization, regression, contrast, segmentation, one scalar."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import probes_jax as pj
from probes_jax.present.first_screen import first_screen
from tests.step.small import copy, norm64

pytestmark = pytest.mark.slow  # together; the second pair of Python and JAX goes without

PLAN = pj.Plan(unit="example", exclude=("norm", "conv", "output"), backward=False)
TX = optax.sgd(0.1)
EXAMPLES, CLASSES = 8, 5


def images(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(EXAMPLES, 6, 6, 2)).astype(np.float32),
        "y": rng.integers(0, CLASSES, EXAMPLES).astype(np.int32),
        "pixels": rng.integers(0, CLASSES, (EXAMPLES, 6, 6)).astype(np.int32),
        "target": rng.normal(size=(EXAMPLES,)).astype(np.float32),
    }


class Classifier(nn.Module):
    features: int = CLASSES

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (3, 3), name="conv")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, name="norm")(x))
        return nn.Dense(self.features, name="head")(x.mean((1, 2)))


class NNXClassifier(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(2, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.head = nnx.Linear(4, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.norm(self.conv(x))).mean((1, 2)))


class Segmenter(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Conv(CLASSES, (3, 3), name="head")(nn.relu(nn.Conv(4, (3, 3), name="conv")(x)))


class Pair(nn.Module):
    """Two views to one space, as for a contrastive loss."""

    @nn.compact
    def __call__(self, x):
        first, second = (nn.Dense(3, name=name)(x.reshape(len(x), -1)) for name in ("first", "second"))
        first, second = (v / jnp.linalg.norm(v, axis=-1, keepdims=True) for v in (first, second))
        return 10.0 * first @ second.T


integers = optax.softmax_cross_entropy_with_integer_labels


def contrast(logits):
    own = jnp.arange(len(logits))
    return (integers(logits, own) + integers(logits.T, own)) / 2


# Name -> (model, what the model's output costs, loss by example or None for a scalar).
CASES = {
    "integer labels": (Classifier(), lambda out, b: pj.Loss(nll=integers(out, b["y"]))),
    "one-hot labels": (
        Classifier(),
        lambda out, b: pj.Loss(nll=optax.softmax_cross_entropy(out, jax.nn.one_hot(b["y"], CLASSES))),
    ),
    "scalar": (Classifier(), lambda out, b: integers(out, b["y"]).mean()),
    "regression": (Classifier(1), lambda out, b: pj.Loss(nll=(out[:, 0] - b["target"]) ** 2)),
    "contrast": (Pair(), lambda out, b: pj.Loss(nll=contrast(out), logits=out)),
    "segmentation": (Segmenter(), lambda out, b: pj.Loss(nll=integers(out, b["pixels"]))),
}


def nll_of(loss):
    return loss.nll if isinstance(loss, pj.Loss) else loss


def plain(model, cost, variables, batch):
    """One step of optax and Flax alone: loss values, output, gradients, new variables."""
    params = variables["params"]
    state = {name: value for name, value in variables.items() if name != "params"}

    def objective(params):
        out, later = model.apply({"params": params, **state}, batch["x"], mutable=list(state))
        loss = nll_of(cost(out, batch))
        return loss.mean(), (loss, out, later)

    gradients, (loss, out, later) = jax.grad(objective, has_aux=True)(params)
    new = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    return loss, out, gradients, {"params": new, **later}


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_without_probes_and_reads_as_its_definition(name):
    model, cost = CASES[name]
    batch = images()
    variables = model.init(jax.random.key(0), batch["x"])
    state = pj.TrainState.create(
        model=model,
        tx=TX,
        loss_fn=lambda m, b, rngs: cost(m(b["x"]), b),
        plan=PLAN,
        batch=batch,
        variables=copy(variables),
    )
    step = jax.jit(plain, static_argnums=(0, 1))
    for seed in range(2 if name == "integer labels" else 1):
        batch = images(seed)
        loss, out, gradients, variables = step(model, cost, variables, batch)
        state, report = pj.monitored_train_step(state, batch)
        found = report.scalars()
        loss64 = np.asarray(loss, np.float64)
        assert found["loss/mean"] == pytest.approx(loss64.mean(), rel=1e-5)
        assert found["grad/norm"] == pytest.approx(norm64(*jax.tree.leaves(gradients)), rel=1e-4)
        assert found["logits/abs_max"] == pytest.approx(float(np.abs(out).max()), rel=1e-5)
        assert found.get("data/tokens") == (None if name == "scalar" else loss64.size)
        if name == "regression":
            assert "logits/logsumexp" not in found
            assert "no axis of classes" in dict(report.coverage.missing)["logits/logsumexp"]
        else:
            lse = np.log(np.exp(np.asarray(out, np.float64)).sum(-1))
            assert found["logits/logsumexp"] == pytest.approx(lse.mean(), rel=1e-4)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), state.params, variables["params"]
        )
        if "batch_stats" in variables:
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
                state.model_state["batch_stats"],
                variables["batch_stats"],
            )


def test_batch_normalization_of_nnx_moves_its_averages():
    model, batch = NNXClassifier(nnx.Rngs(0)), images()
    state = pj.TrainState.create(
        model=model,
        tx=TX,
        loss_fn=lambda m, b, rngs: pj.Loss(nll=integers(m(b["x"]), b["y"])),
        plan=PLAN,
        batch=batch,
    )

    @nnx.jit
    def step(model, batch):
        gradients = nnx.grad(lambda model: integers(model(batch["x"]), batch["y"]).mean())(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), gradients))

    for seed in range(2):
        step(model, images(seed))
        state, report = pj.monitored_train_step(state, images(seed))
        assert report.scalars()["data/tokens"] == EXAMPLES
    mine, theirs = (dict(nnx.to_flat_state(nnx.state(m))) for m in (state.module(), model))
    assert mine.keys() == theirs.keys()
    for path, value in theirs.items():
        np.testing.assert_allclose(mine[path][...], value[...], rtol=1e-4, atol=1e-6, err_msg=str(path))


def test_pixels_have_a_mask_of_their_own_or_of_their_image():
    model, batch = Segmenter(), images()
    mask = np.random.default_rng(3).random((EXAMPLES, 6, 6)) < 0.5
    keep = np.arange(EXAMPLES) % 2 == 0
    for given, whole in ((mask, mask), (keep, np.broadcast_to(keep[:, None, None], mask.shape))):
        state = pj.TrainState.create(
            model=model,
            tx=TX,
            loss_fn=lambda m, b, rngs: pj.Loss(nll=integers(m(b["x"]), b["pixels"]), mask=b["mask"]),
            plan=pj.Plan(unit="pixel"),
            batch={**batch, "mask": given},
        )
        nll = integers(model.apply({"params": state.params}, batch["x"]), batch["pixels"])
        wanted = np.asarray(nll, np.float64)[whole].mean()
        _, report = pj.monitored_train_step(state, {**batch, "mask": given})
        assert report.scalars()["loss/mean"] == pytest.approx(wanted, rel=1e-5)
        assert report.scalars()["data/tokens"] == whole.sum()


def test_images_cut_over_the_batch_and_their_rows():
    """Pixels of an image on two devices: the same values, and every shard's own loss."""
    model, batch = Segmenter(), images()

    def loss_fn(model, batch, rngs):
        return pj.Loss(nll=integers(model(batch["x"]), batch["pixels"]))

    def run(batch):
        state = pj.TrainState.create(model=model, tx=TX, loss_fn=loss_fn, plan=PLAN, batch=batch)
        return pj.monitored_train_step(state, batch)[1].scalars()

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "rows"))
    cut = {
        name: jax.device_put(x, NamedSharding(mesh, P("data", "rows") if x.ndim > 2 else P("data")))
        for name, x in batch.items()
    }
    alone, found = run(batch), run(cut)
    assert len([name for name in found if name.startswith("loss/shard")]) == 8
    for name, value in alone.items():
        if not name.startswith(("loss/shard", "loss/worst")):
            assert found[name] == pytest.approx(value, rel=3e-4, abs=1e-5), name


def test_the_unit_is_said_where_units_are(tmp_path):
    """`Plan(unit=)` reaches the first screen of a recorded run."""
    batch = images()
    state = pj.TrainState.create(
        model=Classifier(),
        tx=TX,
        loss_fn=lambda m, b, rngs: pj.Loss(nll=integers(m(b["x"]), b["y"])),
        plan=PLAN,
        batch=batch,
    )
    with pj.Recorder(tmp_path, PLAN) as recorder:
        _, report = pj.monitored_train_step(state, batch)
        recorder.record(report)
    rows = {row.name: row for row in first_screen(pj.open_run(tmp_path))}
    assert rows["loss/mean"].unit == "nat/example"
    for wrong in ("", "data point", 3):
        with pytest.raises(ValueError, match="Plan unit must be one word"):
            pj.Plan(unit=wrong)
