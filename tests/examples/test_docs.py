"""The code in README and docs: it is Python, the public names and arguments in it exist, and the loops run as shown."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import runpy
import sys
import textwrap

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import probes_jax as pj
from tests.contracts.source import ROOT
from tests.step.small import Model, loss_fn, make_batch, make_state, make_tx, plain_loss

PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "metrics.md")]
FENCED = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?:(?<=\n\n)|\A)(?: {4}.*\n|\n(?= {4}))+")
GROUPS = ("code", "docs", "law")


def fenced(page):
    return FENCED.findall((ROOT / page).read_text("utf-8"))


def parsed(page):
    """Every block that is Python, as a tree: those fenced as such must be."""
    text = page.read_text("utf-8")
    trees = [ast.parse(block) for block in FENCED.findall(text)]
    for block in INDENTED.findall(re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)):
        try:
            trees.append(ast.parse(textwrap.dedent(block)))
        except SyntaxError:  # a table, a command, a tree of folders
            continue
    return trees


def public(node):
    """The object behind `pj.Name` or `pj.Name.part`; None for any other expression."""
    if isinstance(node, ast.Name) and node.id == "pj":
        return pj
    owner = public(node.value) if isinstance(node, ast.Attribute) else None
    return None if owner is None else getattr(owner, node.attr)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_public_names_and_arguments_in_the_docs_exist(page):
    for node in itertools.chain.from_iterable(ast.walk(tree) for tree in parsed(page)):
        called = public(node.func) if isinstance(node, ast.Call) else public(node)
        if called is None or not isinstance(node, ast.Call):
            continue
        known = inspect.signature(called).parameters
        for keyword in node.keywords:
            assert keyword.arg in known, f"{page.name}: {ast.unparse(node.func)} takes no {keyword.arg}="


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_block_of_code_ends_with_an_empty_line(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert not re.search(r"^ {4,}\S.*\n {1,3}[A-Z]", text, re.MULTILINE)


def context(**more):
    """What the pages leave to the reader."""
    params = Model().init(jax.random.key(0), make_batch()["tokens"])["params"]
    tx = make_tx()
    common = {"jax": jax, "optax": optax, "pj": pj, "functools": functools, "tx": tx, "loss_fn": loss_fn, "steps": 3}
    mine = {"params": params, "opt_state": tx.init(params), "module": Model(), "key": jax.random.key(0)}
    return common | mine | {"example": make_batch(), "batches": map(make_batch, itertools.count())} | more


def run(code, names, folder, monkeypatch):
    monkeypatch.chdir(folder)
    exec(compile(code, "<docs>", "exec"), names)
    return names


def test_the_loop_of_the_readme_runs(tmp_path, monkeypatch):
    (code,) = fenced("README.md")
    names = {"TransformerLM": lambda config: Model(), "config": None, "schedule": 1e-3, "key": jax.random.key(0)}
    run(code, names | {"batches": [make_batch(0), make_batch(1)], "example": make_batch()}, tmp_path, monkeypatch)
    found = pj.open_run(tmp_path / "runs" / "demo")
    assert found.series("loss/group/docs/mean")[0].tolist() == [0, 1]


def test_the_loop_that_observes_runs(tmp_path, monkeypatch):
    names = run(fenced("docs/own_loop.md")[0], context(), tmp_path, monkeypatch)
    found = pj.open_run(tmp_path / "runs" / "own_loop")
    assert found.series("loss/group/code/mean")[0].tolist() == [0, 1, 2]
    assert names["report"].readings()[0].step == 2
    assert found.series("act/abs_max")[0].tolist() == [0]


def indented(page, word):
    """The one indented block with a word in it."""
    (code,) = [block for block in INDENTED.findall((ROOT / page).read_text("utf-8")) if word in block]
    return textwrap.dedent(code)


def test_the_lines_for_the_terminal_and_for_an_evaluation_run(tmp_path, monkeypatch, capsys):
    names = context(plan=pj.Plan(groups=GROUPS), batches=[make_batch(0), make_batch(1)], steps=2)
    names["state"] = make_state(plan=names["plan"])
    run(indented("docs/guide.md", "pj.LiveSignals"), names, tmp_path, monkeypatch)
    said = capsys.readouterr().out
    assert "step 2/2  loss/mean" in said and "First screen, step 1" in said and "What was unusual" in said
    names |= {"loss": 2.0, "held_out": [make_batch(2)], "module": type("", (), {"apply": evaluated})}
    run(indented("docs/guide.md", "module.apply("), names, tmp_path, monkeypatch)
    run(indented("docs/guide.md", "writer.flush()"), names, tmp_path, monkeypatch)
    assert names["logits"][0].shape == (8, 6, 16) and list((tmp_path / "runs/demo/evaluation").iterdir())


def evaluated(variables, tokens, train):
    assert not train
    return Model().apply(variables, tokens)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(16, 8, name="embed")(tokens)
        return nn.Dense(16, name="head")(nn.BatchNorm(use_running_average=False, name="norm")(x))


def test_the_lines_for_batch_statistics_run(tmp_path, monkeypatch):
    variables = Normed().init(jax.random.key(0), make_batch()["tokens"])
    names = context(
        variables=variables, params=variables["params"], module=Normed(), batch=make_batch(), scan=True,
        plan=pj.Plan(groups=GROUPS),
    )  # fmt: skip
    names = run(fenced("docs/own_loop.md")[1], names, tmp_path, monkeypatch)
    before, after = variables["batch_stats"]["norm"]["var"], names["model_state"]["batch_stats"]["norm"]["var"]
    assert not jnp.array_equal(before, after)


def test_the_lines_for_shard_map_run(tmp_path, monkeypatch):
    names = context(P=PartitionSpec, batch=make_batch(), plan=pj.Plan(groups=GROUPS))
    names["mesh"] = Mesh(np.array(jax.devices()[:4]), ("data",))
    names = run(fenced("docs/own_loop.md")[2], names, tmp_path, monkeypatch)
    assert names["report"].scalars()["data/tokens"] == make_batch()["mask"].sum()


@pytest.mark.optimized
def test_the_diff_for_shard_map_is_two_steps_that_train_alike():
    """The lines before and after, put together and run."""
    blocks = re.findall(
        r"^```diff\n(.*?)^```$", (ROOT / "docs/own_loop.md").read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    (diff,) = [block for block in blocks if "shard_map" in block]
    found = []
    for sign in "-+":
        code = "\n".join(line[1:] for line in diff.splitlines() if line[:1] in (" ", sign) and line != " ...")
        names = context(P=PartitionSpec, local_loss=lambda params, batch: plain_loss(params, batch)[0])
        names["mesh"] = Mesh(np.array(jax.devices()[:4]), ("data",))
        exec(compile(code, "<docs>", "exec"), names)
        state = [names["params"], names["opt_state"], *([names["monitor"]] if sign == "+" else [])]
        found.append(names["train_step"](*jax.tree.map(np.asarray, state), make_batch()))
    (before, _, loss), (after, _, _, report) = found
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert report.scalars()["loss/mean"] == pytest.approx(float(loss))


def test_the_lines_for_several_optimizers_run(tmp_path, monkeypatch):
    blocks = fenced("docs/own_loop.md")
    names = run(blocks[3], context(), tmp_path, monkeypatch)
    made = make_state(tx=names["tx"])
    assert "grad/clip_rate" not in made.settings.missing
    pair = {"g": {"w": jnp.ones(2)}, "d": {"w": jnp.ones(2)}, "tx_g": optax.sgd(0.1), "tx_d": optax.sgd(0.2)}
    pair |= {"opt_g": pair["tx_g"].init(pair["g"]), "opt_d": pair["tx_d"].init(pair["d"]), "batches": range(2)}
    for name in ("generator_loss", "discriminator_loss"):
        pair[name] = lambda mine, other, batch: jnp.sum(mine["w"] * other["w"])
    run(blocks[4], context(**pair), tmp_path, monkeypatch)
    for name, size in (("generator", 0.1), ("discriminator", 0.2)):
        steps, values, _ = pj.open_run(tmp_path / "runs" / "gan" / name).series("update/norm")
        assert steps.tolist() == [0, 1] and values[0] == pytest.approx(size * 2**0.5)


def test_the_lines_for_a_population_run(tmp_path, monkeypatch):
    names = context(dataclasses=dataclasses, jnp=jnp, batch=make_batch(), loss_fn=ungrouped)
    names = run(fenced("docs/own_loop.md")[5], names, tmp_path, monkeypatch)
    losses = [report.scalars()["loss/mean"] for report in names["of_seed"]]
    assert len(set(losses)) == 3


def ungrouped(model, batch, rngs):
    return dataclasses.replace(loss_fn(model, batch, rngs), group=None)


@pytest.fixture
def script(tmp_path, monkeypatch, capsys):
    """Runs an example as a script, in a folder of its own; what it said."""

    def call(name, *arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(ROOT / "examples")
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    return call


def test_the_classifier_of_images_learns(tmp_path, script):
    said = script("vision.py", "60")
    assert "nat/example" in said and "loss/group/noisy/mean" in said
    steps, loss, _ = pj.open_run(tmp_path / "runs" / "vision").series("loss/group/clean/mean")
    assert steps.size == 60 and loss[-1] < loss[0] - 1.0
    assert pj.open_run(tmp_path / "runs" / "vision").series("data/tokens")[1].tolist() == [64.0] * 60


@pytest.mark.timeout(400)
def test_the_smallest_script_runs_and_shows_its_signals(tmp_path, script):
    said = script("minimal.py")
    assert "step 300/300" in said and "First screen, step 299" in said
    steps, loss, _ = pj.open_run(tmp_path / "runs" / "minimal").series("loss/mean")
    assert steps.size == 300 and loss[-1] < loss[0] - 1.0
    assert len((ROOT / "examples" / "minimal.py").read_text("utf-8").splitlines()) <= 45
