"""The same decoder in three ways: layer by layer in linen, scanned and rematerialized in linen, and in nnx.

    python examples/decoders.py [linen|scanned|nnx] [steps]

Every metric has the same name in all three, with a row for each layer: `residual/block[1]/mlp/ratio/mean`.
"""

import dataclasses
import sys

import decoder_linen
import decoder_nnx
import jax
import optax
import text
from flax.nnx import Rngs

import probes_jax as pj

KINDS = ("linen", "scanned", "nnx")
CONFIG = decoder_linen.Config(length=64, width=64, layers=2, heads=4, hidden=256)


def make_model(kind):  # neither file knows of probes_jax
    if kind == "nnx":
        return decoder_nnx.TransformerLM(CONFIG, rngs=Rngs(0))
    return decoder_linen.TransformerLM(dataclasses.replace(CONFIG, scan=kind == "scanned"))


def loss_fn(model, batch, rngs):
    logits = model(batch["tokens"])
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return pj.Loss(nll=nll, mask=batch["mask"], group=batch["source"])


def main(kind="scanned", steps=200):
    folder = f"runs/{kind}"
    batches = text.batches(text.load_sources(), rows=16, length=CONFIG.length)
    plan = pj.Plan(groups=text.SOURCES, more=("residual", "attention"))
    tx = pj.chain(("clip", optax.clip_by_global_norm(1.0)), ("adam", optax.scale_by_adam(b2=0.95)),
                  ("lr", optax.scale_by_learning_rate(3e-3)))  # fmt: skip
    state = pj.TrainState.create(
        model=make_model(kind), tx=tx, loss_fn=loss_fn, plan=plan, rngs=jax.random.key(0), batch=next(batches)
    )
    with pj.Recorder(folder, plan) as recorder, pj.LiveSignals(recorder, plan, total=steps) as live:
        for batch in pj.timed(batch for _, batch in zip(range(steps), batches)):
            state, report = pj.monitored_train_step(state, batch)
            recorder.record(report)
            live.update()
    run = pj.open_run(folder)
    pj.print_screen(run)
    return run


if __name__ == "__main__":
    given = sys.argv[1:]
    kind = given.pop(0) if given and given[0] in KINDS else "scanned"
    main(kind, *map(int, given))
