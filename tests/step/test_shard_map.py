"""A step under the user's own `shard_map` or `pmap`: one record of the whole, with the values of one device."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import probes_jax as pj
from tests.step.small import GROUPS, VOCAB, loss_fn, make_batch, make_sgd, make_state, norm64, plain_loss


class Small(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, 4, name="embed")(tokens)
        return nn.Dense(VOCAB, name="head")(nn.tanh(x) + nn.Embed(tokens.shape[-1], 4, name="place")(jnp.arange(6)))


PLAN = pj.Plan(groups=GROUPS, scan_every=2)
TX = make_sgd()
FORMS = ["shard_map", "unchecked", "pmap"]
AXIS = ("data",)


def mesh_of(size):
    return Mesh(np.array(jax.devices()[:size]), AXIS)


def under(form, size, step, states, cut=()):
    """`step(*states, batch)` under a form of per-device code: `states` replicated, the batch cut on axis 0.

    Gives a function of (states, batch) that returns the new states and the last output, the same on all devices.
    """
    if form == "jit":
        return jax.jit(lambda states, batch: step(*states, batch))
    if form == "pmap":
        lead = functools.partial(jax.tree.map, lambda x: np.broadcast_to(x, (size, *np.shape(x))))
        split = functools.partial(jax.tree.map, lambda x: x.reshape(size, -1, *x.shape[1:]))
        run = jax.pmap(lambda states, batch: step(*states, batch), axis_name="data", out_axes=None)
        return lambda states, batch: run(lead(states), split(batch))
    specs = tuple(cut[index] if index < len(cut) else P() for index in range(states))
    run = jax.shard_map(
        lambda states, batch: step(*states, batch),
        mesh=mesh_of(size),
        in_specs=(specs, P("data")),
        out_specs=(*specs, P()),
        check_vma=form == "shard_map",
    )
    return jax.jit(run)


@pytest.mark.parametrize("averaged", [True, False])
@pytest.mark.parametrize("form", ["jit", *FORMS])
def test_the_mean_of_0_1_2_3_is_one_record_of_1_5_in_every_form(form, averaged):
    """Case L009: one record per step on any mesh, and a replicated value counts once."""
    size = 1 if form == "jit" else 4
    mean = (lambda x: x) if form == "jit" else functools.partial(jax.lax.pmean, axis_name="data")
    params = {"w": jnp.float32(1.0)}
    axis_names = () if form == "jit" else AXIS
    monitor = pj.Monitor.create(tx=TX, params=params, axis_names=axis_names)

    def step(params, opt_state, monitor, x):
        def objective(params):
            mine = jnp.mean(params["w"] * x)
            return mean(mine), mine

        (loss, mine), gradients = jax.value_and_grad(objective, has_aux=True)(params)
        gradients = mean(gradients)
        updates, later = TX.update(gradients, opt_state, params)
        new = optax.apply_updates(params, updates)
        given = loss if averaged else mine
        return new, later, *monitor.measure(given, gradients, params, new, opt_state, later)

    run = under(form, size, step, 3)
    *_, monitor, report = run((params, TX.init(params), monitor), jnp.arange(4.0))
    readings = report.readings()
    assert [r.step for r in readings] == [0]
    found = readings[0].scalars()
    assert found["loss/mean"] == 1.5
    assert found["grad/norm"] == 1.5
    assert found["param/norm"] == 1.0
    assert found["update/norm"] == pytest.approx(0.05)  # clipped to 0.5, times 0.1
    assert int(monitor.state.guard.attempted) == 1


@pytest.fixture(scope="module")
def alone():
    """Parameters before and after two steps of plain optax, and what a monitor on one device says of them."""
    model, batch = Small(), make_batch()
    params = jax.tree.map(np.array, model.init(jax.random.key(0), batch["tokens"])["params"])  # on no device yet
    monitor = pj.Monitor.create(tx=TX, params=params, plan=PLAN, model=model, loss_fn=loss_fn, batch=batch)

    @jax.jit
    def plain(params, opt_state, batch):
        gradients, _ = jax.grad(plain_loss, has_aux=True)(params, batch, model)
        updates, opt_state = TX.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    state, reference = (params, TX.init(params), monitor), (params, TX.init(params))
    found, trained = [], []
    for seed in range(2):
        batch = make_batch(seed, batch=16)
        *state, report = jax.jit(trained_step(scan=seed == 0))(*state, batch)
        reference = plain(*reference, batch)
        found.append(report.scalars())
        trained.append(reference[0])
    return params, trained, found


def compare(found, wanted, leave_out=()):
    assert {n for n in found if not n.startswith("loss/shard")} == {n for n in wanted if not n.startswith("loss/shard")}
    for name, value in wanted.items():
        if not name.startswith(("loss/shard", "loss/worst", *leave_out)):
            assert found[name] == pytest.approx(value, rel=3e-4, abs=1e-5), name


def trained_step(scan, microbatches=1, tx=TX):
    def step(params, opt_state, monitor, batch):
        (_, seen), gradients = monitor.value_and_grad(
            params, batch, jax.random.key(0), scan=scan, microbatches=microbatches
        )
        updates, later = tx.update(gradients, opt_state, params)
        new = optax.apply_updates(params, updates)
        return new, later, *monitor.measure(seen, gradients, params, new, opt_state, later)

    return step


@pytest.mark.parametrize(("form", "microbatches"), [*((form, 1) for form in FORMS), ("shard_map", 2)])
def test_a_model_under_per_device_code_trains_and_reads_as_on_one_device(form, microbatches, alone):
    """Ragged masks: the loss and its gradient are those of all valid tokens, not a mean of the devices' means."""
    params, trained, wanted = alone
    size = 4
    example = make_batch(batch=16 // size if form == "pmap" else 16)
    monitor = pj.Monitor.create(
        tx=TX, params=params, plan=PLAN, model=Small(), loss_fn=loss_fn, batch=example, axis_names=AXIS
    )
    state = (params, TX.init(params), monitor)
    for seed in range(2 if microbatches == 1 and form != "unchecked" else 1):  # the second step is a light one
        run = under(form, size, trained_step(scan=seed == 0, microbatches=microbatches), 3)
        *state, report = run(tuple(state), make_batch(seed, batch=16))
        found = report.scalars()
        # What all devices hold alike gets its gradient from all: without types, or by microbatch, only a share is seen.
        whole = (form, microbatches) == ("shard_map", 1)
        compare(found, wanted[seed], () if whole else ("grad_act/place", "grad_act/abs_max", "grad_act/finite_abs_max"))
        assert [name for name in found if name.startswith("loss/shard")] == [f"loss/shard[{i}]" for i in range(size)]
        assert found["loss/worst_shard"] == max(found[f"loss/shard[{i}]"] for i in range(size))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), state[0], trained[seed])


