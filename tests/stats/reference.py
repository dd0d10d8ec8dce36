"""The definitions of the Tensors section, in float64 NumPy, the slow and obvious way."""

from __future__ import annotations

import jax
import numpy as np

from probes_jax.spec.summary import KINDS
from probes_jax.stats.summary import Summary


def statistics(x) -> dict[str, float | None]:
    """Every statistic of `x` taken as one flat tensor; None where there is no measurement."""
    with np.errstate(over="ignore"):
        x = np.asarray(x).astype(np.float32).astype(np.float64).ravel()
    if x.size == 0:
        return dict.fromkeys(KINDS["moments"].stats + KINDS["magnitude"].stats) | {"norm": 0.0}
    finite = np.abs(x[np.isfinite(x)])
    with np.errstate(invalid="ignore", over="ignore"):
        mean_square = np.mean(x**2)
        return {
            "norm": np.sqrt(np.sum(x**2)),
            "mean_square": mean_square,
            "rms": np.sqrt(mean_square),
            "abs_mean": np.mean(np.abs(x)),
            "abs_max": np.max(np.abs(x)),  # NumPy's maximum is NaN where one element is
            "finite_abs_max": finite.max() if finite.size else None,
            "zero_fraction": np.mean(x == 0),
            "nan_count": np.isnan(x).sum(),
            "inf_count": np.isinf(x).sum(),
            "mean": np.mean(x),
            "std": np.std(x),
            "min": np.min(x),
            "max": np.max(x),
        }


def finalized(summary: Summary) -> list[dict[str, float | None]]:
    """Merged over row axes in NumPy, then finalized: one dict of statistics for each element of the stack."""
    summary = jax.device_get(summary)  # columns of NumPy arrays: a slice of a JAX array is a program of its own
    kind = KINDS[summary.kind]
    stack = summary.stack_shape()
    leaves = {}
    for leaf in kind.leaves:
        array = np.asarray(summary.leaves[leaf.name])
        rows = tuple(range(len(stack), len(stack) + len(summary.axes)))
        array = array.max(axis=rows) if leaf.reduce.value == "max" else array.sum(axis=rows)
        leaves[leaf.name] = array.reshape((-1, leaf.width) if leaf.width else (-1,))
    columns = kind.finalize(leaves)
    number = len(next(iter(columns.values()))[0])
    return [{s: float(v[i]) if seen[i] else None for s, (v, seen) in columns.items()} for i in range(number)]


def check(found: dict[str, float | None], x, *, rtol: float = 2e-6, skip: tuple[str, ...] = ()) -> None:
    """Every finalized statistic equals the definition. A cancellation may leave rounding of the largest element."""
    want = statistics(x)
    with np.errstate(over="ignore"):
        values = np.asarray(x).astype(np.float32).astype(np.float64)
    largest = np.max(np.abs(values[np.isfinite(values)]), initial=0.0)
    for name, value in found.items():
        if name in skip:
            continue
        if want[name] is None:
            assert value is None, (name, value)
            continue
        assert value is not None, name
        np.testing.assert_allclose(value, want[name], rtol=rtol, atol=rtol * largest * 0.1, err_msg=name)
