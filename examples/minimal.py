"""The smallest whole script: a model, an optimizer, a loss, a loop. It takes seconds and needs no data."""

import flax.linen as nn
import jax
import numpy as np
import optax

import probes_jax as pj


class TinyLM(nn.Module):
    @nn.compact
    def __call__(self, tokens):  # int32 [batch, length] to logits [batch, length, 256]
        x = nn.Embed(256, 32, name="embed")(tokens)
        x = nn.gelu(nn.Dense(64, name="hidden")(x))
        return nn.Dense(256, name="head")(x)


def loss_fn(model, batch, rngs):  # model is callable, bound to its parameters
    logits = model(batch["tokens"])
    return pj.Loss(nll=optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]))


def batches(steps):  # the bytes of this file; a token's target is the next byte
    text, random = np.fromfile(__file__, np.uint8).astype(np.int32), np.random.default_rng(0)
    for _ in range(steps):
        rows = np.stack([text[at : at + 65] for at in random.integers(0, text.size - 65, 16)])
        yield {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


steps, plan = 300, pj.Plan()
tx = pj.chain(("clip", optax.clip_by_global_norm(1.0)), ("adam", optax.scale_by_adam()),
              ("lr", optax.scale_by_learning_rate(1e-2)))  # fmt: skip
state = pj.TrainState.create(
    model=pj.wrap(TinyLM()), tx=tx, loss_fn=loss_fn, plan=plan, rngs=jax.random.key(0), batch=next(batches(1))
)
with pj.Recorder("runs/minimal", plan) as recorder, pj.LiveSignals(recorder, plan, total=steps) as live:
    for batch in pj.timed(batches(steps)):
        state, report = pj.monitored_train_step(state, batch)
        recorder.record(report)
        live.update()
pj.print_screen(pj.open_run("runs/minimal"))  # with PROBES_JAX=off there is no run to open
