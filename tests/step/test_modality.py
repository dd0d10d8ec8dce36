"""Modalities: share, scale beside the text, and the encoder's part of the gradient."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import probes_jax as pj
from tests.step.small import VOCAB, Block, make_sgd, make_state, norm64, only

pytestmark = pytest.mark.slow  # together; the second pair of Python and JAX goes without

WIDTH, PATCHES, LENGTH = 8, 4, 6
PLAN = only("act", groups=(), modalities=("text", "image"), encoder="^encoder/")


class Model(nn.Module):
    """Patches of an image, then a text."""

    scan: bool = False

    @nn.compact
    def __call__(self, image, tokens):
        media = nn.Dense(WIDTH, name="encoder")(image)
        x = jnp.concatenate([media, nn.Embed(VOCAB, WIDTH, name="embed")(tokens)], axis=1)
        if self.scan:
            body = nn.scan(
                lambda module, x, _: (module(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
            )
            x, _ = body(Block(name="block"), x, None)
        else:
            for index in range(2):
                x = Block(name=f"block_{index}")(x)
        return nn.Dense(VOCAB, name="head")(x[:, PATCHES:])


def make_batch(batch=8, images=True):
    rng = np.random.default_rng(0)
    mask = (rng.random((batch, LENGTH)) < 0.7).astype(np.float32)
    seen = np.repeat(rng.random((batch, 1)) < 0.6, PATCHES, axis=1) & images
    return {
        "image": rng.normal(size=(batch, PATCHES, 5)).astype(np.float32),
        "tokens": rng.integers(0, VOCAB, (batch, LENGTH)).astype(np.int32),
        "mask": mask,
        "valid": np.concatenate([seen, mask > 0], axis=1),
    }


def loss_fn(model, batch, rngs):
    nll = optax.softmax_cross_entropy_with_integer_labels(model(batch["image"], batch["tokens"]), batch["tokens"])
    modality = jnp.broadcast_to(jnp.arange(PATCHES + LENGTH) < PATCHES, batch["valid"].shape).astype(jnp.int32)
    return pj.Loss(nll=nll, mask=batch["mask"], valid=batch["valid"], modality=modality)


def step(batch, scan=False, **options):
    state = make_state(model=Model(scan), plan=PLAN, batch=batch, loss_fn=loss_fn, tx=make_sgd(), **options)
    params = jax.tree.map(jnp.copy, state.params)
    after, report = pj.monitored_train_step(state, batch)
    return params, after, report.scalars()


def expected(params, batch):
    media = np.asarray(batch["image"] @ params["encoder"]["kernel"] + params["encoder"]["bias"], np.float64)
    text = np.asarray(params["embed"]["embedding"], np.float64)[batch["tokens"]]
    image, words = batch["valid"][:, :PATCHES], batch["valid"][:, PATCHES:]
    rms = lambda x, ok: np.sqrt((x[ok] ** 2).mean())  # noqa: E731
    return {
        "media/image/token_share": image.sum() / batch["valid"].sum(),
        "media/text/token_share": words.sum() / batch["valid"].sum(),
        "media/image/scale_ratio": rms(media, image) / rms(text, words),
    }


@pytest.mark.parametrize("scan", [False, True])
def test_every_value_is_its_definition(scan):
    batch = make_batch()
    params, after, scalars = step(batch, scan)
    for name, value in expected(params, batch).items():
        assert scalars[name] == pytest.approx(value, rel=1e-5), name
    assert "media/text/scale_ratio" not in scalars

    def loss(params):
        logits = Model(scan).apply({"params": params}, batch["image"], batch["tokens"])
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"])
        return (nll * batch["mask"]).sum() / batch["mask"].sum()

    gradients = jax.grad(loss)(params)
    share = norm64(*jax.tree.leaves(gradients["encoder"])) ** 2 / norm64(*jax.tree.leaves(gradients)) ** 2
    assert scalars["media/encoder_gradient_share"] == pytest.approx(share, rel=1e-4)
    sizes = [sum(x.size for x in jax.tree.leaves(tree)) for tree in (params["encoder"], params)]
    assert scalars["media/encoder_parameter_share"] == pytest.approx(sizes[0] / sizes[1])
    _, report = pj.monitored_train_step(after, batch)
    assert {name for name in report.scalars() if name.startswith("media/")} == {
        "media/text/token_share", "media/image/token_share"
    }  # fmt: skip


def test_no_image_is_no_scale():
    _, _, scalars = step(make_batch(images=False))
    assert scalars["media/image/token_share"] == 0.0
    assert "media/image/scale_ratio" not in scalars


def test_shards_and_microbatches_are_the_whole():
    batch = make_batch(16)
    _, _, alone = step(batch)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    sharded = {key: jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))) for key, x in batch.items()}
    _, _, many = step(sharded, shardings=lambda path, shape: PartitionSpec(), microbatches=2)
    for name in (name for name in alone if name.startswith("media/")):
        assert many[name] == pytest.approx(alone[name], rel=1e-4), name


@pytest.mark.parametrize(
    ("plan", "modality", "words"),
    [
        (
            only(groups=()),
            np.zeros((8, LENGTH), np.int32),
            "Plan.modalities is empty",
        ),
        (PLAN, np.zeros((8, 3), np.int32), "Loss modality"),
        (PLAN, np.zeros((8, LENGTH), np.float32), "Loss modality"),
    ],
)
def test_a_modality_that_cannot_be_is_refused(plan, modality, words):
    def loss_fn(model, batch, rngs):
        return pj.Loss(nll=model(batch["image"], batch["tokens"]).mean(axis=-1), modality=modality)

    with pytest.raises(ValueError, match=words):
        make_state(model=Model(), plan=plan, batch=make_batch(), loss_fn=loss_fn)


def test_a_loss_that_does_not_tell_is_named():
    def loss_fn(model, batch, rngs):
        return pj.Loss(nll=model(batch["image"], batch["tokens"]).mean(axis=-1))

    batch = make_batch()
    _, report = pj.monitored_train_step(make_state(model=Model(), plan=PLAN, batch=batch, loss_fn=loss_fn), batch)
    assert "pj.Loss(modality=...)" in dict(report.coverage.missing)["media"]
