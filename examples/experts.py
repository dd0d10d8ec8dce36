"""A mixture-of-experts decoder with expert parallelism: every device holds some of the experts.

    python examples/experts.py [steps]

On a machine without accelerators it runs on eight virtual CPU devices: two shards of the batch, four of the experts.
"""

import sys
from math import gcd

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import text
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import probes_jax as pj

LAYERS, WIDTH, HIDDEN, LENGTH = 2, 64, 128, 64
EXPERTS, TOP_K = 8, 2
ROOM = 2 * LENGTH * TOP_K // EXPERTS  # tokens of a row that an expert takes, C; those after them are dropped


class Experts(nn.Module):
    @nn.compact
    def __call__(self, x_BxTxD):  # also returns Switch's balance loss, 1 where all experts get as much
        init = nn.initializers.lecun_normal(batch_axis=0)
        up_ExDxF = self.param("up", init, (EXPERTS, WIDTH, HIDDEN))
        down_ExFxD = self.param("down", init, (EXPERTS, HIDDEN, WIDTH))
        scores_BxTxE = nn.Dense(EXPERTS, use_bias=False, name="router")(x_BxTxD)  # observed: it is named router
        share_BxTxE = nn.softmax(scores_BxTxE)
        chosen_BxTxE = jax.nn.one_hot(jax.lax.top_k(scores_BxTxE, TOP_K)[1], EXPERTS).sum(axis=-2)
        weight_BxTxE = share_BxTxE * chosen_BxTxE
        weight_BxTxE /= weight_BxTxE.sum(axis=-1, keepdims=True)
        place_BxTxE = (jnp.cumsum(chosen_BxTxE, axis=1) - chosen_BxTxE).astype(jnp.int32)
        sent_BxTxExC = jax.nn.one_hot(place_BxTxE, ROOM) * chosen_BxTxE[..., None]
        x_ExBxCxD = jnp.einsum("btec,btd->ebcd", sent_BxTxExC, x_BxTxD)
        h_ExBxCxF = nn.gelu(jnp.einsum("ebcd,edf->ebcf", x_ExBxCxD, up_ExDxF))
        out_ExBxCxD = jnp.einsum("ebcf,efd->ebcd", h_ExBxCxF, down_ExFxD)
        balance = jnp.sum(chosen_BxTxE.mean((0, 1)) / TOP_K * share_BxTxE.mean((0, 1))) * EXPERTS
        return jnp.einsum("ebcd,btec,bte->btd", out_ExBxCxD, sent_BxTxExC, weight_BxTxE), balance


class Block(nn.Module):
    @nn.compact
    def __call__(self, x_BxTxD, mask):
        h_BxTxD = nn.LayerNorm(name="attention_norm")(x_BxTxD)
        x_BxTxD = x_BxTxD + nn.MultiHeadDotProductAttention(4, name="attention")(h_BxTxD, mask=mask)
        out_BxTxD, balance = Experts(name="experts")(nn.LayerNorm(name="experts_norm")(x_BxTxD))
        return x_BxTxD + out_BxTxD, balance


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens_BxT):
        x_BxTxD = nn.Embed(text.VOCABULARY, WIDTH, name="embed")(tokens_BxT)
        x_BxTxD = x_BxTxD + self.param("position_embed", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        mask, balances = nn.make_causal_mask(tokens_BxT), []
        for layer in range(LAYERS):
            x_BxTxD, balance = Block(name=f"block_{layer}")(x_BxTxD, mask)
            balances.append(balance)
        return nn.Dense(text.VOCABULARY, name="head")(nn.LayerNorm(name="norm")(x_BxTxD)), sum(balances) / LAYERS


def loss_fn(model, batch, rngs):
    logits, balance = model(batch["tokens"])
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return pj.Loss(nll=nll, mask=batch["mask"], extra={"balance": 0.01 * balance})


def main(steps=150):
    devices = jax.devices()
    shards = gcd(len(devices), EXPERTS // 2)  # two experts a device, or more
    mesh = Mesh(np.array(devices).reshape(-1, shards), ("data", "expert"))

    def lies(path, shape):  # of each parameter; the shards of experts are found from it
        return PartitionSpec("expert") if path[-1] in ("up", "down") else PartitionSpec()

    def batches():
        for batch in text.batches(text.load_sources(), rows=8 * mesh.shape["data"], length=LENGTH):
            yield jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))

    plan = pj.Plan.first_screen(top_k=TOP_K)  # the router returns scores, not to how many experts a token goes
    tx = pj.chain(("clip", optax.clip_by_global_norm(1.0)), ("adam", optax.scale_by_adam(b2=0.95)),
                  ("lr", optax.scale_by_learning_rate(3e-3)))  # fmt: skip
    state = pj.TrainState.create(
        model=Decoder(),
        tx=tx,
        loss_fn=loss_fn,
        plan=plan,
        rngs=jax.random.key(0),
        batch=next(batches()),
        shardings=lies,
    )
    with pj.Recorder("runs/experts", plan) as recorder, pj.LiveSignals(recorder, plan, total=steps) as live:
        for _, batch in zip(range(steps), pj.timed(batches())):
            state, report = pj.monitored_train_step(state, batch)
            recorder.record(report)
            live.update()
            if devices[0].platform == "cpu":  # devices that share cores: collectives of steps that pile up get stuck
                jax.block_until_ready(state)
    run = pj.open_run("runs/experts")
    pj.print_screen(run)
    return run


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # where there is no accelerator
    main(*map(int, sys.argv[1:]))
