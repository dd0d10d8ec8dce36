"""Several optimizers in one step: groups of parameters, two models, two losses, and what cannot be called."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import probes_jax as pj
from tests.step.small import VOCAB, copy, make_batch, make_state, norm64, only, plain_loss

pytestmark = pytest.mark.slow  # together; the second pair of Python and JAX goes without

PLAN = only("grad", "param", "update", scan_every=2)  # activations are not what this is about


class Tiny(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, 4, name="embed")(tokens)
        return nn.Dense(VOCAB, name="head")(nn.tanh(nn.Dense(4, name="hidden")(x)))


def make(tx):
    return make_state(model=Tiny(), tx=tx, plan=PLAN)


@functools.partial(jax.jit, static_argnums=3)
def plain(params, opt_state, batch, tx):
    """One step of optax alone."""
    gradients, _ = jax.grad(plain_loss, has_aux=True)(params, batch, Tiny())
    updates, opt_state = tx.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, gradients


def labels(params):
    """The embedding, the head, and the rest."""
    return {name: name if name in ("embed", "head") else "rest" for name in params}


def rate(value):
    return ("lr", optax.scale_by_learning_rate(value))


GROUPED = {
    "embed": pj.chain(("adam", optax.scale_by_adam()), rate(optax.linear_schedule(0.0, 0.4, 4))),
    "head": optax.set_to_zero(),
    "rest": pj.chain(("clip", optax.clip_by_global_norm(0.01)), rate(0.5)),
}


def test_groups_of_parameters_have_their_own_rate_and_frozen_ones_stand():
    tx = pj.chain(("clip", optax.clip_by_global_norm(0.5)), ("groups", optax.partition(GROUPED, labels)))
    state = make(tx)
    params, opt_state = copy(state.params), copy(state.opt_state)
    for step in range(3):
        batch = make_batch(step)
        state, report = pj.monitored_train_step(state, batch)
        found, old = report.scalars(), params
        params, opt_state, gradients = plain(params, opt_state, batch, tx)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state.params, params)
        assert found["opt/learning_rate/embed"] == pytest.approx(0.1 * step)
        assert found["opt/learning_rate/rest"] == 0.5
        assert found["opt/learning_rate"] == 0.5
        assert "opt/learning_rate/head" not in found
        moved = [x for key in ("embed", "hidden") for x in jax.tree.leaves(gradients[key])]
        assert found["grad/norm"] == pytest.approx(norm64(*moved), rel=1e-5)
        assert found["grad_frozen/norm"] == pytest.approx(norm64(*jax.tree.leaves(gradients["head"])), rel=1e-5)
        everything = norm64(*jax.tree.leaves(gradients))
        assert found["grad/clip_rate"] == pytest.approx(float(everything > 0.5)) or step > 0
        if step == 2:
            change = norm64(np.asarray(params["embed"]["embedding"]) - np.asarray(old["embed"]["embedding"]))
            assert found["update/embed/embedding/norm"] == pytest.approx(change, rel=1e-4)
            assert found["update/embed/embedding/ratio"] == pytest.approx(
                change / norm64(old["embed"]["embedding"]), rel=1e-4
            )
            assert found["update/head/kernel/norm"] == 0.0


def test_a_clip_in_each_group_is_absent_and_says_so():
    outside, inside = optax.partition(GROUPED, labels), pj.chain(("groups", optax.partition(GROUPED, labels)))
    assert "pj.chain" in make(outside).settings.missing["grad/clip_rate"]
    assert "no stage clips by the global norm (groups)" in make(inside).settings.missing["grad/clip_rate"]


# ---- two models, two losses


def generator(params, noise):
    return jnp.tanh(noise @ params["up"]) @ params["out"]


def discriminator(params, x):
    return (jnp.tanh(x @ params["up"]) @ params["out"])[:, 0]


def gan_losses(g, d, real, noise):
    """The generator wants its samples taken for real, the discriminator to tell them apart."""
    fake = generator(g, noise)
    right = optax.sigmoid_binary_cross_entropy(discriminator(d, real), jnp.ones(len(real)))
    wrong = optax.sigmoid_binary_cross_entropy(discriminator(d, fake), jnp.zeros(len(fake)))
    fooled = optax.sigmoid_binary_cross_entropy(discriminator(d, fake), jnp.ones(len(fake)))
    return fooled.mean(), right.mean() + wrong.mean()


def gan():
    rng = np.random.default_rng(0)
    g = {"up": rng.normal(size=(4, 8)), "out": rng.normal(size=(8, 2))}
    d = {"up": rng.normal(size=(2, 8)), "out": rng.normal(size=(8, 1))}
    real, noise = rng.normal(size=(2, 3, 16, 2)) + 2.0, rng.normal(size=(2, 3, 16, 4))
    return *jax.tree.map(np.float32, (g, d)), real[0].astype(np.float32), noise[0].astype(np.float32)


def test_two_models_with_an_optimizer_each_have_a_monitor_and_a_folder_each(tmp_path):
    """Both in one jitted step; the generator learns on every other one. Trained as without monitors, bit for bit."""
    g, d, real, noise = gan()
    tx_g, tx_d = pj.chain(rate(0.1)), pj.chain(("clip", optax.clip_by_global_norm(0.1)), rate(0.05))

    def updates(g, d, opt_g, opt_d, real, noise):
        loss_g, grads_g = jax.value_and_grad(lambda g: gan_losses(g, d, real, noise)[0])(g)
        loss_d, grads_d = jax.value_and_grad(lambda d: gan_losses(g, d, real, noise)[1])(d)
        up_g, new_opt_g = tx_g.update(grads_g, opt_g, g)
        up_d, new_opt_d = tx_d.update(grads_d, opt_d, d)
        return loss_g, grads_g, optax.apply_updates(g, up_g), new_opt_g, (
            loss_d, grads_d, optax.apply_updates(d, up_d), new_opt_d,
        )  # fmt: skip

    @jax.jit
    def alone(g, d, opt_g, opt_d, real, noise):
        _, _, new_g, new_opt_g, (_, _, new_d, new_opt_d) = updates(g, d, opt_g, opt_d, real, noise)
        return new_g, new_d, new_opt_g, new_opt_d

    @jax.jit
    def monitored(g, d, opt_g, opt_d, mon_g, mon_d, real, noise):
        loss_g, grads_g, new_g, new_opt_g, of_d = updates(g, d, opt_g, opt_d, real, noise)
        loss_d, grads_d, new_d, new_opt_d = of_d
        mon_g, report_g = mon_g.measure(loss_g, grads_g, g, new_g, opt_g, new_opt_g)
        mon_d, report_d = mon_d.measure(loss_d, grads_d, d, new_d, opt_d, new_opt_d)
        return (new_g, new_d, new_opt_g, new_opt_d), mon_g, mon_d, (report_g, report_d)

    state = reference = (g, d, tx_g.init(g), tx_d.init(d))
    mon_g, mon_d = pj.Monitor.create(tx=tx_g, params=g), pj.Monitor.create(tx=tx_d, params=d)
    with pj.Recorder(tmp_path / "generator") as of_g, pj.Recorder(tmp_path / "discriminator") as of_d:
        for step in range(3):
            wanted = gan_losses(reference[0], reference[1], real[step], noise[step])
            reference = alone(*reference, real[step], noise[step])
            state, mon_g, mon_d, reports = monitored(*state, mon_g, mon_d, real[step], noise[step])
            of_g.record(reports[0])
            of_d.record(reports[1])
            jax.tree.map(np.testing.assert_array_equal, state, reference)
            for report, loss in zip(reports, wanted, strict=True):
                assert report.scalars()["loss/mean"] == pytest.approx(float(loss), rel=1e-5)
    runs = {name: pj.open_run(tmp_path / name) for name in ("generator", "discriminator")}
    for name, lr in (("generator", 0.1), ("discriminator", 0.05)):
        steps, values, _ = runs[name].series("opt/learning_rate")
        assert steps.tolist() == [0, 1, 2]
        assert values.tolist() == pytest.approx([lr] * 3)
    assert "grad/clip_rate" in runs["discriminator"].names()
    assert "grad/clip_rate" not in runs["generator"].names()


def test_two_reports_of_a_step_in_one_recorder_are_refused_by_name(tmp_path):
    params = {"w": jnp.ones(2)}
    tx = optax.sgd(0.1)
    monitor, state = pj.Monitor.create(tx=tx, params=params), tx.init(params)
    _, report = monitor.measure(jnp.float32(1.0), params, params, params, state, state)
    recorder = pj.Recorder(tmp_path)
    recorder.record(report)
    recorder.record(report)
    recorder.close()
    assert recorder.health.refused == 1
    assert "a Recorder each" in recorder.health.last_error


def test_two_losses_and_two_backward_passes_of_one_model():
    """Their sum is what the optimizer gets, and what is measured."""
    params, tx = {"w": jnp.array([3.0, 4.0])}, pj.chain(rate(0.1))
    monitor, opt_state = pj.Monitor.create(tx=tx, params=params), tx.init(params)
    first, grads_1 = jax.value_and_grad(lambda p: jnp.sum(p["w"] ** 2))(params)
    second, grads_2 = jax.value_and_grad(lambda p: jnp.sum(p["w"]))(params)
    gradients = jax.tree.map(jnp.add, grads_1, grads_2)
    updates, later = tx.update(gradients, opt_state, params)
    new = optax.apply_updates(params, updates)
    _, report = monitor.measure(first + second, gradients, params, new, opt_state, later)
    found = report.scalars()
    assert found["loss/mean"] == 32.0
    assert found["grad/norm"] == pytest.approx(np.hypot(7, 9))
    assert found["update/norm"] == pytest.approx(0.1 * np.hypot(7, 9))


# ---- optimizers that want more than gradients


TAKEN = {
    "schedule-free": lambda: optax.contrib.schedule_free_adamw(1e-2, weight_decay=0.1),
    "transparent SAM": lambda: optax.contrib.sam(
        optax.sgd(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), sync_period=2
    ),
    "Polyak": lambda: optax.polyak_sgd(),
    "plateau": lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_optimizers_with_a_state_or_a_loss_of_their_own_train_as_without_probes(name):
    state = make(TAKEN[name]())
    tx, params, opt_state = optax.with_extra_args_support(TAKEN[name]()), copy(state.params), copy(state.opt_state)

    @jax.jit
    def plain_with_loss(params, opt_state, batch):
        (loss, _), gradients = jax.value_and_grad(plain_loss, has_aux=True)(params, batch, Tiny())
        extra = {} if name == "transparent SAM" else {"value": loss}  # which takes nothing more
        updates, opt_state = tx.update(gradients, opt_state, params, **extra)
        return optax.apply_updates(params, updates), opt_state

    for step in range(3):
        batch, old = make_batch(step), params
        state, report = pj.monitored_train_step(state, batch)
        params, opt_state = plain_with_loss(params, opt_state, batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), state.params, params)
        change = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), params, old)
        assert report.scalars()["update/norm"] == pytest.approx(norm64(*jax.tree.leaves(change)), rel=1e-3)


REFUSED = {
    "lookahead": (lambda: optax.lookahead(optax.sgd(0.1), 5, 0.5), r"tx cannot be called as .* pj.Monitor measures"),
    "opaque SAM": (
        lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=True),
        r"tx cannot be called as tx.update\(gradients, state, params, value=loss\).* pj.Monitor measures",
    ),
    "L-BFGS": (lambda: optax.lbfgs(), r"tx cannot be called as .* pj.Monitor measures"),
    "two in a dict": (lambda: {"g": optax.sgd(0.1), "d": optax.sgd(0.1)}, r"one optimizer.*optax\.partition.*Monitor"),
    "two in a tuple": (lambda: (optax.sgd(0.1), optax.adam(0.1)), r"one optimizer.*optax\.partition.*Monitor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_called_is_refused_at_construction(name):
    tx, match = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=match):
        make(tx())
