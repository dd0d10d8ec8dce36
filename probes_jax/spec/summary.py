"""Kinds of summary: which leaves they carry, how each leaf reduces, how the merged leaves become metrics.

A summary is a handful of float32 numbers per tensor whose leaves reduce over microbatches, layers and shards by a
plain sum or a plain maximum. Nothing is divided before everything is merged: `finalize` runs once, in float64, on
fully merged leaves. So no average of averages can be written down.

Two encodings keep plain float32 sums exact where it matters:

* **Counts** are four limbs of eight bits (`encode_count`). A limb stays exact through 65,536 summed parts, so a count
  of any size survives a float32 all-reduce, without an integer collective of its own.
* **Means** of parts, weighted by their size, are split into a high part of 12 bits and the rest (`stats.exact`), so
  that the spread of part means around a common mean 1e4 times larger is not lost in rounding.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping

import numpy as np

from probes_jax.spec import orders, sketch

Columns = dict[str, tuple[np.ndarray, np.ndarray]]  # stat -> (float64 values [rows], present [rows])


class Reduce(enum.Enum):
    """How a leaf merges. Minimum is the maximum of the negative; a quantile sketch is a histogram, so a sum."""

    SUM = "sum"
    MAX = "max"
    RAW = "raw"  # 32-bit words that are already global: values computed in the graph, counters


LIMBS = 4
LIMB_BITS = 8


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of a summary.

    Attributes:
        name: Its name.
        reduce: How it merges.
        width: Numbers per row; 0 means a single number without an axis of its own.
        count: Whether the numbers are the limbs of a count.
        power: How it grows with the elements: a sum of squares by 2, a maximum by 1, a count by 0.
    """

    name: str
    reduce: Reduce
    width: int = 0
    power: int = 0
    count: bool = False


@dataclasses.dataclass(frozen=True)
class SummaryKind:
    """A kind of summary: its leaves, and the float64 finalization of their merged values.

    The leaves of one reduction lie side by side as the columns of one array; counts come first.
    """

    name: str
    leaves: tuple[Leaf, ...]
    finalize: Callable[[Mapping[str, np.ndarray]], Columns]
    stats: tuple[str, ...]

    @functools.cached_property
    def columns(self) -> dict[str, tuple[Reduce, slice | int]]:
        """Where each leaf lies among the columns of its reduction: a slice where it has a width, else an index."""
        found: dict[str, tuple[Reduce, slice | int]] = {}
        ends = dict.fromkeys(Reduce, 0)
        for leaf in self.leaves:
            start = ends[leaf.reduce]
            ends[leaf.reduce] += leaf.width or 1
            found[leaf.name] = (leaf.reduce, slice(start, start + leaf.width) if leaf.width else start)
        return found

    def width(self, reduce: Reduce) -> int:
        """Number of columns of one reduction."""
        return sum(leaf.width or 1 for leaf in self.leaves if leaf.reduce is reduce)

    def powers(self, reduce: Reduce) -> tuple[int, ...]:
        """`Leaf.power` of each column of one reduction."""
        return tuple(leaf.power for leaf in self.leaves if leaf.reduce is reduce for _ in range(leaf.width or 1))

    @functools.cached_property
    def count_columns(self) -> int:
        """How many of the sum columns are limbs of counts; they are the first ones."""
        return sum(leaf.width for leaf in self.leaves if leaf.count)


def _sum(name: str, power: int = 0) -> Leaf:
    return Leaf(name, Reduce.SUM, power=power)


def _max(name: str) -> Leaf:
    return Leaf(name, Reduce.MAX, power=1)


def _count(name: str) -> Leaf:
    return Leaf(name, Reduce.SUM, LIMBS, count=True)


def decode_count(limbs: np.ndarray) -> np.ndarray:
    """Limbs `[..., 4]` (exact float integers) to counts `[...]` in float64 (exact up to 2^53)."""
    weights = np.float64(2.0) ** (LIMB_BITS * np.arange(LIMBS))
    return np.asarray(limbs, np.float64) @ weights


