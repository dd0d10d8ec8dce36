"""Transforms inside nnx models, point by point against the same model without them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from probes_jax.observe.census import NEVER_CALLED
from probes_jax.observe.wrap import wrap
from probes_jax.stats.moments import summarize_magnitude
from tests.observe import nnx_transformed as models
from tests.observe.evaluate import backward_rows, evaluate, observed_and_plain, start
from tests.observe.unrolled import assert_as_unrolled

X = jnp.linspace(-1.0, 2.0, 12).reshape(3, 4)


def square(model, batch, rngs):
    return jnp.sum(jnp.square(model(batch)))


LIFTED = {
    "over split state": models.OverSplitState,
    "state in the carry": models.StateInCarry,
    "closed over": models.ClosedOver,
    "cell": models.Cell,
    "cell, no updates": lambda rngs: models.Cell(rngs, graph_updates=False),
    "cell, as a tree": lambda rngs: models.Cell(rngs, graph=False),
    "strict filters": models.StrictFilters,
    "checkpoints": models.Checkpointed,
    "maps": models.Mapped,
    "layers and steps": models.Both,
}


@pytest.mark.optimized
@pytest.mark.parametrize("name", LIFTED)
def test_a_transform_brings_out_every_point(name):
    module = LIFTED[name](nnx.Rngs(0))
    _, binding = assert_as_unrolled(module, module.reference, X)
    assert not binding.marks.slots  # no Variable was added anywhere


@pytest.mark.optimized
def test_each_part_of_a_model_has_the_marks_that_it_takes():
    module = models.Layers(nnx.Rngs(0))
    wanted = {"looped": "does not take a Variable more", "lost": "did not come back"}
    observed, binding = assert_as_unrolled(module, module.reference, X, wanted=wanted)
    assert set(binding.marks.slots) == {("layers", "inner"), ("jitted",), ("lost",)}
    through = {point.name: point.through for point in observed.captured.seen}
    assert through["layers[*]"] == ("jax.lax.scan",)
    assert through["layers[*]/inner"] == ("jax.lax.scan", "jax.checkpoint")
    assert through["output"] == ()


def test_modules_that_are_never_called_are_named():
    module = models.Odd(nnx.Rngs(0))
    assert_as_unrolled(module, module.reference, X, wanted={"direct": NEVER_CALLED, "unused": NEVER_CALLED})


def test_a_branch_that_is_not_taken_is_absent():
    binding, parts = start(models.Branches(nnx.Rngs(0)), square, X)
    observed = evaluate(binding, square, X, parts)
    _, _, backward = backward_rows(binding, square, X, parts)
    first = parts.params["first"]
    x = models.dense(first, X)
    y = models.dense(first, jnp.tanh(x))
    for rows in (observed.rows, backward):
        counts = {name: row["count"] for name, row in rows.items()}
        assert counts == {"first": 12, "second": 0, "second#1": 0, "second#2": 0, "first#1": 12, "output": 12}
    assert observed.rows["first"]["abs_max"] == pytest.approx(float(jnp.abs(x).max()), rel=1e-5)
    assert observed.rows["first#1"]["sum_sq"] == pytest.approx(float(jnp.sum(y * y)), rel=1e-5)
    assert backward["first#1"]["sum_sq"] == pytest.approx(float(jnp.sum(4 * y * y)), rel=1e-5)
    assert observed.captured.missing == {}


def test_random_states_as_an_argument_count_once():
    def loss_fn(model, batch, rngs):
        return jnp.sum(jnp.square(model(batch, nnx.Rngs(jax.random.key(3)))))

    observed, binding, _ = observed_and_plain(models.RandomArgument(nnx.Rngs(0)), loss_fn, X)
    assert set(binding.marks.slots) == {("one",), ("one", "inner"), ("one", "drop")}  # what nnx.jit runs
    parts = ("inner", "drop", "")
    places = [f"{place}/{part}".rstrip("/") for place in ("one", "layers[0]", "layers[1]") for part in parts]
    again = ["one/inner#1", "one/drop#1", "one#1"]
    assert set(observed.rows) == {*places, *again, "output"}
    assert observed.rows["one#1"] == observed.rows["output"]
    assert observed.captured.missing == {}


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        self.rnn = nnx.RNN(nnx.GRUCell(4, 4, rngs=rngs))

    def __call__(self, x):
        return self.rnn(x[None])


def test_flax_s_own_recurrent_layer():
    observed, _, _ = observed_and_plain(Recurrent(nnx.Rngs(0)), square, X)
    assert observed.captured.missing == {}
    assert observed.rows["rnn/cell/dense_i"]["count"] == 3 * 12  # three steps, three gates
    for statistic in ("count", "sum_sq", "abs_max"):
        assert observed.rows["rnn/cell:1"][statistic] == pytest.approx(observed.rows["rnn"][statistic], rel=1e-6)


class Fails(models.StateInCarry):
    def __call__(self, x):
        def body(x, _):
            raise KeyError("inside the body")

        return jax.lax.scan(body, self.layer(x), None, length=2)[0]


def test_jax_is_as_it_was_after_a_run_and_after_an_exception():
    before = (jax.lax.scan, jax.lax.map, jax.lax.cond, jax.lax.switch, jax.checkpoint, jax.remat, jax.vmap)
    module = models.ClosedOver(nnx.Rngs(0))
    binding, parts = start(module, square, X)
    evaluate(binding, square, X, parts)
    failing = Fails(nnx.Rngs(0))
    with pytest.raises(KeyError, match="inside the body"):
        evaluate(wrap(failing), square, X, parts)
    assert before == (jax.lax.scan, jax.lax.map, jax.lax.cond, jax.lax.switch, jax.checkpoint, jax.remat, jax.vmap)
    assert models.scan is jax.lax.scan
    assert models.checkpoint is jax.checkpoint
    for used in (module, failing, binding.module(*parts)):
        assert not [name for _, m in nnx.iter_modules(used) for name in vars(m) if "probes" in name]
    np.testing.assert_allclose(module(X), binding.module(*parts)(X))


def test_no_tracer_leaks_out_of_a_body():
    binding, parts = start(models.Both(nnx.Rngs(0)), square, X)

    def step(params):
        def objective(params):
            bound = binding.bind(params, {}, rngs=None, measure=summarize_magnitude)
            loss = square(bound, X, None)
            return loss, list(bound.finish().points.values())

        return jax.value_and_grad(objective, has_aux=True)(params)

    with jax.checking_leaks():
        jax.jit(step)(parts.params)


def test_points_come_in_the_order_of_the_calls():
    observed, _, _ = observed_and_plain(models.Mapped(nnx.Rngs(0)), square, X)
    assert list(observed.rows) == ["closed", "shared", "experts[0]", "experts[1]", "last", "output"]