@pytest.mark.parametrize("form", ["shard_map", "unchecked"])
def test_parameters_that_lie_in_shards_count_every_shard(form):
    """Fully sharded by hand: gathered for the loss, gradients scattered back; replicated ones count once."""
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(8, 3)).astype(np.float32), "b": rng.normal(size=(3,)).astype(np.float32)}
    batch = rng.normal(size=(16, 8)).astype(np.float32)
    cut = {"w": P("data"), "b": P()}
    mesh = mesh_of(4)
    held = {name: jax.device_put(x, NamedSharding(mesh, cut[name])) for name, x in params.items()}
    tx = optax.sgd(0.1, momentum=0.9)
    opt_state = tx.init(params)
    placed = jax.tree.map(lambda x: P("data") if x.ndim == 2 else P(), opt_state)
    monitor = pj.Monitor.create(tx=tx, params=held, axis_names=AXIS)

    def step(params, opt_state, monitor, x):
        def objective(params):
            w = jax.lax.all_gather(params["w"], "data", tiled=True)
            return jnp.mean((x @ w + params["b"]) ** 2) / (1 if form == "unchecked" else 4)

        loss, gradients = jax.value_and_grad(objective)(params)
        if form == "unchecked":
            gradients = {"w": gradients["w"] / 4, "b": jax.lax.pmean(gradients["b"], "data")}
        else:
            loss = loss * 4
        updates, later = tx.update(gradients, opt_state, params)
        new = optax.apply_updates(params, updates)
        return new, later, *monitor.measure(loss, gradients, params, new, opt_state, later)

    run = under(form, 4, step, 3, cut=(cut, placed))
    new, _, _, report = run((held, opt_state, monitor), batch)
    found = report.scalars()

    def plain(params):
        return jnp.mean((batch @ params["w"] + params["b"]) ** 2)

    loss, gradients = jax.value_and_grad(plain)(params)
    assert found["loss/mean"] == pytest.approx(float(loss), rel=1e-5)
    for name in params:
        np.testing.assert_allclose(new[name], params[name] - 0.1 * gradients[name], rtol=1e-5, atol=1e-6)
        assert found[f"param/{name}/norm"] == pytest.approx(norm64(params[name]), rel=1e-5)
        assert found[f"grad/{name}/norm"] == pytest.approx(norm64(gradients[name]), rel=1e-5)
        assert found[f"update/{name}/norm"] == pytest.approx(0.1 * norm64(gradients[name]), rel=1e-4)
    assert found["grad/norm"] == pytest.approx(norm64(*gradients.values()), rel=1e-5)
    assert found["param/norm"] == pytest.approx(norm64(*params.values()), rel=1e-5)


