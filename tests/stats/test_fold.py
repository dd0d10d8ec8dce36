import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from probes_jax.spec.summary import decode_count
from probes_jax.stats import fold as fold_module
from probes_jax.stats.fold import Fold, How, _block_shape, fold
from probes_jax.stats.moments import summarize_moments
from probes_jax.stats.partial import WHOLE, Split, cut
from tests.stats.reference import check, finalized

FOLDS = {
    "sum": Fold(How.SUM, jnp.square),
    "count": Fold(How.COUNT, lambda x: x > 0.5),
    "equal": Fold(How.COUNT, lambda x: x == 0.5),
    "max": Fold(How.MAX, lambda x: -x),
}


@pytest.fixture
def small_blocks(monkeypatch):
    """So that small tensors, too, take the loop."""
    monkeypatch.setattr(fold_module, "_SMALL", 1)
    monkeypatch.setattr(fold_module, "_BLOCK", 16)
    monkeypatch.setattr(fold_module, "_LEAST_BLOCK", 4)
    monkeypatch.setattr(fold_module, "_STEPS", 8)
    monkeypatch.setattr(fold_module, "_MANY", 16)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((64, 8), np.float32),
        ((4, 16, 8), ml_dtypes.bfloat16),
        ((96,), np.float32),
        ((40, 21), np.float32),  # whole rows of an odd length
        ((4, 8, 2, 3), np.float32),
        ((4096, 4), np.float32),  # two levels of loops
    ],
)
def test_every_form_gives_the_same_values(shape, dtype, small_blocks):
    x = np.random.default_rng(0).normal(size=shape).astype(dtype)
    x.reshape(-1)[::7] = 0.5
    block = _block_shape(shape)
    assert block is not None
    assert block[0] * np.prod(block[1]) == x.size
    plain = jax.jit(lambda x: fold_module._apart(cut(x, WHOLE), FOLDS))(x)
    others = {
        "loop": lambda x: fold_module._loop(cut(x, WHOLE), FOLDS, (), *block),
        "together": lambda x: fold_module._together(cut(x, WHOLE), FOLDS),
    }
    for form in others.values():
        found = jax.jit(form)(x)
        for name in ("count", "equal", "max"):
            np.testing.assert_array_equal(plain[name], found[name])
        np.testing.assert_allclose(plain["sum"], found["sum"], rtol=1e-6)


@pytest.mark.parametrize("dtypes", [(np.float32, np.float32), (np.float32, ml_dtypes.bfloat16)])
def test_two_arrays_in_one_pass(dtypes, small_blocks):
    rng = np.random.default_rng(0)
    x, y = (rng.integers(-2, 3, (64, 8)).astype(dtype) for dtype in dtypes)
    folds = {
        "sum": Fold(How.SUM, lambda x, y: x * y),
        "count": Fold(How.COUNT, lambda x, y: x > y),
        "equal": Fold(How.COUNT, lambda x, y: x == y),
        "max": Fold(How.MAX, lambda x, y: x - 2 * y),
    }
    split = Split((("data",),), (("data", 2),))
    parts, block = cut(x, split), _block_shape((32, 8))
    assert block is not None
    beside = (cut(y, split).array,)
    a, b = (z.astype(np.float64).reshape(2, -1) for z in (x, y))
    for found in (
        fold_module._apart(parts, folds, beside),
        fold_module._together(parts, folds, beside),
        fold_module._loop(parts, folds, beside, *block),
        fold(parts, folds, *beside),
    ):
        np.testing.assert_array_equal(found["sum"], (a * b).sum(axis=1))
        np.testing.assert_array_equal(found["max"], (a - 2 * b).max(axis=1))
        np.testing.assert_array_equal(decode_count(found["count"]), (a > b).sum(axis=1))
        np.testing.assert_array_equal(decode_count(found["equal"]), (a == b).sum(axis=1))


def test_more_elements_than_a_float_counts_are_counted_in_words(monkeypatch):
    monkeypatch.setattr(fold_module, "FLOAT_ONES", 8)
    x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    found = fold_module._together(cut(x, WHOLE), FOLDS)["count"]
    assert float(found[0] + 256 * found[1]) == (x > 0.5).sum()


@pytest.mark.parametrize(
    ("inner", "want"),
    [
        ((), None),
        ((65_535,), None),  # small
        ((2048, 1024), (128, (16, 1024))),
        ((8, 256, 1024), (128, (16, 1024))),
        ((1024, 16, 128), (128, (8, 16, 128))),
        ((2**21,), (128, (16_384,))),
        ((2**16 + 1, 512), None),  # so many blocks that two counts might not fit one word
        ((40, 50_257), (40, (50_257,))),  # an odd vocabulary: whole rows
        ((2, 50_257), None),  # too few rows
        ((1_000_003,), None),  # a prime length cannot be split
        ((1001, 4095), (1001, (4095,))),
    ],
)
def test_the_block_keeps_the_last_axes_whole(inner, want):
    assert _block_shape(inner) == want


