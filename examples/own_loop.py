"""plain_loop.py with monitoring: the loop keeps its own step, state and optimizer call."""

from __future__ import annotations

import sys

import jax
import optax
import text
from decoder_linen import Config, TransformerLM

import probes_jax as pj

model = TransformerLM(Config(length=64, width=64, layers=2, heads=2, hidden=128))
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def loss_fn(params, batch, key):
    logits = model.apply({"params": params}, batch["tokens"])
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return (nll * batch["mask"]).sum() / batch["mask"].sum()


@jax.jit
def train_step(params, opt_state, monitor, batch, key):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch, key)
    updates, new_opt_state = tx.update(grads, opt_state, params)
    new_params = optax.apply_updates(params, updates)
    return new_params, new_opt_state, *monitor.measure(loss, grads, params, new_params, opt_state, new_opt_state)


def main(steps):
    batches = text.batches(text.load_sources(), rows=8, length=64, seed=0)
    key = jax.random.key(0)
    params = model.init(key, next(batches)["tokens"])["params"]
    opt_state = tx.init(params)
    monitor, recorder = pj.Monitor.create(tx=tx, params=params), pj.Recorder("runs/own_loop")
    for step in range(steps):
        batch, step_key = next(batches), jax.random.fold_in(key, step)
        params, opt_state, monitor, report = train_step(params, opt_state, monitor, batch, step_key)
        recorder.record(report)
    recorder.close()
    print(f"loss {report.scalars().get('loss/mean')} after {steps} steps")  # None with PROBES_JAX=off


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
