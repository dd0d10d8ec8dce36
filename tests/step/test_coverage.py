"""The rows of a report's coverage, for a model that scans and a model that hides a layer. Traced, never compiled."""

from __future__ import annotations

import flax.linen as nn
import jax
import optax
import pytest

import probes_jax as pj
from tests.step.small import GROUPS, VOCAB, WIDTH, Block, Model, make_batch, make_state, only


class Step(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return Block(name="block")(x), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, name="embed")(tokens)
        layers = nn.scan(nn.remat(Step), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = layers(name="layers")(x, None)
        return nn.Dense(VOCAB, name="head")(x)


class Hiding(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, name="embed")(tokens)
        head = nn.Dense(VOCAB, name="head")
        head(x)  # made here, so that the transform below creates nothing
        return jax.vmap(head)(x)


def coverage_of(model, **settings):
    plan = pj.Plan(groups=GROUPS, scan_every=1, **settings)
    state = make_state(model, plan=plan)
    return jax.eval_shape(lambda batch: pj.monitored_train_step(state, batch)[1], make_batch()).coverage


@pytest.fixture(scope="module")
def scanned():
    return {point.name: point for point in coverage_of(Scanned()).points}


def test_a_scanned_layer_has_its_length_and_its_transforms(scanned):
    point = scanned["layers[*]/block/up"]
    assert (point.layers, point.shape, point.class_name) == ((3,), (8, 6, 16), "Dense")
    assert point.through == ("nn.scan", "nn.remat")
    assert point.labels()[2] == "layers[2]/block/up"
    assert (scanned["head"].layers, scanned["head"].through, scanned["head"].role) == ((), (), "logits")
    assert all(point.reported and point.gradient != name.endswith(".input") for name, point in scanned.items())


def test_a_plan_without_gradients_says_so():
    points = coverage_of(Scanned(), backward=False).points
    assert {point.measured for point in points} == {"forward"}


def test_what_is_hidden_is_a_row_and_a_reason():
    found = coverage_of(Hiding())
    hidden = [point for point in found.points if not point.reported]
    assert [(point.name, point.class_name, point.call) for point in hidden] == [("head#1", "Dense", 1)]
    assert "head#1" in dict(found.missing) and not hidden[0].layers
    assert ("head#1", "1", "logits", "Dense", "6x16", "", "missing") in found.table()


def test_the_roles_of_the_plan_are_in_the_rows():
    points = coverage_of(Scanned(), roles=(("up$", "expander"),)).points
    assert [point.role for point in points if point.name.endswith("/up")] == ["expander"]


@pytest.mark.parametrize("said", [False, True])
def test_which_of_two_calls_gives_the_logits_must_be_said(said):
    def twice(model, batch, rngs):
        logits, other = model(batch["tokens"]), model(batch["targets"])
        nll = optax.softmax_cross_entropy_with_integer_labels(logits + 0.1 * other, batch["targets"])
        return pj.Loss(nll=nll, mask=batch["mask"], logits=logits if said else None)

    state = make_state(Model(), loss_fn=twice, plan=only("logits"))
    report = jax.eval_shape(lambda batch: pj.monitored_train_step(state, batch)[1], make_batch())
    reason = dict(report.coverage.missing).get("logits", "")
    assert said == (reason == "") == any("logits" in entry.key for entry in report.layout.entries)
    assert said or ("2 outputs of the model in 2 calls" in reason and "pj.Loss(logits=...)" in reason)
