"""`probes coverage`: what an engineer reads."""

from __future__ import annotations

import json

import pytest

import probes_jax as pj
from probes_jax.host.store_sink import StoreSink
from probes_jax.present.cli import main
from probes_jax.present.coverage import as_markdown, find_coverage
from probes_jax.spec.coverage import Coverage, SeenPoint
from probes_jax.spec.readings import decoder_of
from tests.host.recorder_fakes import FULL, LIGHT, buffer_of

BLOCKS = tuple(SeenPoint(f"block[{i}]/mlp", "feed_forward", "MLP", reported=True, gradient=True) for i in range(12))
LOST = tuple(SeenPoint(f"block[{i}]/attn", "attention_output", "Attention") for i in range(12))
WHY = tuple((f"block[{i}]/attn", "lost in a transform; use nn.scan") for i in range(12))
RATE = ("opt/learning_rate", "build the optimizer with pj.chain")
SEEN, UNSEEN = Coverage((*BLOCKS, *LOST), (*WHY, RATE)), Coverage((), (RATE,))


class Fake:
    """A run that has only this."""

    def __init__(self, *entries):
        self._entries = [
            {"attempt": attempt, "program": program, "layout": "", "coverage": coverage}
            for attempt, program, coverage in entries
        ]

    def coverage(self):
        return self._entries

    def damaged(self):
        return []


def recorded(path, *programs):
    sink = StoreSink(path)
    for step, (layout, coverage) in enumerate(programs):
        sink.describe(layout, coverage)
        sink.write(decoder_of(layout).decode(buffer_of(step, layout)))
    sink.close()
    return str(path)


def test_the_table_and_what_is_missing(tmp_path, capsys):
    assert main(["coverage", recorded(tmp_path / "run", (FULL, SEEN), (LIGHT, UNSEEN))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "attempt 1: 12 of 24 observed points reported, 12 of them with their gradient"
    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert rows["block[0..11]/mlp"][1:] == ["12", "feed_forward", "MLP", "there", "and", "back"]
    assert rows["block[0..11]/attn"][-1] == "missing"
    assert lines[-2:] == [
        "  missing block[0..11]/attn: lost in a transform; use nn.scan",
        "  missing opt/learning_rate: build the optimizer with pj.chain",
    ]


def test_json_has_every_point_by_itself(tmp_path, capsys):
    assert main(["coverage", "--json", recorded(tmp_path / "run", (FULL, SEEN), (LIGHT, UNSEEN))]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["attempt"], found["programs"], found["seen"], found["reported"]) == (1, ["full", "light"], 24, 12)
    assert [point["name"] for point in found["points"]] == list(SEEN.seen)
    assert [item["name"] for item in found["missing"]] == [name for name, _ in (*WHY, RATE)]


def test_markdown(tmp_path, capsys):
    assert main(["coverage", "--markdown", recorded(tmp_path / "run", (FULL, SEEN))]) == 0
    out = capsys.readouterr().out
    assert out == as_markdown(SEEN)
    assert "| `block[0..11]/mlp` | 12 | `feed_forward` | MLP |  |  | there and back |" in out.splitlines()


def test_a_run_that_has_not_scanned_yet_says_so_by_name(tmp_path, capsys):
    assert main(["coverage", recorded(tmp_path / "run", (LIGHT, UNSEEN))]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("Only the light program has reported so far: activations are observed by the full program")
    assert out[1] == "  missing opt/learning_rate: build the optimizer with pj.chain" and len(out) == 2


def test_a_run_without_the_table_says_so(tmp_path, capsys):
    sink = StoreSink(tmp_path)
    sink.write(decoder_of(FULL).decode(buffer_of(0, FULL)))
    sink.close()
    assert main(["coverage", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("probes coverage: the run does not say what was seen") and error.count("\n") == 1
    assert main(["coverage", str(tmp_path / "nothing")]) == 1


def test_attempts():
    other = Coverage(BLOCKS)
    found = find_coverage(Fake((1, "full", SEEN), (2, "full", other), (3, "light", UNSEEN)))
    assert (found.attempt, found.coverage.points) == (2, BLOCKS)
    assert found.notes == (
        "Attempt 3 has not observed activations: this is what attempt 2 saw.",
        "Attempt 1 saw other points: 12 of 24 reported.",
    )
    assert find_coverage(Fake((1, "full", SEEN), (2, "full", SEEN))).notes == ()
    (note,) = find_coverage(Fake((1, "full", UNSEEN), (1, "light", UNSEEN))).notes
    assert note.startswith("No program of this run observes activations")


def test_a_trained_model_on_the_command_line(tmp_path, capsys):
    from tests.step.small import GROUPS, make_batch, make_state

    plan = pj.Plan(groups=GROUPS, scan_every=1)
    state = make_state(plan=plan)
    with pj.Recorder(tmp_path / "run", plan) as recorder:
        state, report = pj.monitored_train_step(state, make_batch())
        recorder.record(report)
    points = {point.name: point for point in report.coverage.points}
    assert set(points) == set(report.coverage.reported) and "block[1]/up" in points
    assert (points["embed"].role, points["embed"].class_name, points["embed"].shape) == (
        "embedding",
        "Embed",
        (8, 6, 8),
    )
    assert not any(point.layers or point.through for point in points.values())
    assert all(point.gradient != name.endswith(".input") for name, point in points.items())
    assert main(["coverage", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert Coverage.from_json(found) == report.coverage
    assert main(["coverage", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "block[0..1]/up" in out and out.endswith("Nothing is missing.\n")


@pytest.mark.parametrize("arguments", [["coverage"], ["coverage", "RUN", "--json", "--markdown"]])
def test_wrong_use(arguments):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
