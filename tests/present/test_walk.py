"""The walk through a recorded run: on the command line, and among what was unusual."""

from __future__ import annotations

import numpy as np
import pytest

import probes_jax as pj
from probes_jax.present.cli import main
from probes_jax.present.unusual import find_unusual
from probes_jax.present.walk import jumps, scanned_steps, walk_run
from tests.present.record import FakeRun

STEPS = [0, 100, 200, 300, 400]


def run_with(**changed):
    series = {"act/abs_max": (STEPS, [1.0] * 5), "grad_act/abs_max": (STEPS, [0.5, 0.4, 0.6, 0.5, 0.5])}
    for family in ("act", "grad_act"):
        for point in ("embed", "block[0]", "head"):
            series[f"{family}/{point}/abs_max"] = (STEPS, [0.5, 0.4, 0.6, 0.5, 0.5])
    return FakeRun(series | {name.replace("__", "/"): value for name, value in changed.items()})


def exploded():
    return run_with(
        **{
            "grad_act__abs_max": (STEPS, [0.5, 0.4, 0.6, 0.5, 80.0]),
            "grad_act__block[0]__abs_max": (STEPS, [0.5, 0.4, 0.6, 0.5, 20.0]),
            "grad_act__embed__abs_max": (STEPS, [0.5, 0.4, 0.6, 0.5, 80.0]),
        }
    )


def test_the_layer_where_an_explosion_began_is_among_what_was_unusual():
    found = [str(item) for item in find_unusual(exploded())]
    assert found[0] == "grad_act/block[0]: 20, 40x its median, first in the chain at step 400"
    assert not [item for item in map(str, find_unusual(run_with())) if "grad_act" in item]


def test_the_steps_of_a_run():
    run = exploded()
    assert scanned_steps(run).tolist() == STEPS
    assert jumps(run) == [400]
    assert walk_run(run).step == 400
    assert walk_run(run, 300).suspect is None
    with pytest.raises(ValueError, match="not measured at step 399; the nearest step that did is 400"):
        walk_run(run, 399)
    with pytest.raises(ValueError, match="no scan of activations"):
        walk_run(FakeRun({"loss/mean": [1.0]}))


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
    assert out[0] == "Step 5, from the output inwards:"
    assert out[1].startswith("  grad_act/output: ")
    points = [line.split(":")[0].removeprefix("  grad_act/") for line in out[1:-1]]
    assert points.index("block[1]") < points.index("block[1]/up") < points.index("block[0]") < points.index("embed")
    assert out[-1].startswith("grad_act/block[1]/up: ")
    assert out[-1].endswith("x its median, first in the chain")
    assert main(["walk", str(tmp_path / "run"), "--step", "77"]) == 1
    assert "nearest step that did is 5" in capsys.readouterr().err
    assert np.isfinite(report.scalars()["loss/mean"])
