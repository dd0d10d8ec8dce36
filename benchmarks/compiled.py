"""What monitoring adds to the cost decoder's step, compiled for devices that need not be here; as JSON.

usage: python -m benchmarks.compiled v5e:16x16|v5p:8x8x8|h100:8|cpu:8 [--layers 12] [--width 2048] [--unrolled]
       [--length 2048] [--examples 2] [--model 16] [--no-remat] [--no-backward] [--by family] [--program light]
       [--more residual attention]
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # what is here; the programs are compiled for what is named

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import probes_jax as pj
from benchmarks.decoder import Config, Decoder, batch_like, loss_fn, optimizer


def devices(name: str) -> list[Any]:
    kind, _, count = name.partition(":")
    if kind != "cpu":
        return pj.topology(name)
    jax.config.update("jax_num_cpu_devices", int(count))
    return jax.devices()


def state_for(
    found: list[Any], model: int, examples: int, length: int, plan: pj.Plan, **sizes: Any
) -> tuple[pj.TrainState, Any]:
    """An abstract state and batch on a mesh of these devices.

    Args:
        found: Devices.
        model: How many of them share a layer; the others share the batch and the parameters.
        examples: Examples on each of the others.
        length: Tokens of an example.
        plan: What is measured.
        sizes: Of `benchmarks.decoder.Config`.
    """
    mesh = Mesh(np.array(found).reshape(-1, model), ("data", "model")) if len(found) > 1 else None
    sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec("data"))
    batch = batch_like(len(found) // model * examples, length, sharding)
    config = Config(mesh=mesh, **sizes)
    state = pj.TrainState.create(
        model=Decoder(config), tx=optimizer(), loss_fn=loss_fn, batch=batch, plan=plan, abstract=True
    )
    return state, batch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("topology")
    for name, default in (("layers", 12), ("width", 2048), ("length", 2048), ("examples", 2), ("model", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vocabulary", type=int, default=32_768)
    for name in ("unrolled", "no-remat", "no-backward"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--by", default=None)
    parser.add_argument("--program", action="append")
    parser.add_argument("--more", nargs="*", default=(), help="families measured besides, as in Plan(more=)")
    args = parser.parse_args()
    found = devices(args.topology)
    state, batch = state_for(
        found,
        args.model or (16 if len(found) >= 256 else min(2, len(found))),
        args.examples,
        args.length,
        pj.Plan(backward=not args.no_backward, more=tuple(args.more)),
        layers=args.layers,
        width=args.width,
        vocabulary=args.vocabulary,
        heads=max(args.width // 128, 2),
        scan=not args.unrolled,
        remat=not args.no_remat,
    )
    found = pj.inspect(state, batch, by=args.by, programs=tuple(args.program or ("light", "full")))
    print(json.dumps(found.to_json()))


if __name__ == "__main__":
    main()