def _lowered(platform: str) -> str:
    x = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    return jax.jit(lambda x: fold(cut(x, WHOLE), FOLDS)).trace(x).lower(lowering_platforms=(platform,)).as_text()


def test_the_form_is_chosen_for_the_platform_that_is_compiled_for():
    assert "stablehlo.while" in _lowered("cpu")
    for platform, reductions in (("tpu", len(FOLDS)), ("cuda", 1)):  # from this machine, which has neither
        text = _lowered(platform)
        assert "stablehlo.while" not in text
        assert text.count("stablehlo.reduce") == reductions


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_two_counts_in_one_word_do_not_run_into_each_other(value, small_blocks):
    x = np.full((2**16 - 1, 4), value, np.float32)  # as many blocks as the word of a pair of counts has room for
    both = {"count": FOLDS["count"], "equal": FOLDS["equal"]}
    x[17, 2] = 0.5
    steps, block = _block_shape(x.shape) or pytest.fail("the loop was not taken")
    assert (steps, block) == (2**16 - 1, (4,))
    found = jax.jit(lambda x: fold_module._loop(cut(x, WHOLE), both, (), steps, block))(x)
    assert decode_count(np.asarray(found["count"])) == np.sum(x > 0.5)
    assert decode_count(np.asarray(found["equal"])) == np.sum(x == 0.5)


@pytest.mark.optimized
def test_a_bfloat16_tensor_is_not_widened_as_a_whole():
    """XLA would convert all of it before the loop, for twice its size in memory and most of the time."""
    x = jax.ShapeDtypeStruct((2048, 1024), jnp.bfloat16)
    program = jax.jit(lambda x: fold(cut(x, WHOLE), FOLDS)).lower(x).compile()
    assert program.memory_analysis().temp_size_in_bytes < 2048 * 1024


def test_an_equal_tensor_of_a_million_elements_sums_without_a_drift():
    x = np.full((1024, 1024), 0.1, np.float32)
    found = jax.jit(lambda x: fold(cut(x, WHOLE), {"sum": Fold(How.SUM, jnp.abs)}))(x)["sum"]
    assert float(found) == pytest.approx(x.astype(np.float64).sum(), rel=1e-5)


def test_the_loop_works_under_every_transformation(small_blocks):
    x = np.random.default_rng(1).normal(size=(3, 32, 8)).astype(np.float32) + 2.0

    def measure(x):
        return summarize_moments(x).leaves

    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
        alone = [jax.jit(measure)(row) for row in x]
        alone = jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone)
        in_scan = jax.jit(lambda x: jax.lax.scan(lambda c, row: (c, measure(row)), 0, x)[1])(x)
        in_vmap = jax.jit(jax.vmap(measure))(x)

        def layer(c, row):
            y = jnp.tanh(c * row)
            return jnp.sum(y), measure(y)

        def loss(c):
            c, found = jax.lax.scan(jax.checkpoint(layer), c, jnp.asarray(x))
            return c, found

        gradient, found = jax.jit(jax.grad(loss, has_aux=True))(jnp.float32(0.5))
        plain_gradient = jax.jit(jax.grad(lambda c: jax.lax.scan(lambda c, r: (jnp.sum(jnp.tanh(c * r)), 0), c, x)[0]))(
            jnp.float32(0.5)
        )
    for other in (in_scan, in_vmap):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), alone, other)
    assert found["max"].shape == (3,)
    np.testing.assert_allclose(gradient, plain_gradient, rtol=1e-6)


def test_the_loop_works_inside_shard_map(small_blocks):
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:8]), ("data",))
    spec = jax.sharding.PartitionSpec("data")
    x = np.random.default_rng(2).normal(size=(64, 16)).astype(np.float32)

    def local(x):
        leaves = summarize_moments(x).leaves
        return {name: leaf[None] for name, leaf in leaves.items()}

    rows = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))(x)
    cut_rows = jax.jit(lambda x: summarize_moments(x, Split.of((("data",),), mesh.shape)).leaves)(x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4), rows, cut_rows)


def test_a_whole_tensor_by_the_loop(small_blocks):
    x = (100.0 + np.random.default_rng(3).normal(size=(64, 16))).astype(np.float32)
    x[3, 4], x[5, 6] = 0.0, -1e3
    check(finalized(jax.jit(summarize_moments)(x))[0], x)
