import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probes_jax.spec.summary import KINDS, Reduce
from probes_jax.stats.moments import summarize_extreme, summarize_magnitude, summarize_moments, summarize_norm
from probes_jax.stats.partial import Split
from probes_jax.stats.summary import Summary, is_summary, merge_all
from tests.stats.reference import check, finalized

SUMMARIZE = {
    "moments": summarize_moments,
    "magnitude": summarize_magnitude,
    "norm": summarize_norm,
    "extreme": summarize_extreme,
}
ROWS, COLUMNS = 24, 8
SPLITS = [
    Split.of(dims, {"data": 2, "model": 4}) for dims in ((), (("data",),), ((), ("model",)), (("data",), ("model",)))
]


def _summarize(x, split):
    return {kind: summarize(x, split) for kind, summarize in SUMMARIZE.items()}


_jitted = jax.jit(_summarize, static_argnums=1)


def _of_part(x: np.ndarray, split: Split) -> dict[str, Summary]:
    """Summaries of a part of any length, merged over its shards; the compiled shapes stay few."""
    out = {}
    for kind, summary in _jitted(x, split).items():
        for _ in range(len(summary.axes)):
            summary = Summary.of(summary.leaves, summary.kind).collapse(0)
        out[kind] = summary
    return out


@st.composite
def _tensors_and_cuts(draw):
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    scale = 10.0 ** draw(st.integers(-3, 3))
    mean = draw(st.sampled_from([0.0, 1.0, 100.0])) * scale
    x = (mean + scale * rng.normal(size=(ROWS, COLUMNS))).astype(np.float32)
    for value in draw(st.lists(st.sampled_from([0.0, np.nan, np.inf, -np.inf]), max_size=2)):
        x[rng.integers(ROWS), rng.integers(COLUMNS)] = value
    # Parts of 2, 4, 8 or 16 rows: few shapes to compile, still ragged.
    lengths = draw(st.lists(st.sampled_from([2, 4, 8, 16]), min_size=1, max_size=8).filter(lambda n: sum(n) <= ROWS))
    rest = ROWS - sum(lengths)
    while rest:
        lengths.append(next(size for size in (16, 8, 4, 2) if size <= rest))
        rest -= lengths[-1]
    splits = [draw(st.sampled_from(SPLITS)) for _ in lengths]
    order = draw(st.permutations(range(len(lengths))))
    return x, lengths, splits, order


@given(_tensors_and_cuts())
@settings(max_examples=15, deadline=None)
def test_any_split_in_any_order_gives_the_value_of_the_whole(case):
    x, lengths, splits, order = case
    edges = np.cumsum([0, *lengths])
    parts = [_of_part(x[a:b], split) for (a, b), split in zip(itertools.pairwise(edges), splits, strict=True)]
    for kind in SUMMARIZE:
        merged = merge_all(parts[index][kind] for index in order)
        # The mean may be 100 times the deviation: the squares then cancel to 1e-4 of themselves.
        check(finalized(merged)[0], x, rtol=2e-5)


@pytest.mark.parametrize("lengths", [(64, 64, 64), (191, 1), (1, 2, 64, 125), (100, 92)])
def test_a_mean_far_from_zero_keeps_its_spread_over_ragged_parts(lengths):
    x = (1e4 + np.random.default_rng(0).normal(size=sum(lengths))).astype(np.float32)
    x[: lengths[0]] += 0.5  # part means differ, by half a deviation
    edges = np.cumsum([0, *lengths])
    parts = [_jitted(x[a:b], SPLITS[0])["moments"] for a, b in itertools.pairwise(edges)]
    values = finalized(merge_all(parts))[0]
    assert values["std"] == pytest.approx(x.astype(np.float64).std(), rel=5e-3)
    assert values["mean"] == pytest.approx(x.astype(np.float64).mean(), rel=1e-7)


def _example(kind: str, seed: int) -> Summary:
    rng = np.random.default_rng(seed)
    leaves = {}
    for leaf in KINDS[kind].leaves:
        shape = (3, leaf.width) if leaf.width else (3,)
        leaves[leaf.name] = rng.integers(0, 200, shape).astype(np.float32)  # integers: float sums are exact
    return Summary.of(leaves, kind)


MERGEABLE = [name for name, kind in KINDS.items() if all(leaf.reduce is not Reduce.RAW for leaf in kind.leaves)]


