"""Programs compiled for TPUs and GPUs that are not here: what monitoring adds must not grow. `make test-aot`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from probes_jax.spec.plan import MORE
from tests.contracts.source import ROOT

TPU = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
GPU = pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is None, reason="no compiler for GPUs")
SMALL = ("--width", "1024", "--length", "512", "--vocabulary", "4096")


def inspected(*arguments: str) -> dict:
    """In a process of its own: here JAX may have begun with other settings."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.compiled", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def added(found: dict, program: str, what: str) -> int:
    return found["programs"][program][what] - found["programs"]["off"][what]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("arguments", "programs", "most"),
    [
        # Of a full step the compiler splits one of the loss's own all-reduces in two.
        pytest.param(("v5e:16x16", "--more", "residual"), ("light", "full"), 3, marks=TPU, id="v5e-256"),
        pytest.param(("h100:8", *SMALL, "--more", *MORE), ("light", "full"), 2, marks=GPU, id="h100-8"),
    ],
)
def test_two_collectives_more_and_none_in_a_loop(arguments, programs, most):
    found = inspected(*arguments, *(word for program in programs for word in ("--program", program)))
    for program in programs:
        exchanges = found["exchanges"][program]
        assert added(found, program, "collectives") <= (2 if program == "light" else most), exchanges
        assert not [each for each in exchanges if each["looped"]]
    assert found["programs"]["off"]["looped"] > 0  # the model's own: the count sees loops
    if arguments[0] == "v5e:16x16":  # a light step moves and holds hardly more
        plain = found["programs"]["off"]
        assert added(found, "light", "bytes") <= 0.003 * plain["bytes"]
        assert added(found, "light", "temporary") <= 0.01 * plain["temporary"]
        assert added(found, "full", "bytes") <= 0.05 * plain["bytes"]


BOTH = """
import jax, jax.numpy as jnp, numpy as np, optax, sys
import flax.linen as nn, probes_jax as pj
from jax.sharding import Mesh, NamedSharding, PartitionSpec
for name in sys.argv[1:]:
    mesh = Mesh(np.array(pj.topology(name)), ("data",))
    batch = jax.ShapeDtypeStruct((32, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    loss = lambda model, batch, rngs: pj.Loss(nll=model(batch)[..., 0] ** 2)
    state = pj.TrainState.create(model=nn.Dense(4), tx=optax.sgd(0.1), loss_fn=loss, batch=batch, abstract=True)
    print(pj.inspect(state, batch, programs=("light",), by=None).device)
"""


@TPU
@GPU
@pytest.mark.parametrize("names", [("v5e:2x4", "h100:8"), ("h100:8", "v5e:2x4")])
def test_one_process_compiles_for_both(names):
    done = subprocess.run(
        [sys.executable, "-c", BOTH, *names],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    devices = ["TPU v5 lite", "NVIDIA H100 80GB HBM3"]
    assert done.stdout.splitlines() == (devices if names[0].startswith("v5e") else devices[::-1])
