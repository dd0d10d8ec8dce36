"""The walk through a recorded run: on the command line, and among what was unusual."""

from __future__ import annotations

import numpy as np
import pytest

import probes_jax as pj
from probes_jax.present.cli import main
from probes_jax.present.unusual import find_unusual
from probes_jax.present.walk import jumps, read_points, scanned_steps, verdict, walk_run
from probes_jax.spec.plan import Plan
from tests.present.record import FakeRun

STEPS = [0, 100, 200, 300, 400]


def run_with(**changed):
    series = {"act/abs_max": (STEPS, [1.0] * 5), "grad_act/abs_max": (STEPS, [0.5, 0.4, 0.6, 0.5, 0.5])}
    for family in ("act", "grad_act"):
        for point in ("embed", "block[0]", "head"):
            series[f"{family}/{point}/abs_max"] = (STEPS, [0.5, 0.4, 0.6, 0.5, 0.5])
    return FakeRun(series | {name.replace("__", "/"): value for name, value in changed.items()})


def exploded(**more):
    changed = {
        "grad_act__abs_max": (STEPS, [0.5, 0.4, 0.6, 0.5, 80.0]),
        "grad_act__block[0]__abs_max": (STEPS, [0.5, 0.4, 0.6, 0.5, 20.0]),
        "grad_act__embed__abs_max": (STEPS, [0.5, 0.4, 0.6, 0.5, 80.0]),
    }
    return run_with(**changed | more)


def test_the_layer_where_an_explosion_began_is_among_what_was_unusual():
    found = [str(item) for item in find_unusual(exploded())]
    assert "grad_act/block[0]: 20, 40x its median, first in the chain at step 400" in found
    assert not [item for item in map(str, find_unusual(run_with())) if "grad_act" in item]


def spiking(at):
    return {"loss/spike/score": (range(500), [7.0 if step in at else 0.0 for step in range(500)])}


def test_a_single_layer_may_jump_where_the_worst_of_all_does_not():
    """The worst of all points is large anyway; the layer that jumps stays below it."""
    embed = (STEPS, [50.0, 40.0, 60.0, 50.0, 50.0])
    changed = {"grad_act__abs_max": embed, "grad_act__embed__abs_max": embed}
    changed |= {"grad_act__head__abs_max": (STEPS, [0.5, 0.4, 0.6, 0.5, 20.0])}
    line = "grad_act/head: 20, 40x its median, first in the chain"
    run = run_with(**changed)
    assert jumps(run) == [] and walk_run(run).lines() == [line]
    assert not [text for text in map(str, find_unusual(run)) if "head" in text], "nothing was wrong on that step"
    for spikes, told in (({350}, True), ({290, 350}, True), ({250}, False), ({450}, False)):
        found = [str(item) for item in find_unusual(run_with(**changed, **spiking(spikes)))]
        assert (f"{line} at step 400" in found) is told, spikes


def test_a_walk_that_says_nothing_says_why_and_where_to_look():
    def said(run, step=None):
        return verdict(run, walk_run(run, step), Plan())

    assert said(exploded()) == walk_run(exploded()).lines()
    assert said(run_with()) == ["Nothing jumps against its own history."]
    assert said(exploded(**spiking({390})), 300) == [
        "Nothing jumps against its own history.",
        "The scan at step 400 tells more: --step 400.",
    ]
    short = {name: ([0], [0.5]) for name in ("act/abs_max", "grad_act/abs_max", "act/head/abs_max")}
    spikes = {"loss/spike/score": (range(60), [7.0 if step > 40 else 0.0 for step in range(60)])}
    assert said(FakeRun(short)) == ["No layer has a history yet: no scan before step 0, and a median is taken of 3."]
    assert said(FakeRun(short | spikes))[1] == (
        "The trouble is at steps 41-59, after the last scan, at step 0: scan more often (Plan.scan_every)."
    )
    assert said(run_with(), 200)[0].startswith("No layer has a history yet: 2 scans before step 200")


def test_the_steps_of_a_run():
    run = exploded()
    assert scanned_steps(read_points(run)).tolist() == STEPS
    assert jumps(run) == [400]
    assert walk_run(run).step == 400
    assert walk_run(run, 300).suspect is None
    with pytest.raises(ValueError, match="not measured at step 399; the nearest step that did is 400"):
        walk_run(run, 399)
    with pytest.raises(ValueError, match="no scan of activations"):
        walk_run(FakeRun({"loss/mean": [1.0]}))


def test_a_scan_whose_layers_were_left_out_of_the_store_is_passed_over():
    """The recorder does so when it is over its budget; the worst of all layers is kept."""
    run = exploded(act__abs_max=([*STEPS, 500], [1.0] * 6), grad_act__abs_max=([*STEPS, 500], [0.5] * 5 + [80.0]))
    assert jumps(run) == [500]
    assert not [text for text in map(str, find_unusual(run)) if "in the chain" in text]
    assert walk_run(run).step == 400


def test_a_walk_begins_where_the_nan_of_the_last_scan_began():
    nan = float("nan")
    spoilt = run_with(act__abs_max=(STEPS, [nan, 1.0, 1.0, nan, nan]))
    assert walk_run(spoilt).step == 300  # at 400 the parameters are spoilt; that at 0 was another one
    assert walk_run(run_with(grad_act__abs_max=(STEPS, [0.5, 0.4, 0.6, 0.5, nan]))).step == 400
    assert walk_run(run_with(act__abs_max=(STEPS, [1.0, nan, 1.0, 1.0, 1.0]))).step == 400


def test_a_recorded_run_on_the_command_line(tmp_path, capsys):
    """A model whose second layer is blown up at the last step."""
    from tests.step.small import GROUPS, make_batch, make_state

    plan = pj.Plan(groups=GROUPS, scan_every=1)
    state = make_state(plan=plan)
    with pj.Recorder(tmp_path / "run", plan) as recorder:
        for step in range(6):
            batch = make_batch(step)
            if step == 5:
                state.params["block_1"]["down"]["kernel"] = state.params["block_1"]["down"]["kernel"] * 1e3
            state, report = pj.monitored_train_step(state, batch)
            recorder.record(report)
    assert main(["walk", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("grad_act/block[1]/up: "), "the verdict first"
    assert out[0].endswith("x its median, first in the chain")
    assert out[1:3] == ["", "Step 5, from the output inwards:"]
    assert out[3].startswith("  grad_act/output: ")
    points = [line.split(":")[0].removeprefix("  grad_act/") for line in out[3:]]
    assert points.index("block[1]") < points.index("block[1]/up") < points.index("block[0]") < points.index("embed")
    assert main(["walk", str(tmp_path / "run"), "--step", "77"]) == 1
    assert "nearest step that did is 5" in capsys.readouterr().err
    assert np.isfinite(report.scalars()["loss/mean"])