def _equal(a: Summary, b: Summary) -> None:
    assert (a.kind, a.axes) == (b.kind, b.axes)
    for name, leaf in a.leaves.items():
        np.testing.assert_array_equal(leaf, b.leaves[name])


@pytest.mark.parametrize("kind", MERGEABLE)
def test_merge_is_associative_commutative_and_has_an_identity(kind):
    a, b, c = (_example(kind, seed) for seed in range(3))
    _equal(a.merge(b).merge(c), a.merge(b.merge(c)))
    _equal(a.merge(b), b.merge(a))
    _equal(a.merge(a.identity()), a)
    _equal(a.identity().merge(a), a)


@pytest.mark.parametrize("kind", MERGEABLE)
def test_collapse_is_the_merge_of_the_stack(kind):
    a = _example(kind, 0)
    rows = [Summary.of({name: leaf[i] for name, leaf in a.leaves.items()}, kind) for i in range(3)]
    _equal(a.collapse(0), merge_all(rows))


@pytest.mark.parametrize("kind", MERGEABLE)
def test_a_stack_without_an_entry_is_the_summary_of_nothing(kind):
    a = _example(kind, 0)  # a stack of three
    nothing = jax.tree.map(lambda x: x[:0], a).collapse(0)
    one = jax.tree.map(lambda x: x[0], a)
    _equal(one.merge(nothing), one)


def test_unlike_summaries_do_not_merge():
    a = summarize_norm(jnp.ones((4, 2)))
    with pytest.raises(ValueError, match="cannot merge norm rows"):
        a.merge(summarize_extreme(jnp.ones((4, 2))))
    with pytest.raises(ValueError, match="data"):
        a.merge(summarize_norm(jnp.ones((4, 2)), Split.of((("data",),), {"data": 2})))


def test_a_summary_is_an_ordinary_pytree():
    summary = summarize_norm(jnp.ones((4, 2)))
    assert is_summary(summary)
    assert not is_summary(summary.leaves)
    leaves, structure = jax.tree.flatten(summary)
    assert jax.tree.unflatten(structure, leaves).kind == "norm"
    doubled = jax.jit(lambda s: s.merge(s))(summary)
    assert finalized(doubled)[0]["norm"] == pytest.approx(4.0)


def _mean(parts) -> float | None:
    merged = merge_all(Summary.of({"total": jnp.float32(t), "weight": jnp.float32(w)}, "mean") for t, w in parts)
    return finalized(merged)[0][""]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_l039_parts_of_unequal_weight(order):
    parts = [(2.0, 1.0), (12.0, 8.0)]
    assert _mean([parts[i] for i in order]) == pytest.approx(14 / 9)


@pytest.mark.parametrize("number", [8, 4])
def test_l041_the_number_of_microbatches_does_not_show(number):
    assert _mean([(2.0 * 5, 5.0)] * number) == pytest.approx(2.0)


def test_l045_a_short_last_batch():
    assert _mean([(8.0, 8.0), (0.0, 2.0)]) == pytest.approx(0.8)


def test_l047_a_batch_of_padding_alone_changes_nothing():
    parts = [(1.0, 1.0), (0.0, 10.0)]
    assert _mean(parts) == pytest.approx(1 / 11)
    assert _mean([*parts, (0.0, 0.0)]) == _mean(parts)
    assert _mean([(0.0, 0.0)]) is None


def test_l061_a_thousand_additions_to_a_running_state():
    one = jnp.ones((1,), ml_dtypes.bfloat16)
    first = summarize_moments(one)
    total = jax.jit(lambda a: jax.lax.fori_loop(0, 999, lambda _, s: s.merge(summarize_moments(one)), a))(first)
    values = finalized(total)[0]
    assert (values["mean"], values["abs_mean"], values["std"]) == (1.0, 1.0, 0.0)
    assert _mean([(1.0, 1.0)] * 1000) == 1.0


def test_l022_two_stages_are_one_norm_and_one_maximum():
    stages = [summarize_magnitude(jnp.asarray([value])) for value in (3.0, -4.0)]
    values = finalized(merge_all(stages))[0]
    assert (values["norm"], values["abs_max"]) == (5.0, 4.0)


def test_a_nan_weight_shows_as_nan_and_not_as_absent():
    assert np.isnan(_mean([(1.0, 1.0), (1.0, np.nan)]))
