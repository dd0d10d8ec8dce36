import subprocess
import sys

import clu.metrics
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from probes_jax.stats.clu import as_clu_metric, collection_scalars
from tests.stats.reference import statistics

KINDS = ("moments", "magnitude", "norm", "extreme", "mean")


@flax.struct.dataclass
class Both(clu.metrics.Collection):
    hidden: as_clu_metric("moments").from_output("hidden")
    grad: as_clu_metric("magnitude").from_output("grad")


def _batches(sizes):
    rng = np.random.default_rng(0)
    return [{name: rng.normal(3.0, 1.0, (n, 4)).astype(np.float32) for name in ("hidden", "grad")} for n in sizes]


def _check(found: dict, x: np.ndarray):
    want = statistics(x)
    assert found
    for name, value in found.items():
        np.testing.assert_allclose(value, want[name], rtol=2e-5, err_msg=name)


def test_ragged_batches_merge_to_the_whole():
    batches = _batches([8, 8, 3, 1])
    collection = Both.empty()
    for batch in batches:
        collection = collection.merge(Both.single_from_model_output(**batch))
    found = collection.compute()
    for name in ("hidden", "grad"):
        _check(found[name], np.concatenate([batch[name] for batch in batches]))
    flat = collection_scalars(collection)
    assert flat["hidden/rms"] == found["hidden"]["rms"]


def test_gather_over_devices_gives_the_whole_on_each():
    batch = _batches([16])[0]
    parts = {name: x.reshape(8, 2, 4) for name, x in batch.items()}
    gathered = jax.pmap(lambda x: Both.gather_from_model_output(axis_name="batch", **x), axis_name="batch")(parts)
    for name in ("hidden", "grad"):
        _check(gathered.unreplicate().compute()[name], batch[name])


def test_a_step_under_jit_carries_the_collection():
    batches = _batches([4, 4])
    step = jax.jit(lambda collection, batch: collection.merge(Both.single_from_model_output(**batch)))
    collection = Both.empty()
    for batch in batches:
        collection = step(collection, batch)
    _check(collection.compute()["hidden"], np.concatenate([batch["hidden"] for batch in batches]))


@pytest.mark.parametrize("kind", KINDS)
def test_empty_is_neutral_and_absent(kind):
    metric = as_clu_metric(kind)
    nothing = metric.empty()
    some = metric.from_model_output(values=jnp.asarray([1.0, -2.0]))
    assert nothing.compute() == {}
    assert nothing.merge(some).compute() == some.merge(nothing).compute() == some.compute()
    assert jax.tree.structure(nothing) == jax.tree.structure(some)
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), m) for m in (nothing, some, some.merge(nothing))]
    assert shapes[0] == shapes[1] == shapes[2]


def test_one_class_a_kind():
    assert as_clu_metric("norm") is as_clu_metric("norm")
    with pytest.raises(ValueError, match="known kinds: moments"):
        as_clu_metric("median")


def _mean(parts, masks=None):
    metric = as_clu_metric("mean")
    total = metric.empty()
    for part, mask in zip(parts, masks or [None] * len(parts), strict=True):
        total = total.merge(metric.from_model_output(values=jnp.asarray(part), mask=mask))
    return total.compute().get("mean")


def test_l045_a_short_last_batch_weighs_what_it_holds():
    assert _mean([np.ones(8), np.zeros(2)]) == pytest.approx(0.8)


def test_l047_the_weight_is_the_denominator_and_padding_has_no_say():
    masks = [np.arange(10) < 1, np.ones(10, bool), np.zeros(10, bool)]
    parts = [np.where(masks[0], 1.0, np.nan), np.zeros(10), np.full(10, np.nan)]
    assert _mean(parts, masks) == pytest.approx(1 / 11)
    assert _mean(parts[2:], masks[2:]) is None


def test_weights_may_be_fractions_and_lead():
    values = np.asarray([[1.0, 3.0], [10.0, 10.0]])
    assert _mean([values], [np.asarray([1.0, 0.5])]) == pytest.approx((1 + 3 + 0.5 * 20) / 3)
    with pytest.raises(ValueError, match="leading part"):
        _mean([values], [np.ones(3)])


def test_l067_a_measured_nan_shows():
    assert np.isnan(_mean([[2.0], [np.nan], [2.0]]))


def test_counts_stay_exact_over_very_many_merges():
    metric = as_clu_metric("extreme")
    one = metric.from_model_output(values=jnp.full((255,), jnp.nan))
    steps = 70_000  # the lowest limb alone would pass 2^24
    total = jax.jit(lambda a, b: jax.lax.fori_loop(0, steps, lambda _, m: m.merge(b), a))(metric.empty(), one)
    assert total.compute()["nan_count"] == 255 * steps


def test_compute_under_jit_is_refused_with_the_way_out():
    metric = as_clu_metric("norm")
    with pytest.raises(RuntimeError, match="outside of jit"):
        jax.jit(lambda x: metric.from_model_output(values=x).compute())(jnp.ones(3))


def test_needs_no_tensorflow():
    code = "import sys, probes_jax.stats.clu; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
