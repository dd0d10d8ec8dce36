"""Gradients of activations in the report, and that nothing else ever sees a tap."""

from __future__ import annotations

import collections

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import probes_jax as pj
from probes_jax.cost.inspection import names_of
from probes_jax.step.train import compiled
from tests.step.small import VOCAB, Model, NNXModel, make_batch, make_sgd, make_state, only

PLAN = only("act", "grad_act")


@pytest.fixture(scope="module")
def whole():
    """A state of the whole batch at once; its program is compiled once."""
    return make_state(plan=PLAN, donate=False)


@pytest.fixture(scope="module")
def wanted(whole):
    return gradients_of_outputs(whole.params, make_batch())


def gradients_of_outputs(params, batch):
    """Name to the float64 gradient of the mean loss at each output, by adding a zero to it."""

    def run(zeros):
        shapes, calls = {}, collections.Counter()

        def intercept(call, args, kwargs, context):
            output = call(*args, **kwargs)
            text = (
                "/".join(context.module.path).replace("block_0", "block[0]").replace("block_1", "block[1]") or "output"
            )
            text = text.replace("Dropout_0", "Dropout[0]")
            if context.method_name != "__call__":
                return output
            assert calls[text] == 0
            calls[text] += 1
            shapes[text] = output
            return output + zeros[text] if zeros else output

        with nn.intercept_methods(intercept):
            logits = Model().apply({"params": params}, batch["tokens"])
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return (nll * batch["mask"]).sum() / batch["mask"].sum(), shapes

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(lambda: run(None)[1]))
    found = jax.jit(jax.grad(lambda zeros: run(zeros)[0]))(zeros)
    return {name: np.asarray(x, np.float64) for name, x in found.items()}


@pytest.mark.parametrize("settings", [{}, {"microbatches": 4}, {"microbatches": 2, "loss_scale": 64.0}])
def test_values_are_gradients_of_the_mean_loss(settings, whole, wanted):
    state = make_state(plan=PLAN, **settings) if settings else whole
    _, report = pj.monitored_train_step(state, make_batch())
    found = report.scalars()
    for name, x in wanted.items():
        statistics = {
            "abs_max": np.abs(x).max(),
            "rms": np.sqrt((x**2).mean()),
            "mean_square": (x**2).mean(),
            "abs_mean": np.abs(x).mean(),
            "mean": x.mean(),
            "std": x.std(),
            "min": x.min(),
            "max": x.max(),
            "zero_fraction": (x == 0).mean(),
            "nan_count": 0,
            "inf_count": 0,
        }
        for statistic, value in statistics.items():
            assert found[f"grad_act/{name}/{statistic}"] == pytest.approx(
                value, rel=2e-5, abs=1e-6 * np.abs(x).max()
            ), (name, statistic)
    assert found["grad_act/abs_max"] == pytest.approx(max(np.abs(x).max() for x in wanted.values()), rel=1e-5)


def test_every_activation_has_its_gradient_beside_it(whole):
    for state in (whole, make_state(model=NNXModel(nnx.Rngs(0)), plan=PLAN)):
        _, report = pj.monitored_train_step(state, make_batch())
        found = report.scalars()
        points = {name.split("/", 1)[1] for name in found if name.startswith("act/") and ".input/" not in name}
        gradients = {name.split("/", 1)[1] for name in found if name.startswith("grad_act/")}
        assert points == {name for name in gradients if not name.endswith("/gain")}
        assert len(points) > 60


def test_l016_state_never_holds_a_tap():
    """Parameters, optimizer state, model state: the same structure and the same bytes."""
    states = [make_state(plan=only("act", "grad_act", backward=on), donate=False) for on in (True, False)]
    stepped = [pj.monitored_train_step(state, make_batch())[0] for state in states]
    for one, other in (states, stepped):
        assert jax.tree.structure(one.core) == jax.tree.structure(other.core)
        assert [x.shape for x in jax.tree.leaves(one.core)] == [x.shape for x in jax.tree.leaves(other.core)]


