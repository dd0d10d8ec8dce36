"""Loss rows against float64 NumPy, on eight shards."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from probes_jax.signals.loss import measure_extra, measure_loss, measure_scalar_loss, name_loss
from probes_jax.stats.partial import WHOLE, Split
from tests.stats.reference import finalized

SPLIT = Split.of((("data",),), {"data": 4})


def example(seed=0):
    rng = np.random.default_rng(seed)
    nll = rng.uniform(0, 12, (8, 5)).astype(np.float32)
    weight = rng.choice([0.0, 0.5, 1.0], (8, 5)).astype(np.float32)
    weight[2:4] = 0.0  # one empty shard of four
    return nll, weight, rng.integers(-1, 3, (8, 5)).astype(np.int32)


@pytest.mark.parametrize("split", [WHOLE, SPLIT])
def test_rows(split):
    nll, weight, group = example()
    rows = measure_loss(jnp.asarray(nll), jnp.asarray(weight), jnp.asarray(group), ("a", "b"), split)
    exact, w = nll.astype(np.float64), weight.astype(np.float64)
    assert finalized(rows["loss"])[0][""] == pytest.approx((exact * w).sum() / w.sum())
    assert finalized(rows["tokens"])[0][""] == (weight > 0).sum()
    for index, (found, share) in enumerate(zip(finalized(rows["group"]), finalized(rows["share"]), strict=True)):
        of_group = w * ((group == index) if index < 2 else (group < 0) | (group > 1))
        assert found[""] == pytest.approx((exact * of_group).sum() / of_group.sum())
        assert share[""] == pytest.approx(of_group.sum() / w.sum())


def test_a_masked_value_has_no_say():
    """L043, L047: numerator and denominator are filtered alike, whatever the masked value is."""
    nll, weight, _ = example()
    nll[weight == 0] = np.nan
    rows = measure_loss(jnp.asarray(nll), jnp.asarray(weight), None, (), WHOLE)
    valid = weight > 0
    expected = (nll[valid].astype(np.float64) * weight[valid]).sum() / weight.sum()
    assert finalized(rows["loss"])[0][""] == pytest.approx(expected)


def test_a_nan_loss_shows():
    """L067: a NaN is never replaced by what the others say."""
    nll, weight, _ = example()
    nll[0, 0], weight[0, 0] = np.nan, 1.0
    rows = measure_loss(jnp.asarray(nll), jnp.asarray(weight), None, (), WHOLE)
    assert np.isnan(finalized(rows["loss"])[0][""])


def test_an_empty_part_is_absent_not_zero():
    rows = measure_loss(jnp.ones((2, 3)), jnp.zeros((2, 3)), jnp.zeros((2, 3), jnp.int32), ("a",), WHOLE)
    assert finalized(rows["loss"])[0][""] is None
    assert [found[""] for found in finalized(rows["group"])] == [None, None]
    assert finalized(rows["tokens"])[0][""] == 0


def test_shards_are_entries_of_their_own():
    nll, weight, group = example()
    rows = measure_loss(jnp.asarray(nll), jnp.asarray(weight), jnp.asarray(group), ("a", "b"), SPLIT)
    items = {item.entry.key: item for item in name_loss(rows, ("a", "b"))}
    assert items["loss/shard[0]"].entry.labels == tuple(f"loss/shard[{index}]" for index in range(4))
    assert items["loss/shard[0]"].gather
    assert items["loss/group/a/mean"].entry.labels[-1] == "loss/group/other/mean"


def test_scalars():
    assert finalized(measure_scalar_loss(jnp.float32(2.5))["loss"])[0][""] == 2.5
    parts = [measure_extra(jnp.float32(v), jnp.float32(w)) for v, w in ((2.0, 1.0), (5.0, 3.0), (jnp.nan, 0.0))]
    merged = parts[0].merge(parts[1]).merge(parts[2])
    assert finalized(merged)[0][""] == pytest.approx((2.0 + 15.0) / 4.0)
