"""Trains a small byte-level language model on text found on this machine, with its probes on.

python examples/demo.py             a linen model, at most 3 minutes of training
python examples/demo.py --nnx       the same model in nnx
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
import optax
import text
from decoder_linen import Config

import probes_jax as pj
from probes_jax.present.table import make_console

ROWS = 8  # sequences of a batch
COMPILING = 2  # steps that wait for their program: the first full one, the first light one
CONFIG = Config(vocabulary=text.VOCABULARY, length=128, width=128, layers=4, heads=4, hidden=512)


def make_model(nnx: bool, seed: int):
    """The user's model. Neither file knows of probes_jax."""
    if nnx:
        import decoder_nnx
        from flax.nnx import Rngs

        return decoder_nnx.TransformerLM(CONFIG, rngs=Rngs(seed))
    import decoder_linen

    return decoder_linen.TransformerLM(CONFIG)


def loss_fn(model, batch, rngs):
    logits = model(batch["tokens"])
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return pj.Loss(nll=nll, mask=batch["mask"], group=batch["source"])


def limited(batches: Iterable, steps: int, minutes: float, console) -> Iterator:
    """At most so many batches, and none after so many minutes of training. Compiling does not count."""
    end = float("inf")
    for step, batch in zip(range(steps), batches):
        if step == COMPILING:
            end = time.monotonic() + 60 * minutes
        elif time.monotonic() > end:
            console.print(f"stopped: {minutes:g} minutes of training are over (step {step:,} of {steps:,})")
            return
        yield batch


def main() -> None:
    options = parse_options()
    console = make_console()
    sources = text.load_sources()
    batches = text.batches(sources, rows=ROWS, length=CONFIG.length, seed=options.seed)

    model = pj.wrap(make_model(options.nnx, options.seed))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, warmup_steps=50, decay_steps=max(options.steps, 51))
    tx = pj.chain(
        ("clip", optax.clip_by_global_norm(1.0)),
        ("adam", optax.scale_by_adam(b2=0.95)),
        ("decay", optax.add_decayed_weights(0.1)),
        ("lr", optax.scale_by_learning_rate(schedule)),
    )
    plan = pj.Plan(groups=text.SOURCES, more=("residual",))
    state = pj.TrainState.create(
        model=model, tx=tx, loss_fn=loss_fn, plan=plan, rngs=jax.random.key(options.seed), batch=next(batches)
    )
    describe(console, options, state, sources)

    batches = limited(batches, options.steps, options.minutes, console)
    by_hand = False
    try:
        with pj.Recorder(options.out, plan) as recorder, pj.LiveSignals(recorder, plan, total=options.steps) as live:
            for batch in pj.timed(batches):
                state, report = pj.monitored_train_step(state, batch)
                recorder.record(report)
                live.update()
    except KeyboardInterrupt:
        by_hand = True
    finish(console, options.out, by_hand)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nnx", action="store_true", help="the nnx model instead of the linen one")
    parser.add_argument("--steps", type=int, default=1200, help="steps at most (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=3.0, help="minutes of training after compiling (default: 3)")
    parser.add_argument("--out", type=Path, help="run folder (default: runs/demo, or the next free name)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    options = parser.parse_args()
    if options.steps < 1 or not options.minutes > 0:
        parser.error("--steps and --minutes must be positive")
    if options.out is None:
        options.out = next(path for path in free_names() if not path.exists())
    elif (options.out / "entries").exists():
        parser.error(f"there is a run in {options.out} already; choose another folder")
    return options


def free_names() -> Iterator[Path]:
    yield Path("runs/demo")
    number = 2
    while True:
        yield Path(f"runs/demo-{number}")
        number += 1


def describe(console, options, state, sources) -> None:
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    found = ", ".join(f"{source.name} {source.data.size / 1e6:.1f} MB" for source in sources)
    devices = jax.devices()
    kind = "nnx" if options.nnx else "linen"
    console.print(f"model    {kind} decoder, {size:,} parameters, jax {jax.__version__}")
    console.print(f"text     {found}; {ROWS * CONFIG.length:,} tokens (bytes) a step")
    console.print(f"device   {len(devices)} x {devices[0].device_kind}")
    console.print(
        f"training {options.steps:,} steps, at most {options.minutes:g} minutes of them; Ctrl-C ends it cleanly"
    )


def finish(console, folder: Path, by_hand: bool) -> None:
    try:
        run = pj.open_run(folder)
    except FileNotFoundError:
        stopped = "Stopped by hand. " if by_hand else ""
        console.print(f"{stopped}Nothing was recorded: no step was finished, or PROBES_JAX=off is set.")
        return
    if by_hand:
        console.print("Stopped by hand; everything up to here is written.")
    pj.print_screen(run, console, str(folder))
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    ways = {
        shlex.join([str(python), "-m", "tensorboard.main", "--logdir", f"{folder}/events"]): "its curves",
        shlex.join([str(python), "-m", "probes_jax", "screen", str(folder)]): "this table again",
        shlex.join([str(python), "-m", "probes_jax", "coverage", str(folder)]): "what of the model is seen",
        f'probes_jax.open_run("{folder}")': "every number, in Python",
    }
    console.print(f"The run is in {folder}:", markup=False, soft_wrap=True)
    width = max(map(len, ways))
    for way, what in ways.items():
        console.print(f"  {way:{width}}   {what}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # before the first step
        raise SystemExit(130) from None
