"""Two programs, each traced and compiled once, whatever happens around them."""

from __future__ import annotations

import contextlib

import jax
import numpy as np
import optax
import pytest

import probes_jax as pj
from tests.step.small import make_batch, make_state, only

PLAN = only(scan_every=10)
PLAIN = pj.chain(("clip", optax.clip_by_global_norm(0.5)), ("lr", optax.scale_by_learning_rate(1e-2)))


@contextlib.contextmanager
def counting():
    """Counts backend compiles, not only traces: a cached trace can still compile again for other shardings."""
    compiles = []

    def listener(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            compiles.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield compiles
    finally:
        from jax._src import monitoring

        monitoring.unregister_event_duration_listener(listener)


def steps(state, count):
    batch = make_batch()
    report = None
    for _ in range(count):
        state, report = pj.monitored_train_step(state, batch)
    return state, report


@pytest.fixture(scope="module")
def warm():
    """A state whose two programs are compiled, after 11 steps; it can be stepped from again and again."""
    return steps(make_state(plan=PLAN, donate=False), 11)[0]


def test_no_compile_in_300_steps():
    """L001, L136: one compile per program, then none."""
    state, _ = steps(make_state(plan=PLAN), 11)
    with counting() as compiles:
        state, report = steps(state, 300)
        jax.block_until_ready(report.buffer)
    assert compiles == []
    assert int(state.step) == 311


def test_no_compile_after_a_resume(tmp_path, warm):
    """What `create` commits to devices is what a restore brings back."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", warm)
        checkpointer.wait_until_finished()
        resumed = checkpointer.restore(tmp_path / "saved", warm)
    assert int(resumed.step) == 11
    with counting() as compiles:
        resumed, report = steps(resumed, 12)
        jax.block_until_ready(report.buffer)
    assert compiles == []


def test_the_phase_survives_a_resume(warm):
    leaves, structure = jax.tree.flatten(warm)
    state = jax.tree.unflatten(structure, [np.array(x) for x in leaves])
    found = []
    for _ in range(12):
        state, report = steps(state, 1)
        found.append((report.readings()[0].step, report.layout.program))
    assert [step for step, program in found if program == "full"] == [20]


@pytest.mark.parametrize(
    "setting", [("jax_debug_nans", True), ("jax_numpy_dtype_promotion", "strict"), ("jax_enable_x64", True)]
)
def test_under_other_settings(setting):
    name, value = setting
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        # optax's own Adam does not run under strict promotion.
        state, report = steps(make_state(plan=PLAN, tx=PLAIN if value == "strict" else None), 2)
        with counting() as compiles:
            state, report = steps(state, 20)
            found = report.scalars()
        assert compiles == []
        assert np.isfinite(found["loss/mean"])
        assert found["data/tokens_total"] == 22 * found["data/tokens"]
    finally:
        jax.config.update(name, before)


def test_with_the_persistent_compilation_cache(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        first = steps(make_state(plan=PLAN), 3)[1].scalars()
        again = steps(make_state(plan=PLAN), 3)[1].scalars()
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
    assert first == again


def test_no_host_transfer_and_no_wait_in_the_loop(warm):
    """L078, L138: the step reads nothing back from the device."""
    state, batch = warm, jax.device_put(make_batch())
    with jax.transfer_guard("disallow"):
        for _ in range(12):
            state, _report = pj.monitored_train_step(state, batch)


def test_inside_an_outer_jit_and_scan():
    """Reports come stacked, in the layout of the full program; a light step has no tensor scan in it."""
    state = make_state(plan=only(scan_every=4), donate=False)
    batches = [make_batch(seed) for seed in range(6)]
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *batches)
    final, reports = jax.jit(lambda s, b: jax.lax.scan(pj.monitored_train_step, s, b))(state, stacked)
    loop, expected = state, []
    for batch in batches:
        loop, report = pj.monitored_train_step(loop, batch)
        expected.append(report.scalars())
    found = [reading.scalars() for reading in reports.readings()]
    assert [reading.step for reading in reports.readings()] == list(range(6))
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), name
    assert int(final.step) == 6
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), final.params, loop.params)


def test_wrong_state_is_refused():
    with pytest.raises(TypeError, match="state must be a pj.TrainState"):
        pj.monitored_train_step({"params": 1}, make_batch())


@pytest.mark.parametrize("batch", [{}, {"tokens": np.zeros((0, 4), np.int32)}])
def test_empty_batch_is_refused(batch, warm):
    with pytest.raises(ValueError, match="at least one example"):
        pj.monitored_train_step(warm, batch)
