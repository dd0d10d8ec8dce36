"""A small image classifier: one loss per example, batch normalization, digits drawn here. It takes seconds."""

import sys

import flax.linen as nn
import numpy as np
import optax

import probes_jax as pj

SEGMENTS = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg")
PLACES = {"a": np.s_[1, 2:6], "b": np.s_[1:6, 5], "c": np.s_[5:10, 5], "d": np.s_[9, 2:6],
          "e": np.s_[5:10, 2], "f": np.s_[1:6, 2], "g": np.s_[5, 2:6]}  # fmt: skip


def draw(digit):  # as on a seven-segment display, [12, 8]
    image = np.zeros((12, 8), np.float32)
    for segment in SEGMENTS[digit]:
        image[PLACES[segment]] = 1.0
    return image


DIGITS = np.stack([draw(digit) for digit in range(10)])


def batches(steps, size=64, seed=0):  # images [batch, 12, 8, 1], shifted a little; every other one under heavy noise
    random = np.random.default_rng(seed)
    for _ in range(steps):
        labels, noisy = random.integers(0, 10, size), np.arange(size) % 2
        shifts = random.integers(-1, 2, (size, 2))
        images = np.stack([np.roll(DIGITS[label], shift, (0, 1)) for label, shift in zip(labels, shifts)])
        images += random.normal(size=images.shape) * np.where(noisy, 0.6, 0.2)[:, None, None]
        yield {"images": images[..., None].astype(np.float32), "labels": labels, "noisy": noisy}


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        for features in (16, 32):
            x = nn.Conv(features, (3, 3), strides=2)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(10, name="head")(x.reshape(len(x), -1))


def loss_fn(model, batch, rngs):
    logits = model(batch["images"])
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return pj.Loss(nll=nll, group=batch["noisy"])  # nll [batch]: what is counted and averaged is examples


def main(steps):
    model, plan = Classifier(), pj.Plan(groups=("clean", "noisy"), unit="example")
    tx = pj.chain(("clip", optax.clip_by_global_norm(1.0)), ("adam", optax.scale_by_adam()),
                  ("lr", optax.scale_by_learning_rate(1e-2)))  # fmt: skip
    state = pj.TrainState.create(model=model, tx=tx, loss_fn=loss_fn, plan=plan, batch=next(batches(1)))
    with pj.Recorder("runs/vision", plan) as recorder, pj.LiveSignals(recorder, plan, total=steps) as live:
        for batch in pj.timed(batches(steps)):
            state, report = pj.monitored_train_step(state, batch)
            recorder.record(report)
            live.update()
    pj.print_screen(pj.open_run("runs/vision"))
    test = next(batches(1, size=1000, seed=1))
    logits = model.apply(state.module(), test["images"], train=False)  # with the running averages of the batches
    print(f"{np.mean(np.argmax(logits, -1) == test['labels']):.0%} of 1,000 new digits are read right")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