def test_off_and_light_are_as_if_there_were_no_taps():
    texts = []
    for on in (True, False):
        state = make_state(plan=only("act", "grad_act", backward=on), donate=False)
        texts.append(
            [
                compiled(state.settings, p).lower(np.int32(0), state.core, make_batch()).as_text()
                for p in ("off", "light")
            ]
        )
    assert texts[0] == texts[1]


def test_l014_what_the_loss_does_not_depend_on_is_absent_and_not_zero():
    class Cut(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(VOCAB, 8, name="embed")(tokens)
            nn.Dense(4, name="unused")(x)
            return nn.Dense(VOCAB, name="head")(jax.lax.stop_gradient(nn.Dense(8, name="cut")(x)))

    for microbatches in (1, 2):
        _, report = pj.monitored_train_step(make_state(model=Cut(), plan=PLAN, microbatches=microbatches), make_batch())
        found = report.scalars()
        for name in ("embed", "unused", "cut"):
            assert f"act/{name}/rms" in found
            assert f"grad_act/{name}/rms" not in found
        assert found["grad_act/head/rms"] > 0


def test_an_empty_batch_has_gradients_of_zero(whole):
    batch = make_batch()
    batch["mask"][:] = 0.0
    for state in (whole, make_state(plan=PLAN, microbatches=2)):
        _, report = pj.monitored_train_step(state, batch)
        found = report.scalars()
        assert found["grad_act/head/abs_max"] == 0
        assert np.isfinite([value for name, value in found.items() if name.startswith("grad_act")]).all()


def test_excluded_points_are_neither_reported_nor_computed(whole):
    state = make_state(plan=only("act", "grad_act", exclude=("block",)), donate=False)
    _, report = pj.monitored_train_step(state, make_batch())
    found = report.scalars()
    assert not [name for name in found if "act/block" in name]
    assert found["act/head/rms"] > 0
    assert found["sys/monitor/points_seen"] == found["sys/monitor/points_reported"]
    sizes = [
        len(compiled(s.settings, "full").lower(np.int32(0), s.core, make_batch()).compile().as_text())
        for s in (whole, state)
    ]
    assert sizes[1] < 0.8 * sizes[0]


def test_nan_that_begins_in_the_backward_pass():
    """0 * inf at a square root of zero: the forward pass is finite, the gradient is not, from one layer inwards."""

    class Root(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(VOCAB, 8, name="embed")(tokens)
            x = jnp.sqrt(jnp.abs(nn.Dense(8, name="zero", kernel_init=nn.initializers.zeros)(x)))
            return nn.Dense(VOCAB, name="head")(x)

    _, report = pj.monitored_train_step(make_state(model=Root(), plan=PLAN, tx=make_sgd()), make_batch())
    found = report.scalars()
    assert np.isfinite(found["act/abs_max"])
    assert np.isfinite(found["grad_act/head/abs_max"])
    assert not np.isfinite(found["grad_act/zero/abs_max"])
    assert not np.isfinite(found["grad_act/embed/abs_max"])


@pytest.mark.parametrize(
    ("settings", "points"),
    [
        ({"include": ("role:norm",)}, {"block[0]/norm", "block[1]/norm"}),
        ({"include": ("role:logits", "^embed$")}, {"embed", "head", "output"}),
        ({"include": ("^block",), "exclude": ("role:norm", "role:residual", "up")}, {"block[0]/down", "block[1]/down"}),
        ({"roles": (("(up|down)$", "width"),), "include": ("role:width",), "exclude": (r"\[1\]",)},
         {"block[0]/up", "block[0]/down"}),
    ],
)  # fmt: skip
def test_points_are_chosen_by_name_and_by_role(settings, points):
    state, batch = make_state(plan=only("act", "grad_act", scan_every=1, **settings)), make_batch()
    found = names_of(state, batch, "full")
    for family in ("act", "grad_act"):
        names = [name for name in found if name.startswith(f"{family}/") and name.endswith("/{stat}")]
        assert {name.removeprefix(f"{family}/").removesuffix("/{stat}") for name in names} == points
    _, report = jax.eval_shape(lambda batch: pj.monitored_train_step(state, batch), batch)
    assert set(report.coverage.reported) == points
