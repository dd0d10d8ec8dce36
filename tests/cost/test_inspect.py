"""What `pj.inspect` finds in programs compiled here."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import probes_jax as pj
from benchmarks.compiled import state_for
from probes_jax.cost.hlo import parse
from probes_jax.cost.inspection import ALWAYS, names_of
from probes_jax.cost.parts import parts_of
from probes_jax.cost.traffic import bytes_accessed, collectives
from probes_jax.spec.layout import HEADER
from tests.step.small import GROUPS, make_batch, make_state, only

PLAN = only("act", "param", "logits")  # one of the full program alone, two of both
SMALL = dict(layers=3, width=64, vocabulary=128, heads=2)


def abstract(plan=None, **sizes):
    return state_for(jax.devices(), 2, 1, 16, plan or pj.Plan(), **{**SMALL, **sizes})


@pytest.fixture(scope="module")
def described():
    """A state of the plan by default, and its batch."""
    return abstract()


@pytest.fixture(scope="module")
def found():
    state, batch = abstract(remat=False)
    return pj.inspect(state, batch)


@pytest.fixture(scope="module")
def reported():
    """A state, its batch, and the report of its first step."""
    batch = make_batch()
    state = make_state(plan=PLAN, batch=batch, donate=False)
    _, report = pj.monitored_train_step(state, batch)
    return state, batch, report


def test_everything_at_once_costs_two_collectives():
    state, batch = abstract(pj.Plan.diagnose())
    whole = pj.inspect(state, batch, by=None, programs=("full",))
    assert (whole.added("full").collectives, whole.added("full").looped) == (2, 0)


@pytest.mark.slow
def test_two_collectives_more_and_none_in_a_loop(found):
    for program in ("light", "full"):
        assert found.added(program).collectives == 2, program
        assert found.added(program).looped == 0, program
        assert not [each for each in found.exchanges(program) if each.looped]
    assert found.programs["off"].cost.looped > 0  # the model's own: the count sees loops


@pytest.mark.slow
def test_every_family_costs_what_the_program_costs_with_it(found):
    full = found.parts["full"]
    assert set(full) == {"act", "grad_act", "grad", "param", "update", "logits", ALWAYS}
    assert set(found.parts["light"]) == {"param", "logits", ALWAYS}
    assert all(cost.payload > 0 and cost.series > 0 for cost in full.values())
    header = 4 * HEADER  # of the report, which each program has
    assert sum(cost.payload for cost in full.values()) == pytest.approx(found.added("full").payload, abs=header)
    assert found.average() == pytest.approx((99 * found.ratio("light") + found.ratio("full")) / 100)
    assert f"memory traffic {found.average():+.2%}" in str(found)
    assert found.ratio("full") > 0 and found.ratio("light") > 0


def test_the_payload_and_the_series_are_those_of_a_report(reported):
    state, batch, report = reported
    seen = pj.inspect(state, batch, programs=("full",), by=None)
    cost = seen.programs["full"].cost
    assert cost.payload == report.buffer.nbytes
    assert cost.series == len(report.readings()[0].names)
    assert seen.programs["off"].cost.payload == 0
    assert seen.added("full").collectives == 0


def test_points_by_name():
    batch = make_batch()
    state = make_state(plan=PLAN, batch=batch)
    seen = pj.inspect(state, batch, programs=("full",), by="point", points="^head$")
    assert list(seen.parts["full"]) == ["head"]
    assert seen.parts["full"]["head"].series > 0
    with pytest.raises(ValueError, match="no observed point; there are"):
        pj.inspect(state, batch, programs=("full",), by="point", points="nothing")


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_points_of_layers_are_written_as_a_plan_has_them(scan):
    state, batch = abstract(scan=scan)
    stack, plan, names = "blocks" if scan else "block", state.settings.plan, names_of(state, batch, "full")
    every = set(parts_of("point", plan, names, ""))
    layers = {point for point in every if point.startswith(f"{stack}[*]/")}
    assert layers and layers < every
    for written in (f"{stack}[*]/", f"{stack}[0..2]/", rf"{stack}\[\*\]/", f"^{stack}/"):
        assert set(parts_of("point", plan, names, written)) == layers, written
    with pytest.raises(ValueError, match="no observed point"):  # the layers of a point are one part
        parts_of("point", plan, names, f"{stack}[1]/")


def test_each_program_is_said_before_it_is_compiled_unless_nobody_wants_to_know(caplog):
    batch = make_batch()
    state = make_state(plan=PLAN, batch=batch)
    pj.inspect(state, batch, programs=("light",))
    assert [record.getMessage() for record in caplog.records if record.name == "probes_jax.inspect"] == [
        f"inspect compiles program {number} of 5: {what}"
        for number, what in enumerate(
            (
                "off",
                "light",
                "light without param",
                "light without logits",
                "light with nothing but what is always measured",
            ),
            1,
        )
    ]
    caplog.clear()
    pj.inspect(state, batch, programs=("light",), by=None, progress=False)
    assert "inspect compiles" not in caplog.text


@pytest.mark.parametrize("unrolled", [False, True], ids=["scanned", "unrolled"])
def test_a_point_of_a_stack_is_left_out_in_all_layers(unrolled):
    state, batch = abstract(scan=not unrolled)
    names = names_of(state, batch, "full")
    ((point, plan),) = parts_of("point", state.settings.plan, names, "query").items()
    assert point == ("block[*]/query" if unrolled else "blocks[*]/query")
    less = dataclasses.replace(state, settings=dataclasses.replace(state.settings, plan=plan))
    gone = set(names) - set(names_of(less, batch, "full"))
    query = {name for name in names if "/query/" in name and name.startswith(("act/", "grad_act/"))}
    assert len(query) == 2 * SMALL["layers"]
    assert gone == query


def test_what_a_plan_leaves_out_is_not_measured():
    batch = make_batch()
    state = make_state(batch=batch, plan=pj.Plan(groups=GROUPS, without=("act", "grad", "param", "update", "logits")))
    _, report = pj.monitored_train_step(state, batch)
    names = set(report.scalars())
    assert {"loss/mean", "grad/norm", "update/norm"} <= names
    assert any(name.startswith("grad_act/") for name in names)
    assert not [name for name in names if name.startswith(("act/", "param/", "logits/", "update/head", "grad/head"))]
    assert dict(report.coverage.missing)["logits"] == "left out by Plan without"
    assert pj.Plan(without=("grad_act",)).backward is False
    with pytest.raises(ValueError, match="can do without"):
        pj.Plan(without=("loss",))


def test_an_abstract_state_is_the_real_one_without_its_arrays():
    batch = make_batch(batch=16)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    batch = {key: jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))) for key, x in batch.items()}

    def rule(path, shape):
        return PartitionSpec(None, "model") if len(shape) == 2 and shape[1] % 2 == 0 else PartitionSpec()

    real = make_state(plan=PLAN, batch=batch, shardings=rule)
    described = make_state(
        plan=PLAN,
        batch=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), batch),
        shardings=rule,
        abstract=True,
    )
    assert jax.tree.structure(real.core) == jax.tree.structure(described.core)
    for one, other in zip(jax.tree.leaves(real.core), jax.tree.leaves(described.core), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
        assert not isinstance(other, jax.Array)
    assert dataclasses.asdict(real.settings.partition) == dataclasses.asdict(described.settings.partition)


def test_an_abstract_state_does_not_train(described):
    state, batch = described
    with pytest.raises(ValueError, match=r"abstract=True.*pj\.inspect"):
        pj.monitored_train_step(state, batch)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"programs": ("off",)}, "programs must be"),
        ({"by": "probe"}, "by must be"),
        ({"programs": "full"}, "programs"),
        ({"progress": 1}, "progress must be True or False"),
    ],
)
def test_wrong_arguments_are_named(settings, message, described):
    state, batch = described
    with pytest.raises(ValueError, match=message):
        pj.inspect(state, batch, **settings)


def test_a_state_of_another_kind_is_refused():
    with pytest.raises(TypeError, match=r"pj\.TrainState"):
        pj.inspect({}, {})


def test_a_topology_that_is_none_is_refused():
    with pytest.raises(ValueError, match="v5e:16x16"):
        pj.topology("h100")
    with pytest.raises(ValueError, match="v5e:16x16"):
        pj.topology("foo:8")


def test_a_compiler_that_another_process_holds_is_said_so(monkeypatch):
    def locked(**_):
        raise RuntimeError("ABORTED: Internal error when accessing libtpu multi-process lockfile.")

    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", locked)
    with pytest.raises(RuntimeError, match="another process"):
        pj.topology("v5e:16x16")


@pytest.mark.parametrize("scale", [1, 4])
def test_bytes_agree_with_xla_where_there_is_no_loop(scale):
    def f(x, w):
        return jnp.tanh(x @ w).sum(axis=0), (x * 2.0).T

    shapes = jax.ShapeDtypeStruct((64 * scale, 128), jnp.float32), jax.ShapeDtypeStruct((128, 256), jnp.float32)
    compiled = jax.jit(f).lower(*shapes).compile()
    assert bytes_accessed(parse(compiled.as_text())) == pytest.approx(
        compiled.cost_analysis()["bytes accessed"], rel=0.15
    )


def test_bytes_of_a_scan_grow_with_its_length():
    def f(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    def cost(layers):
        shapes = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((layers, 64, 64), jnp.float32)
        return bytes_accessed(parse(jax.jit(f).lower(*shapes).compile().as_text()))

    assert cost(16) / cost(4) == pytest.approx(4.0, rel=0.1)


def test_collectives_in_a_compiled_loop_are_seen():
    mesh = Mesh(np.array(jax.devices()), ("data",))

    def f(x):
        return jax.lax.fori_loop(0, 5, lambda i, x: jnp.tanh(jax.lax.psum(x, "data")), x)

    run = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False))
    text = run.lower(jax.ShapeDtypeStruct((4,), jnp.float32)).compile().as_text()
    (found,) = collectives(parse(text))
    assert (found.op, found.looped, found.times) == ("all-reduce", True, 5)


def test_a_light_program_scans_no_tensor():
    """A marked point is measured in the full program and nowhere in the light one."""
    from probes_jax.step.train import compiled

    batch = make_batch()

    def loss_fn(model, batch, rngs):
        logits = pj.observe("marker", model(batch["tokens"]))
        return pj.Loss(nll=logits[..., 0] ** 2, logits=logits)

    state = make_state(loss_fn=loss_fn, plan=only("act", groups=()), batch=batch, donate=False)
    texts = {
        program: compiled(state.settings, program).lower(np.int32(0), state.core, batch).compile().as_text()
        for program in ("light", "full")
    }
    assert "summarize_moments" in texts["full"]
    assert "summarize_moments" not in texts["light"]


def test_a_preview_says_what_a_report_holds(reported):
    state, batch, report = reported
    seen = pj.preview(state, batch)
    assert seen.total("full").series == len(report.readings()[0].names)
    assert seen.total("full").payload + 4 * HEADER == report.buffer.nbytes
    act = [name for name in report.readings()[0].names if name.startswith("act/")]
    assert seen.families["full"]["act"].series == len(act) and "act" not in seen.families["light"]
    assert f"every {state.settings.plan.scan_every} steps" in str(seen)
    assert seen.stored == sum(count for _, count in report.coverage.stored) > len(act)
    assert f"{seen.stored} to the store only" in str(seen) and not seen.warnings
    with pytest.raises(TypeError, match=r"pj\.TrainState"):
        pj.preview({}, batch)


def test_looking_at_a_state_leaves_no_trace_in_it():
    batch = make_batch()
    state = make_state(plan=PLAN, batch=batch)
    pj.preview(state, batch)
    pj.inspect(state, batch, programs=("light",), by="point", points="^head$")
    assert not state.settings.programs  # by these a step knows that it is the first, where processes are compared


@pytest.mark.parametrize("points", ["[", 3])
def test_a_pattern_that_is_none_is_refused(points):
    batch = make_batch()
    with pytest.raises(ValueError, match="points"):
        pj.inspect(make_state(plan=PLAN, batch=batch), batch, by="point", points=points)


def test_axes_that_the_plan_names_are_cut_as_those_that_are_found():
    state, batch = abstract(only("param", "logits", groups=(), feature_axes=("model",), token_axes=("data",)))
    seen = pj.inspect(state, batch, programs=("light",), by=None)
    assert seen.added("light").collectives == 2
    assert "in a loop" not in str(seen)
