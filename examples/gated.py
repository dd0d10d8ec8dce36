"""Residual branches behind gates: `x + sigmoid(gate) * branch`, and a line that says so.

    python examples/gated.py [steps]

The gates begin nearly shut. How many of their channels are shut, and how much each branch writes into the stream, shows
block by block: `residual/block[0]/gate/saturation/0.1/mean`, `residual/block[0]/mlp/ratio/mean`.
"""

import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import text
from decoder_linen import Config, FeedForward

import probes_jax as pj

CONFIG = Config(length=64, width=64, layers=3, heads=4, hidden=256)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x_BxTxD):
        h_BxTxD = nn.LayerNorm(name="norm")(x_BxTxD)
        shut = nn.initializers.constant(-2.5)
        gate_BxTxD = nn.Dense(CONFIG.width, kernel_init=nn.initializers.zeros, bias_init=shut, name="gate")(h_BxTxD)
        pj.observe_gate("gate", gate_BxTxD)
        before_BxTxD = jnp.pad(h_BxTxD, ((0, 0), (1, 0), (0, 0)))[:, :-1]  # no attention: a token sees the one before
        branch_BxTxD = FeedForward(CONFIG, name="mlp")(jnp.concatenate([h_BxTxD, before_BxTxD], axis=-1))
        return x_BxTxD + nn.sigmoid(gate_BxTxD) * branch_BxTxD


class GatedLM(nn.Module):
    @nn.compact
    def __call__(self, tokens_BxT):
        small = nn.initializers.normal(0.02)
        x_BxTxD = nn.Embed(CONFIG.vocabulary, CONFIG.width, embedding_init=small, name="embed")(tokens_BxT)
        for layer in range(CONFIG.layers):
            x_BxTxD = Block(name=f"block_{layer}")(x_BxTxD)
        return nn.Dense(CONFIG.vocabulary, kernel_init=small, name="head")(nn.LayerNorm(name="norm")(x_BxTxD))


def loss_fn(model, batch, rngs):
    nll = optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["targets"])
    return pj.Loss(nll=nll, mask=batch["mask"])


def main(steps=200):
    batches = text.batches(text.load_sources(), rows=16, length=CONFIG.length)
    plan = pj.Plan.first_screen(scan_every=50)
    tx = pj.chain(("clip", optax.clip_by_global_norm(1.0)), ("adam", optax.scale_by_adam(b2=0.95)),
                  ("lr", optax.scale_by_learning_rate(5e-3)))  # fmt: skip
    state = pj.TrainState.create(
        model=GatedLM(), tx=tx, loss_fn=loss_fn, plan=plan, rngs=jax.random.key(0), batch=next(batches)
    )
    with pj.Recorder("runs/gated", plan) as recorder, pj.LiveSignals(recorder, plan, total=steps) as live:
        for _, batch in zip(range(steps), pj.timed(batches)):
            state, report = pj.monitored_train_step(state, batch)
            recorder.record(report)
            live.update()
    run = pj.open_run("runs/gated")
    pj.print_screen(run)
    for block in range(CONFIG.layers):
        shut, ratio = (
            run.series(f"residual/block[{block}]/{name}/mean") for name in ("gate/saturation/0.1", "mlp/ratio")
        )
        for step, a, b in zip(shut[0], shut[1], ratio[1]):
            print(f"block {block}, step {step:3}: {a:.0%} of the gate's channels below 0.1, branch / stream {b:.2f}")
    return run


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
