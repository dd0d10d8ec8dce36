import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from probes_jax.stats import fold as fold_module
from probes_jax.stats.moments import summarize_extreme, summarize_magnitude, summarize_moments, summarize_norm
from probes_jax.stats.partial import WHOLE, Partial, Split, cut
from tests.stats.reference import check, finalized

SUMMARIZE = (summarize_moments, summarize_magnitude, summarize_norm, summarize_extreme)
COLLECTIVES = re.compile(r"= [^=]*\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?\(")


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.asarray(jax.devices()[:8]).reshape(4, 2), ("data", "model"))


def _all(x, split):
    return [summarize(x, split) for summarize in SUMMARIZE]


def _x(*shape, seed=0):
    x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    x.reshape(-1)[::11] = 0.0
    return x + 5.0


def _run(mesh, spec, x, split):
    """Summaries of a sharded `x`, and the collectives of the compiled program."""
    sharding = NamedSharding(mesh, spec)
    compiled = jax.jit(lambda x: _all(x, split), in_shardings=sharding).lower(x).compile()
    return compiled(jax.device_put(x, sharding)), COLLECTIVES.findall(compiled.as_text())


def test_cut_puts_one_axis_for_each_mesh_axis_first():
    x = np.arange(8 * 6 * 4).reshape(8, 6, 4)
    split = Split.of((("data",), (), ("model",)), {"data": 4, "model": 2})
    part = cut(jnp.asarray(x), split)
    assert part.axes == ("data", "model")
    assert part.array.shape == (4, 2, 2, 6, 2)
    assert part.part_size == 24
    for d in range(4):
        for m in range(2):
            np.testing.assert_array_equal(part.array[d, m], x[2 * d : 2 * d + 2, :, 2 * m : 2 * m + 2])


def test_two_axes_may_cut_one_dimension_major_first():
    x = np.arange(16)
    part = cut(jnp.asarray(x), Split.of((("data", "model"),), {"data": 4, "model": 2}))
    assert part.axes == ("data", "model")
    np.testing.assert_array_equal(part.array.reshape(8, 2), x.reshape(8, 2))


def test_a_dimension_that_is_not_divided_is_left_whole():
    split = Split.of((("data",), ("model",)), {"data": 4, "model": 2})
    assert cut(jnp.zeros((6, 4)), split).axes == ("model",)
    assert cut(jnp.zeros((6, 3)), split).axes == ()
    assert cut(jnp.zeros((0, 4)), split).axes == ("model",)
    assert cut(jnp.zeros(()), split) == Partial(cut(jnp.zeros(()), split).array, ())


def test_axes_of_size_one_cut_nothing():
    assert Split.of((("data",), ("model",)), {"data": 1, "model": 2}) == Split(((), ("model",)), (("model", 2),))


@pytest.mark.parametrize(("dims", "match"), [((("rows",),), "'rows'.*mesh has"), ((("data",), ("data",)), "twice")])
def test_a_wrong_axis_is_named(dims, match):
    with pytest.raises(ValueError, match=match):
        Split.of(dims, {"data": 4})


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize(
    ("spec", "shape"),
    [(P("data", "model"), (16, 12)), (P("data"), (8, 4, 6)), (P(("data", "model"), None), (16, 8))],
)
def test_a_right_guess_needs_no_collective_and_rows_are_the_local_values(mesh, spec, shape, loop, monkeypatch):
    if loop:
        for name, value in {"_SMALL": 1, "_BLOCK": 8, "_LEAST_BLOCK": 1}.items():
            monkeypatch.setattr(fold_module, name, value)
    x = _x(*shape)
    dims = tuple((axis,) if isinstance(axis, str) else tuple(axis or ()) for axis in spec)
    summaries, collectives = _run(mesh, spec, x, Split.of(dims, mesh.shape))
    assert collectives == []
    local = {}  # device -> its part
    for shard in jax.device_put(x, NamedSharding(mesh, spec)).addressable_shards:
        local[shard.device] = np.asarray(shard.data)
    for summary in summaries:
        check(finalized(summary)[0], x)
        leaf = summary.leaves[
            "sum_abs" if "sum_abs" in summary.leaves else "abs_max" if summary.kind == "extreme" else "sum_sq"
        ]
        reduce = {"extreme": lambda y: np.abs(y).max(), "norm": lambda y: np.sum(y.astype(np.float64) ** 2)}
        for shard in leaf.addressable_shards:
            want = reduce.get(summary.kind, lambda y: np.abs(y.astype(np.float64)).sum())(local[shard.device])
            np.testing.assert_allclose(np.asarray(shard.data).squeeze(), want, rtol=1e-5)


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize(
    "dims",
    [(), (("model",), ("data",)), (("data",), ()), ((), ("model",)), (("data", "model"), ())],
)
def test_a_wrong_guess_gives_the_right_numbers(mesh, dims, loop, monkeypatch):
    if loop:
        for name, value in {"_SMALL": 1, "_BLOCK": 8, "_LEAST_BLOCK": 1}.items():
            monkeypatch.setattr(fold_module, name, value)
    x = _x(16, 8)
    summaries, _ = _run(mesh, P("data", "model"), x, Split.of(dims, mesh.shape))
    for summary in summaries:
        check(finalized(summary)[0], x)


def test_rows_of_layers_are_stacked_before_the_rows_of_shards(mesh):
    x = _x(3, 16, 12)
    split = Split.of((("data",), ("model",)), mesh.shape)
    sharding = NamedSharding(mesh, P(None, "data", "model"))
    program = jax.jit(jax.vmap(functools.partial(_all, split=split)), in_shardings=sharding).lower(x).compile()
    assert COLLECTIVES.findall(program.as_text()) == []
    for summary in program(jax.device_put(x, sharding)):
        assert summary.stack_shape() == (3,)
        for layer, values in zip(x, finalized(summary), strict=True):
            check(values, layer)


def test_a_mean_far_from_zero_keeps_its_spread_across_shards(mesh):
    x = (1e4 + np.random.default_rng(7).normal(size=(64, 32))).astype(np.float32)
    summaries, _ = _run(mesh, P("data", "model"), x, Split.of((("data",), ("model",)), mesh.shape))
    assert finalized(summaries[0])[0]["std"] == pytest.approx(x.astype(np.float64).std(), rel=5e-3)


def test_a_nan_of_one_shard_shows_in_the_whole(mesh):
    x = _x(16, 8)
    x[13, 3] = np.nan
    x[2, 1] = np.inf
    summaries, _ = _run(mesh, P("data", "model"), x, Split.of((("data",), ("model",)), mesh.shape))
    for summary in summaries:
        check(finalized(summary)[0], x)


def test_l063_squared_norms_of_eight_devices_are_reduced_in_float32():
    mesh = Mesh(np.asarray(jax.devices()[:8]), ("data",))
    part = np.asarray([1.0, 2.0**-4.5], np.float32)  # squared norm 1 + 2^-9
    x = np.tile(part, 8)
    sharding = NamedSharding(mesh, P("data"))
    split = Split.of((("data",),), mesh.shape)
    summary = jax.jit(lambda x: summarize_norm(x, split), in_shardings=sharding)(jax.device_put(x, sharding))
    assert summary.leaves["sum_sq"].dtype == jnp.float32
    assert finalized(summary)[0]["norm"] == pytest.approx(2.8312, abs=5e-5)


def test_no_split_is_no_row():
    assert cut(jnp.zeros((4, 4)), WHOLE).axes == ()
