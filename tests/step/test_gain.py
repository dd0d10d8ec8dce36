"""Backward gain of blocks against jax.grad of the model cut in two."""

from __future__ import annotations

import jax
import optax
import pytest
from flax import linen as nn

import probes_jax as pj
from tests.step.small import VOCAB, Block, Layers, make_batch, make_state, norm64, only


def gradients_by_hand(params, batch):
    """Gradient of the mean loss at the output of each block."""
    layer = lambda i: params[f"block_{i}"] if "block_0" in params else jax.tree.map(lambda p: p[i], params["block"])  # noqa: E731

    def rest(x, after):
        for index in range(after + 1, 3):
            x = Block().apply({"params": layer(index)}, x)
        logits = nn.Dense(VOCAB).apply({"params": params["head"]}, x)
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return (nll * batch["mask"]).sum() / batch["mask"].sum()

    x, found = params["embed"]["embedding"][batch["tokens"]], []
    for index in range(3):
        x = Block().apply({"params": layer(index)}, x)
        found.append(jax.grad(rest)(x, index))
    return found


@pytest.mark.parametrize("scan", [False, True])
def test_the_gain_is_the_ratio_of_the_norms_around_a_block(scan):
    batch, plan = make_batch(), only("grad_act", "residual")
    state = make_state(model=Layers(scan), plan=plan, microbatches=2)
    norms = [norm64(x) for x in jax.jit(gradients_by_hand)(state.params, batch)]
    _, report = pj.monitored_train_step(state, batch)
    scalars = report.scalars()
    for index in (1, 2):
        assert scalars[f"grad_act/block[{index}]/gain"] == pytest.approx(norms[index - 1] / norms[index], rel=1e-4)
    assert "grad_act/block[0]/gain" not in scalars
