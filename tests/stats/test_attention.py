"""Attention against float64, row by row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from probes_jax.stats import attention
from probes_jax.stats.attention import measure_attention


def reference(q, k, bias=None, mask=None, scale=None, causal=False):
    """(largest logit, entropy) of each query and head, in float64."""
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    k = np.repeat(k, q.shape[-2] // k.shape[-2], axis=-2)
    logits = np.einsum("...qhd,...khd->...hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    logits = logits + (0 if bias is None else np.asarray(bias, np.float64))
    seen = np.broadcast_to(True if mask is None else np.asarray(mask), logits.shape).copy()
    if causal:
        seen &= np.tril(np.ones(logits.shape[-2:], bool))
    logits = np.where(seen, logits, -np.inf)
    highest = logits.max(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        weight = np.exp(logits - highest[..., None])
        p = weight / weight.sum(-1, keepdims=True)
        entropy = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1)
    return np.moveaxis(highest, -1, -2), np.moveaxis(np.where(np.isneginf(highest), -np.inf, entropy), -1, -2)


def tensors(batch=(2,), length=12, keys=12, heads=4, groups=4, d=8):
    rng = np.random.default_rng(0)
    make = lambda *shape: rng.normal(size=shape).astype(np.float32) * 2  # noqa: E731
    return make(*batch, length, heads, d), make(*batch, keys, groups, d), rng


def check(q, k, **options):
    found = jax.jit(lambda q, k: measure_attention(q, k, **options))(jnp.asarray(q), jnp.asarray(k))
    options["causal"] = options.pop("is_causal", False)
    for index, want in enumerate(reference(q, k, **options)):
        np.testing.assert_allclose(found.values[..., index], want, rtol=2e-5, atol=2e-6)
    assert found.positions == q.ndim - 1


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_plain(batch):
    q, k, _ = tensors(batch)
    check(q, k)


def test_causal_masked_biased_scaled_and_with_fewer_heads_of_keys():
    q, k, rng = tensors(groups=2, keys=15)
    mask = rng.random((2, 1, 12, 15)) < 0.7
    mask[0, 0, 3] = False  # a query that sees nothing
    check(q, k, mask=mask, bias=rng.normal(size=(4, 12, 15)).astype(np.float32), scale=0.3)
    check(*tensors()[:2], is_causal=True)


def test_by_blocks_of_rows(monkeypatch):
    monkeypatch.setattr(attention, "_ROWS", 4)
    q, k, rng = tensors()
    check(q, k, is_causal=True, mask=rng.random((2, 1, 12, 12)) < 0.9, bias=rng.normal(size=(1, 1, 12)))


def test_known_answers():
    q, k, _ = tensors()
    np.testing.assert_allclose(measure_attention(0 * q, k).values[..., 1], np.log(12), rtol=1e-6)
    one = measure_attention(1e3 * q, k, is_causal=True).values
    np.testing.assert_allclose(one[:, 0, :, 1], 0.0, atol=1e-6)


def test_nan_shows():
    q, k, _ = tensors()
    q[0, 3] = np.nan
    assert np.isnan(measure_attention(jnp.asarray(q), jnp.asarray(k)).values[0, 3]).all()
