"""The state survives a save, and a checkpoint of another plan or version still restores."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import probes_jax as pj
from tests.step.small import Model, make_batch, make_state, only


@functools.cache
def fresh(**settings):
    """A state before its first step; what it is trained by, also restored, is compiled once."""
    model = Model(dropout=0.2) if settings.pop("dropout", False) else Model()
    return make_state(model, plan=only(**settings), donate=False)


def save_and_read(state, path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path, state), checkpointer.restore(path)


def train(state, seeds):
    reports = []
    for seed in seeds:
        state, report = pj.monitored_train_step(state, make_batch(seed))
        reports.append(report.scalars())
    return state, reports


def test_the_run_goes_on_as_if_nothing_happened(tmp_path):
    """L111: losses, norms and spike windows of steps 6 to 10 are those of the uninterrupted run."""
    start = fresh(window=8, min_history=3, dropout=True)
    _, whole = train(start, range(10))
    half, _ = train(start, range(5))
    targeted, raw = save_and_read(half, tmp_path / "saved")
    _, rest = train(targeted, range(5, 10))
    assert rest == whole[5:]
    for _ in range(2):  # what was read is copied: it can be restored twice
        _, rest = train(pj.restore_state(start, raw), range(5, 10))
        assert rest == whole[5:]


def test_another_window_starts_anew_and_says_so(tmp_path, caplog):
    half, _ = train(fresh(window=128, min_history=4), range(3))
    _, raw = save_and_read(half, tmp_path / "saved")
    resumed = pj.restore_state(fresh(window=64, min_history=4), raw)
    assert "monitor/window/values" in caplog.text
    assert resumed.monitor.window.values.shape == (3, 64)
    resumed, reports = train(resumed, [3])
    assert int(resumed.step) == 4
    assert reports[0]["data/tokens_total"] > reports[0]["data/tokens"]


def test_a_checkpoint_without_monitoring(tmp_path):
    """An older version, or a run that was not monitored: parameters are kept, monitoring starts from defaults."""
    half, _ = train(fresh(), range(3))
    _, raw = save_and_read(half, tmp_path / "saved")
    del raw["monitor"]["guard"], raw["monitor"]["learning_rate_multiplier"]
    resumed = pj.restore_state(fresh(), raw)
    jax.tree.map(np.testing.assert_array_equal, resumed.params, half.params)
    assert float(resumed.monitor.learning_rate_multiplier) == 1.0
    train(resumed, [3])


@pytest.mark.parametrize("total", [5, 2_150_000_000, 5_000_000_000])
def test_token_totals(total, tmp_path):
    """L065: 2.15 billion and 5 billion survive; an older single-word counter is read."""
    words = np.array([total & 0xFFFFFFFF, total >> 32], np.uint32)
    state = fresh()
    monitor = state.monitor._replace(tokens=jax.device_put(words, state.monitor.tokens.sharding))
    state = dataclasses.replace(state, monitor=monitor)
    targeted, raw = save_and_read(state, tmp_path / "saved")
    old = np.int64(total) if total > 2**31 else np.int32(total)
    raw["monitor"]["tokens"] = old
    for resumed in (targeted, pj.restore_state(fresh(), raw)):
        _, reports = train(resumed, [0])
        assert reports[0]["data/tokens_total"] == total + reports[0]["data/tokens"]


def test_a_missing_parameter_is_an_error(tmp_path):
    _, raw = save_and_read(fresh(), tmp_path / "saved")
    del raw["params"]["head"]
    with pytest.raises(ValueError, match="params/head"):
        pj.restore_state(fresh(), raw)


def test_no_empty_arrays_in_the_state():
    """L117: orbax refuses arrays without elements."""
    assert all(np.size(leaf) for leaf in jax.tree.leaves(fresh()))


def test_a_record_holds_its_own_step_only(tmp_path):
    """L049, L051: nothing of the step before, of the save or of a half-filled window is averaged in."""

    def loss_fn(model, batch, rngs):
        return pj.Loss(nll=batch["nll"] + 0.0 * model(batch["tokens"])[..., 0])

    def batch(value):
        return make_batch() | {"nll": np.full((8, 6), value, np.float32)}

    def create():
        return make_state(loss_fn=loss_fn, plan=only(groups=()), batch=batch(1.0), microbatches=2)

    state, report = pj.monitored_train_step(create(), batch(1.0))
    assert report.scalars()["loss/mean"] == 1.0
    resumed, _ = save_and_read(state, tmp_path / "saved")
    for value in (10.0, 20.0):
        resumed, report = pj.monitored_train_step(resumed, batch(value))
        assert report.scalars()["loss/mean"] == value


def test_the_state_says_which_batch_is_next(tmp_path):
    """L107: after a checkpoint behind batch 4 the next one is 5; none is repeated, and the record shows it."""
    state, _ = train(fresh(), range(5))
    resumed, _ = save_and_read(state, tmp_path / "saved")
    steps = []
    for index in range(int(resumed.step), 8):
        resumed, report = pj.monitored_train_step(resumed, make_batch(index))
        steps.append(report.readings()[0].step)
    assert steps == [5, 6, 7]


@pytest.mark.parametrize(("window", "clip_window"), [(64, 128), (256, 128), (128, 16)])
def test_a_window_of_another_length_begins_anew_as_a_whole(window, clip_window):
    """Half of it kept, its zeros would count as measurements: false spikes, and a guard that skips good updates."""
    state, _ = train(fresh(window=128, min_history=4), range(8))
    settings = {"window": window, **({} if clip_window == 128 else {"clip_window": clip_window})}
    resumed = pj.restore_state(fresh(**settings, min_history=4), state)
    changed = "loss/spike/score" if window != 128 else "grad/clip_rate"
    clipped = []
    for index in range(8, 14):
        resumed, report = pj.monitored_train_step(resumed, make_batch(index))
        found = report.scalars()
        clipped.append(found["grad/norm"] > 0.5)
        assert found.get("alert/co_spike", 0) == 0
        assert abs(found.get("loss/spike/score", 0)) < 50
        if changed == "loss/spike/score":
            assert ("loss/spike/score" in found) == (index >= 12)  # after four values of its own
        else:
            assert "loss/spike/score" in found  # the other window went on
            assert found["grad/clip_rate"] == pytest.approx(np.mean(clipped))