def _wide(leaf: np.ndarray) -> np.ndarray:
    return np.asarray(leaf, np.float64)


def _divide(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    return numerator / np.where(denominator == 0, np.nan, denominator)


def _worst(finite: np.ndarray, nan: np.ndarray, inf: np.ndarray) -> np.ndarray:
    """NaN if any element was NaN, else inf if any was, else the finite maximum."""
    return np.where(nan > 0, np.nan, np.where(inf > 0, np.inf, finite))


def _magnitude(leaves: Mapping[str, np.ndarray]) -> Columns:
    count, zeros, nan, inf = (decode_count(leaves[key]) for key in ("count", "zeros", "nan", "inf"))
    finite_max = _wide(leaves["abs_max"])
    square = _wide(leaves["sum_sq"])
    seen = count > 0
    return {
        "norm": (np.sqrt(square), seen),
        "mean_square": (_divide(square, count), seen),
        "rms": (np.sqrt(_divide(square, count)), seen),
        "abs_mean": (_divide(_wide(leaves["sum_abs"]), count), seen),
        "abs_max": (_worst(finite_max, nan, inf), seen),
        "finite_abs_max": (finite_max, seen & np.isfinite(finite_max)),
        "zero_fraction": (_divide(zeros, count), seen),
        "nan_count": (nan, seen),
        "inf_count": (inf, seen),
    }


def _moments(leaves: Mapping[str, np.ndarray]) -> Columns:
    columns = _magnitude({**leaves, "sum_sq": np.zeros_like(np.asarray(leaves["m2"]))})
    count, nan, inf = (decode_count(leaves[key]) for key in ("count", "nan", "inf"))
    seen = count > 0
    high = _wide(leaves["max"])
    low = -_wide(leaves["neg_min"])
    with np.errstate(invalid="ignore", over="ignore"):
        mean = _divide(_wide(leaves["mean_hi"]) + _wide(leaves["mean_lo"]), count)
        mean_square = _divide(_wide(leaves["sq_hi"]) + _wide(leaves["sq_lo"]), count)
        between = np.maximum(mean_square - mean * mean, 0.0)
        variance = np.where(high == low, 0.0, _divide(_wide(leaves["m2"]), count) + between)
        variance = np.where(np.isnan(variance), np.inf, variance)  # inf - inf: the float32 sums overflowed
        square = variance + mean * mean
        square = np.where(np.isnan(square), np.inf, square)
        # What an infinite element does to each statistic, as IEEE arithmetic on the whole tensor would have it.
        infinite = (inf > 0) & (nan == 0)
        signed = np.where(np.isposinf(high), np.where(np.isneginf(low), np.nan, np.inf), -np.inf)
        mean = np.where(nan > 0, np.nan, np.where(infinite, signed, mean))
        square = np.where(nan > 0, np.nan, np.where(infinite, np.inf, square))
        std = np.where((nan > 0) | infinite, np.nan, np.sqrt(variance))
    columns.pop("norm")
    columns.update(
        {
            "mean_square": (square, seen),
            "rms": (np.sqrt(square), seen),
            "mean": (mean, seen),
            "std": (std, seen),
            "min": (np.where(nan > 0, np.nan, low), seen),
            "max": (np.where(nan > 0, np.nan, high), seen),
        }
    )
    return columns


FORMATS = ("bf16", "e4m3", "e5m2")  # e4m3 is e4m3fn: without infinity
LOSSES = tuple(f"{end}/{name}" for name in FORMATS for end in ("underflow", "overflow"))


def _losses(leaves: Mapping[str, np.ndarray]) -> Columns:
    count = decode_count(leaves["count"])
    return {name: (_divide(decode_count(leaves[name]), count), count > 0) for name in LOSSES}


def _norm(leaves: Mapping[str, np.ndarray]) -> Columns:
    seen = np.asarray(leaves["parts"]) > 0
    return {"norm": (np.sqrt(_wide(leaves["sum_sq"])), seen)}


def _fraction(leaves: Mapping[str, np.ndarray]) -> Columns:
    part, whole = (decode_count(leaves[key]) for key in ("part", "whole"))
    return {"": (_divide(part, whole), whole > 0)}


def _direction(leaves: Mapping[str, np.ndarray]) -> Columns:
    square, raw, dot = (_wide(leaves[key]) for key in ("sum_sq", "raw_sq", "dot"))
    nan, inf = (decode_count(leaves[key]) for key in ("nan", "inf"))
    finite = _wide(leaves["abs_max"])
    largest, seen = _worst(finite, nan, inf), np.asarray(leaves["parts"]) > 0
    length = np.sqrt(square) * np.sqrt(raw)
    cosine = np.clip(_divide(dot, length), -1.0, 1.0)
    return {"norm": (np.sqrt(square), seen), "abs_max": (largest, seen), "cosine": (cosine, seen & (length != 0))}


def _mean(leaves: Mapping[str, np.ndarray]) -> Columns:
    weight = _wide(leaves["weight"])
    return {"": (_divide(_wide(leaves["total"]), weight), (weight > 0) | np.isnan(weight))}


def _tally(leaves: Mapping[str, np.ndarray]) -> Columns:
    count = decode_count(leaves["count"])
    return {"": (count, np.ones(count.shape, bool))}


def _copies(leaves: Mapping[str, np.ndarray]) -> Columns:
    balance = decode_count(leaves["balance"]) % 2.0**32
    return {"diverged": ((balance != 0).astype(np.float64), np.asarray(leaves["parts"]) > 0)}


def _extreme(leaves: Mapping[str, np.ndarray]) -> Columns:
    finite = _wide(leaves["abs_max"])
    nan, inf = decode_count(leaves["nan"]), decode_count(leaves["inf"])
    value = _worst(finite, nan, inf)
    return {
        "abs_max": (value, ~np.isneginf(value)),
        "finite_abs_max": (finite, np.isfinite(finite)),
        "nan_count": (nan, ~np.isneginf(value)),
        "inf_count": (inf, ~np.isneginf(value)),
    }


def _spread(leaves: Mapping[str, np.ndarray]) -> Columns:
    mean, seen = _mean(leaves)[""]
    return {"mean": (mean, seen), "max": (np.where(np.isnan(mean), mean, _wide(leaves["max"])), seen)}


def _sketch(leaves: Mapping[str, np.ndarray]) -> Columns:
    seen = _wide(leaves["buckets"]).sum(axis=-1) > 0
    return {name: (value, seen) for name, value in sketch.quantiles(leaves["buckets"]).items()}


def _orders(leaves: Mapping[str, np.ndarray]) -> Columns:
    count, zeros, nan, inf = (decode_count(leaves[key]) for key in ("count", "zeros", "nan", "inf"))
    highest = _worst(_wide(leaves["abs_max"]), nan, inf)
    return {"max": (highest, count > 0), "zero_fraction": (_divide(zeros, count), count > 0)}


def _histogram(leaves: Mapping[str, np.ndarray]) -> Columns:
    number = _wide(leaves["buckets"]).sum(axis=-1)
    return {"": (number, number > 0)}


ABSENT_BITS = 0x7FC0AB5E  # a quiet NaN with a payload no arithmetic produces: "no measurement", not "measured NaN"


def _scalar(leaves: Mapping[str, np.ndarray]) -> Columns:
    bits = np.ascontiguousarray(leaves["bits"], np.uint32)
    present = bits != ABSENT_BITS
    return {"": (np.where(present, bits.view(np.float32).astype(np.float64), np.nan), present)}


def _counter(leaves: Mapping[str, np.ndarray]) -> Columns:
    words = np.asarray(leaves["words"]).astype(np.float64)
    value = words[..., 0] + words[..., 1] * 2.0**32
    return {"": (value, np.ones(value.shape, bool))}


def _kind(name: str, leaves: tuple[Leaf, ...], finalize: Callable[[Mapping[str, np.ndarray]], Columns]) -> SummaryKind:
    blank = {
        leaf.name: np.zeros(
            (1, leaf.width) if leaf.width else (1,), np.uint32 if leaf.reduce is Reduce.RAW else np.float32
        )
        for leaf in leaves
    }
    return SummaryKind(name, leaves, finalize, tuple(finalize(blank)))


_COUNTS = (_count("count"), _count("zeros"), _count("nan"), _count("inf"))
_LOST = tuple(_count(name) for name in LOSSES)
_MOMENTS = (
    *(_sum(n, 1) for n in ("mean_hi", "mean_lo")),
    *(_sum(n, 2) for n in ("sq_hi", "sq_lo", "m2")),
    _sum("sum_abs", 1),
    *(_max(n) for n in ("max", "neg_min", "abs_max")),
)
_MAGNITUDE = (_sum("sum_sq", 2), _sum("sum_abs", 1), _max("abs_max"))

KINDS: dict[str, SummaryKind] = {
    kind.name: kind
    for kind in (
        # Everything in the Tensors section of an activation, from one pass.
        _kind("moments", (*_COUNTS, *_MOMENTS), _moments),
        # Size of a gradient: norm, mean and maximum of |g|, zeros, non-finite elements.
        _kind("magnitude", (*_COUNTS, *_MAGNITUDE), _magnitude),
        # Both with what narrower formats would lose; the kurtosis has parts of its own (`stats.shape`).
        _kind("precise_moments", (*_COUNTS, *_LOST, *_MOMENTS), lambda x: _moments(x) | _losses(x)),
        _kind("precise_magnitude", (*_COUNTS, *_LOST, *_MAGNITUDE), lambda x: _magnitude(x) | _losses(x)),
        # A norm only.
        _kind("norm", (_sum("parts"), _sum("sum_sq", 2)), _norm),
        # A tensor beside another one of its shape, a gradient: size, and the angle between the two.
        _kind(
            "direction",
            (
                *(_count(n) for n in ("nan", "inf")),
                _sum("parts"),
                *(_sum(n, 2) for n in ("sum_sq", "raw_sq", "dot")),
                _max("abs_max"),
            ),
            _direction,
        ),
        # A count over another; absent where that is zero.
        _kind("fraction", (_count("part"), _count("whole")), _fraction),
        # A weighted mean: reduced numerator over reduced denominator; absent without weight.
        _kind("mean", (_sum("total", 1), _sum("weight")), _mean),
        # An exact count; zero is a measurement.
        _kind("tally", (_count("count"),), _tally),
        # An absolute maximum with its non-finite counts.
        _kind("extreme", (_count("nan"), _count("inf"), _max("abs_max")), _extreme),
        # Numbers of tokens: their weighted mean and their maximum; absent without a token.
        _kind("spread", (_sum("total", 1), _sum("weight"), _max("max")), _spread),
        # Their quantiles.
        _kind("sketch", (Leaf("buckets", Reduce.SUM, sketch.SIZE),), _sketch),
        # Whether the copies of a tensor differ: their weighted checksums do not add up to 0 mod 2^32 (`step.replica`).
        _kind("copies", (_count("balance"), _sum("parts")), _copies),
        # Maximum and zeros of a tensor, beside the counts by exponent that its quantiles are read from in the graph.
        _kind("orders", (*_COUNTS, _max("abs_max")), _orders),
        _kind("histogram", (Leaf("buckets", Reduce.SUM, orders.SIZE),), _histogram),
        # A float32 computed in the graph from merged leaves; may be absent.
        _kind("scalar", (Leaf("bits", Reduce.RAW),), _scalar),
        # A 64-bit counter as two 32-bit words, low word first.
        _kind("counter", (Leaf("words", Reduce.RAW, 2),), _counter),
    )
}
