"""A small vision-language model: handwritten digits (scikit-learn's, 8 x 8 pixels) and captions such as "a seven".

    pip install "probes_jax[examples]"              # scikit-learn; from a checkout: pip install -e ".[examples]"
    python examples/captions.py [steps]

Every fourth row has no image. Their captions are a group of the loss: what an image is worth shows beside them.
"""

import sys

import decoder_linen
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import probes_jax as pj

try:
    from sklearn.datasets import load_digits
except ImportError:
    raise SystemExit("examples/captions.py needs scikit-learn for its digits: pip install scikit-learn") from None

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CAPTIONS = [f"{'an' if word[0] == 'e' else 'a'} {word}." for word in WORDS]
LENGTH = max(map(len, CAPTIONS))
TEXT = np.array([list(caption.ljust(LENGTH, "\0").encode()) for caption in CAPTIONS], np.int32)  # [10, LENGTH]
PATCHES = 16  # of 2 x 2 pixels
MODALITIES = np.array([1] * PATCHES + [0] * LENGTH, np.int32)  # as the model has them: an image, then its caption
CONFIG = decoder_linen.Config(vocabulary=128, width=64, layers=2, heads=4, hidden=128)


def load_images():  # [1797, PATCHES, 4], pixels in [0, 1], and the digits that they show
    digits = load_digits()
    patches = digits.images.reshape(-1, 4, 2, 4, 2).transpose(0, 1, 3, 2, 4) / 16.0
    return patches.reshape(-1, PATCHES, 4).astype(np.float32), digits.target


def batches(images, digits, rows=64, seed=0):
    random = np.random.default_rng(seed)
    while True:
        chosen = random.integers(0, len(images), rows)
        yield {"images": images[chosen], "text": TEXT[digits[chosen]], "blind": (np.arange(rows) % 4 == 3).astype(int)}


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x_BxPx4):
        place_PxD = self.param("place", nn.initializers.normal(0.02), (PATCHES, CONFIG.width))
        h_BxPxD = nn.gelu(nn.Dense(CONFIG.width, name="patch")(x_BxPx4) + place_PxD)
        return nn.Dense(CONFIG.width, name="adapter")(h_BxPxD)


class Captioner(nn.Module):
    @nn.compact
    def __call__(self, images_BxPx4, text_BxT, valid_BxS):  # S = P + T; to logits of the T characters
        small, before_BxT = nn.initializers.normal(0.02), jnp.pad(text_BxT, ((0, 0), (1, 0)))[:, :-1]
        text_BxTxD = nn.Embed(CONFIG.vocabulary, CONFIG.width, embedding_init=small, name="embed")(before_BxT)
        text_BxTxD += self.param("position_embed", small, (LENGTH, CONFIG.width))
        x_BxSxD = jnp.concatenate([Encoder(name="vision")(images_BxPx4), text_BxTxD], axis=1)
        mask = nn.make_causal_mask(valid_BxS, dtype=bool) & valid_BxS[:, None, None, :]
        for layer in range(CONFIG.layers):
            x_BxSxD = decoder_linen.Block(CONFIG, name=f"block_{layer}")(x_BxSxD, mask)
        return nn.Dense(CONFIG.vocabulary, name="head")(nn.LayerNorm(name="norm")(x_BxSxD[:, PATCHES:]))


def valid_of(text, blind):  # which of the S positions hold something: [B, S]
    seen = jnp.broadcast_to(blind[:, None] == 0, (len(blind), PATCHES))
    return jnp.concatenate([seen, text > 0], axis=1)


def loss_fn(model, batch, rngs):
    text, valid = batch["text"], valid_of(batch["text"], batch["blind"])
    logits = model(batch["images"], text, valid)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, text)
    modality = jnp.broadcast_to(MODALITIES, valid.shape)
    return pj.Loss(nll=nll, mask=text > 0, group=batch["blind"], valid=valid, modality=modality)


@jax.jit
def read(variables, images):
    """The digit whose caption is the likeliest for each image."""

    def likelihood(caption):
        text = jnp.broadcast_to(caption, (len(images), LENGTH))
        logits = Captioner().apply(variables, images, text, valid_of(text, jnp.zeros(len(images))))
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, text)
        return -jnp.sum(nll * (text > 0), axis=-1)

    return jnp.argmax(jax.lax.map(likelihood, jnp.asarray(TEXT)), axis=0)


def main(steps=250):
    images, digits = load_images()
    train, held_out = np.s_[:-297], np.s_[-297:]
    stream = batches(images[train], digits[train])
    plan = pj.Plan(groups=("seen", "blind"), modalities=("text", "image"), encoder="^vision/")
    tx = pj.chain(("clip", optax.clip_by_global_norm(1.0)), ("adam", optax.scale_by_adam(b2=0.95)),
                  ("lr", optax.scale_by_learning_rate(2e-3)))  # fmt: skip
    state = pj.TrainState.create(
        model=Captioner(), tx=tx, loss_fn=loss_fn, plan=plan, rngs=jax.random.key(0), batch=next(stream)
    )
    with pj.Recorder("runs/captions", plan) as recorder, pj.LiveSignals(recorder, plan, total=steps) as live:
        for _, batch in zip(range(steps), pj.timed(stream)):
            state, report = pj.monitored_train_step(state, batch)
            recorder.record(report)
            live.update()
    run = pj.open_run("runs/captions")
    pj.print_screen(run)
    right = float(np.mean(read(state.module(), images[held_out]) == digits[held_out]))
    print(f"{right:.0%} of {len(digits[held_out])} new digits get the right caption")
    return run, right


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
