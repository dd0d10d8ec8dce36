import math

import numpy as np
import pytest

from probes_jax.spec.summary import ABSENT_BITS, KINDS, Leaf, Reduce, decode_count
from tests.spec.packing import limbs


def _values(kind: str, **leaves) -> dict[str, float | None]:
    columns = KINDS[kind].finalize({name: np.asarray(leaf) for name, leaf in leaves.items()})
    assert tuple(columns) == KINDS[kind].stats
    return {stat: float(value[0]) if present[0] else None for stat, (value, present) in columns.items()}


def _magnitude(**changes):
    leaves = {
        "count": limbs(8),
        "zeros": limbs(2),
        "nan": limbs(0),
        "inf": limbs(0),
        "sum_sq": np.float32([32.0]),
        "sum_abs": np.float32([12.0]),
        "abs_max": np.float32([4.0]),
    }
    return _values("magnitude", **{**leaves, **changes})


def test_magnitude():
    assert _magnitude() == {
        "norm": math.sqrt(32.0),
        "mean_square": 4.0,
        "rms": 2.0,
        "abs_mean": 1.5,
        "abs_max": 4.0,
        "finite_abs_max": 4.0,
        "zero_fraction": 0.25,
        "nan_count": 0.0,
        "inf_count": 0.0,
    }


def test_the_maximum_is_nan_then_inf_then_itself_and_the_finite_one_stands_beside_it():
    found = _magnitude(inf=limbs(3))
    assert (found["abs_max"], found["finite_abs_max"], found["inf_count"]) == (math.inf, 4.0, 3.0)
    found = _magnitude(inf=limbs(3), nan=limbs(1))
    assert math.isnan(found["abs_max"])
    assert found["nan_count"] == 1.0
    found = _magnitude(nan=limbs(8), abs_max=np.float32([-np.inf]))
    assert found["finite_abs_max"] is None


def test_nothing_measured_is_absent():
    assert set(_magnitude(count=limbs(0), abs_max=np.float32([-np.inf])).values()) == {None}


def test_counts_decode_past_two_to_the_thirty_two():
    counts = [0, 255, 256, 2**24 + 1, 2**32 - 1, 2**40 + 3]
    np.testing.assert_array_equal(decode_count(limbs(*counts)), counts)
    summed = np.broadcast_to(limbs(2**24 + 1), (1000, 1, 4)).sum(axis=0)
    np.testing.assert_array_equal(decode_count(summed), [1000 * (2**24 + 1)])


def test_norm_of_nothing_is_zero_and_of_no_part_absent():
    assert _values("norm", parts=[1.0], sum_sq=[0.0]) == {"norm": 0.0}
    assert _values("norm", parts=[0.0], sum_sq=[0.0]) == {"norm": None}


def test_mean_is_a_ratio_of_sums():
    assert _values("mean", total=[14.0], weight=[9.0]) == {"": 14 / 9}
    assert _values("mean", total=[0.0], weight=[0.0]) == {"": None}
    assert math.isnan(_values("mean", total=[np.nan], weight=[3.0])[""])
    assert math.isnan(_values("mean", total=[1.0], weight=[np.nan])[""])


def test_a_tally_of_zero_is_a_measurement():
    assert _values("tally", count=limbs(0)) == {"": 0.0}
    assert _values("tally", count=limbs(2**33 + 1)) == {"": 2.0**33 + 1}


def test_copies_are_the_same_where_their_words_add_up_to_nothing():
    balanced = limbs(2**32, 5, 0, 3 * 2**32)
    columns = KINDS["copies"].finalize({"balance": balanced, "parts": np.float32([8, 8, 0, 8])})
    np.testing.assert_array_equal(columns["diverged"][0], [0.0, 1.0, 0.0, 0.0])
    np.testing.assert_array_equal(columns["diverged"][1], [True, True, False, True])


def test_extreme():
    nothing = {"nan": limbs(0), "inf": limbs(0), "abs_max": np.float32([-np.inf])}
    assert set(_values("extreme", **nothing).values()) == {None}
    found = _values("extreme", **{**nothing, "nan": limbs(2)})
    assert math.isnan(found["abs_max"])
    assert (found["nan_count"], found["finite_abs_max"]) == (2.0, None)
    assert _values("extreme", **{**nothing, "abs_max": np.float32([3.0])})["abs_max"] == 3.0


def test_a_scalar_may_be_absent_and_may_be_a_measured_nan():
    def bits(value):
        return np.float32([value]).view(np.uint32)

    assert _values("scalar", bits=bits(1.5)) == {"": 1.5}
    assert _values("scalar", bits=np.uint32([ABSENT_BITS])) == {"": None}
    assert math.isnan(_values("scalar", bits=bits(np.nan))[""])
    assert math.isnan(np.uint32(ABSENT_BITS).view(np.float32))


def test_a_counter_has_sixty_four_bits():
    assert _values("counter", words=np.uint32([[705_032_704, 1]])) == {"": 5e9}


def test_rows_are_finalized_each_on_its_own():
    columns = KINDS["norm"].finalize({"parts": np.ones(3), "sum_sq": np.float32([9.0, 16.0, 0.0])})
    np.testing.assert_array_equal(columns["norm"][0], [3.0, 4.0, 0.0])


@pytest.mark.parametrize("kind", KINDS)
def test_leaves_are_declared_once_and_only_raw_ones_are_integers(kind):
    leaves = KINDS[kind].leaves
    assert len({leaf.name for leaf in leaves}) == len(leaves)
    assert all(isinstance(leaf, Leaf) and isinstance(leaf.reduce, Reduce) for leaf in leaves)