def test_an_update_outside_of_shard_map_needs_nothing(alone):
    """The loss and its gradient per device, the optimizer and the monitor outside: an ordinary sharded step."""
    params, trained, wanted = alone
    monitor = pj.Monitor.create(tx=TX, params=params, plan=PLAN)
    batch = make_batch(0, batch=16)

    def local(params, batch):
        def objective(params):
            logits = Small().apply({"params": params}, batch["tokens"])
            nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            total, weight = (jax.lax.psum(x.sum(), "data") for x in (nll * batch["mask"], batch["mask"]))
            return total / weight

        return jax.value_and_grad(objective)(params)

    inside = jax.shard_map(local, mesh=mesh_of(4), in_specs=(P(), P("data")), out_specs=P())

    @jax.jit
    def step(params, opt_state, monitor, batch):
        loss, gradients = inside(params, batch)
        updates, later = TX.update(gradients, opt_state, params)
        new = optax.apply_updates(params, updates)
        return new, *monitor.measure(loss, gradients, params, new, opt_state, later)

    new, _, report = step(params, TX.init(params), monitor, batch)
    families = ("grad/", "param/", "update/", "loss/mean", "opt/")
    found = {name: x for name, x in report.scalars().items() if name.startswith(families)}
    compare(found, {name: x for name, x in wanted[0].items() if name.startswith(families)})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), new, trained[0])


def test_a_nan_on_one_device_shows():
    params = {"w": jnp.float32(1.0)}
    monitor = pj.Monitor.create(tx=TX, params=params, axis_names=AXIS)

    def step(monitor, x):
        loss = jnp.mean(x)
        gradients = {"w": jax.lax.pmean(loss, "data")}
        return monitor.measure(loss, gradients, params, params, TX.init(params), TX.init(params))

    _, report = under("shard_map", 4, step, 1)((monitor,), jnp.array([0.0, 1.0, np.nan, 3.0]))
    assert np.isnan(report.scalars()["loss/mean"])
    assert report.scalars()["alert/nonfinite_steps"] == 1


def test_one_reduction_of_each_kind():
    """Beside the user's own mean of the gradients: one psum and one pmax, whatever is measured."""
    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
    monitor = pj.Monitor.create(tx=TX, params=params, axis_names=AXIS, plan=pj.Plan(scan_every=1))

    def step(monitor, x):
        return monitor.measure(jnp.mean(x), params, params, params, TX.init(params), TX.init(params))

    text = under("shard_map", 4, step, 1).lower((monitor,), jnp.arange(4.0)).compile().as_text()
    assert text.count(" all-reduce(") + text.count(" all-reduce-start(") <= 4  # two in each branch of the cond


# ---- refused, with what to do


def in_shard_map(function, *args, form="shard_map"):
    return under(form, 2, lambda *states: (*states[:-1], function(*states)), len(args))(args, jnp.arange(2.0))


@pytest.mark.parametrize("form", FORMS)
def test_the_monitored_step_is_not_called_inside(form):
    state = make_state(donate=False)
    with pytest.raises(ValueError, match=r"inside of shard_map or pmap over \('data',\).*call it outside"):
        in_shard_map(lambda state, x: pj.monitored_train_step(state, make_batch())[1], state, form=form)


@pytest.mark.parametrize("form", FORMS)
def test_a_monitor_is_told_its_axes(form):
    params = {"w": jnp.ones(2)}
    told, untold = (pj.Monitor.create(tx=TX, params=params, axis_names=axes) for axes in (AXIS, ()))
    opt_state = TX.init(params)

    def measure(monitor, x):
        return monitor.measure(jnp.sum(x), params, params, params, opt_state, opt_state)[1]

    with pytest.raises(ValueError, match=r"pj.Monitor.create\(axis_names=\('data',\)"):
        in_shard_map(measure, untold, form=form)
    with pytest.raises(ValueError, match="axis_names=.*is called outside of shard_map and pmap"):
        measure(told, jnp.float32(1.0))


def test_axes_that_do_not_exist_are_refused():
    params = {"w": jax.device_put(jnp.ones(2), NamedSharding(mesh_of(2), P()))}
    with pytest.raises(ValueError, match="axis_names names the mesh axis 'dta'"):
        pj.Monitor.create(tx=TX, params=params, axis_names=("dta",))
    with pytest.raises(ValueError, match="not among axis_names"):
        pj.Monitor.create(tx=TX, params=params, axis_names=AXIS, plan=pj.Plan(token_axes=("model",)))
    with pytest.raises(ValueError, match="must be a tuple of names"):
        pj.Monitor.create(tx=TX, params=params, axis_names="data")


def test_gradients_that_differ_between_devices_are_refused():
    """A norm of device 0 alone, or of all of them side by side, would be no norm of any gradient that is applied."""
    params = {"w": jnp.float32(1.0)}
    monitor = pj.Monitor.create(tx=TX, params=params, axis_names=AXIS)

    def measure(monitor, x):
        return monitor.measure(jnp.sum(x), {"w": jnp.sum(x)}, params, params, TX.init(params), TX.init(params))[1]

    with pytest.raises(
        ValueError, match=r"gradient of w differs over the mesh axis 'data'.*pmean\(gradients, 'data'\)"
    ):
        in_shard_map(measure, monitor)


class Stacked(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, 4, name="embed")(tokens)
        layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return nn.Dense(VOCAB, name="head")(layers(name="layers")(x, None)[0])


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(4, name="dense")(x), None


def test_a_stack_of_layers_that_is_cut_is_refused():
    """Every device would name its layers from 0."""
    model, batch = Stacked(), make_batch()
    params = jax.tree.map(np.array, model.init(jax.random.key(0), batch["tokens"])["params"])
    made = dict(tx=TX, params=params, plan=PLAN, model=model, loss_fn=loss_fn, batch=batch, axis_names=AXIS)
    monitor = pj.Monitor.create(**made)
    specs = {**jax.tree.map(lambda _: P(), params), "layers": jax.tree.map(lambda _: P("data"), params["layers"])}

    def step(params, monitor, x):
        return params, *monitor.measure(jnp.sum(x), params, params, params, TX.init(params), TX.init(params))

    with pytest.raises(
        ValueError, match="layers/dense/bias stacks 2 layers, of which this device holds 1; call measure"
    ):
        under("shard_map", 2, step, 2, cut=(specs,))((params, monitor), jnp.arange(2.0))


def test_off_is_the_plain_step(alone, monkeypatch):
    monkeypatch.setenv("PROBES_JAX", "off")
    params, trained, _ = alone
    monitor = pj.Monitor.create(
        tx=TX, params=params, plan=PLAN, model=Small(), loss_fn=loss_fn, batch=make_batch(batch=16), axis_names=AXIS
    )
    run = under("shard_map", 4, trained_step(scan=True), 3)
    new, *_, report = run((params, TX.init(params), monitor), make_batch(0, batch=16))
    assert report.scalars() == {}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), new, trained[0])
