"""Metrics made of other finalized metrics: the worst of many (and which), shares, ratios.

The rules are found once per layout from the names alone, then applied to every report as a few array operations.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np

# (reported name, names it is the worst of). Worst means: NaN, else the largest.
_WORST = (
    ("loss/worst_shard", re.compile(r"loss/shard\[\d+\]")),
    ("act/abs_max", re.compile(r"act/.+/abs_max")),
    ("grad_act/abs_max", re.compile(r"grad_act/.+/abs_max")),
    ("grad/worst_layer_norm", re.compile(r"grad/.+/norm")),
    ("attention/logit", re.compile(r"attention/.+/logit/max")),
    ("router/imbalance", re.compile(r"router/.+/imbalance")),
    ("router/max_violation", re.compile(r"router/.+/max_violation")),
    ("router/shard_imbalance", re.compile(r"router/.+/shard_imbalance")),
    ("residual/stream_norm", re.compile(r"residual/.+/stream_norm/mean")),
    ("residual/branch_norm", re.compile(r"residual/.+/branch_norm/mean")),
    ("residual/ratio", re.compile(r"residual/.+/ratio/mean")),
    ("update/worst_ratio", re.compile(r"update/.+/ratio")),
)
_NOT_WORST = re.compile(r".*/finite_abs_max")


@dataclasses.dataclass(frozen=True)
class Derived:
    """Derived names of one layout and how to compute them from the measured columns."""

    names: tuple[str, ...]
    measured: int  # number of measured columns
    shares: np.ndarray  # columns of per-layer gradient norms
    ratios: np.ndarray  # [n, 2]: column of the update norm, column of the parameter norm
    ratio_names: tuple[str, ...]
    worst: tuple[tuple[str, np.ndarray, tuple[str, ...]], ...]  # (name, columns, labels); ratios follow the measured

    def compute(self, values: np.ndarray, present: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[str, str]]:
        """Values `[len(names)]`, presence, and the label behind each worst-of metric."""
        with np.errstate(invalid="ignore", divide="ignore"):
            square = np.where(present[self.shares], values[self.shares], 0.0) ** 2
            total = square.sum()
            share = square / (total if total != 0 else np.nan)
            share_seen = present[self.shares] & (total != 0)
            update, param = (values[self.ratios[:, i]] for i in (0, 1))
            ratio = update / np.where(param == 0, np.nan, param)
            ratio_seen = present[self.ratios].all(axis=1) & (param != 0)
        pool = np.concatenate([values, ratio])
        pool_seen = np.concatenate([present, ratio_seen])
        out, seen, which = [share, ratio], [share_seen, ratio_seen], {}
        for name, columns, labels in self.worst:
            column, there = pool[columns], pool_seen[columns]
            nan = np.flatnonzero(there & np.isnan(column))
            best = int(nan[0]) if nan.size else int(np.argmax(np.where(there, column, -np.inf)))
            out.append(column[best : best + 1])
            seen.append(np.array([there.any()]))
            if there.any():
                which[name] = labels[best]
        return np.concatenate(out), np.concatenate(seen), which

    def sources(self, name: str) -> set[int]:
        """Measured columns that a derived metric is made of."""
        if name in self.ratio_names:
            return set(self.ratios[self.ratio_names.index(name)].tolist())
        for worst, columns, _ in self.worst:
            if worst == name:
                measured = columns < self.measured
                return {*columns[measured].tolist(), *self.ratios[columns[~measured] - self.measured].ravel().tolist()}
        return set(self.shares.tolist())  # a share is one of the whole


def _strip(name: str) -> str:
    return name.rsplit("/", 1)[0]


def derive(names: tuple[str, ...]) -> Derived:
    """Finds the rules that apply to a layout with these measured names."""
    column = {name: index for index, name in enumerate(names)}
    layers = [name for name in names if re.fullmatch(r"grad/.+/norm", name)]
    shares = tuple(f"{_strip(name)}/share" for name in layers)
    pairs, ratio_names = [], []
    for name in names:
        if re.fullmatch(r"update/.+/norm", name):
            parameter = "param/" + name.removeprefix("update/")
            if parameter in column:
                pairs.append((column[name], column[parameter]))
                ratio_names.append(f"{_strip(name)}/ratio")
    pool = names + tuple(ratio_names)
    worst = []
    for target, pattern in _WORST:
        found = [i for i, name in enumerate(pool) if pattern.fullmatch(name) and not _NOT_WORST.fullmatch(name)]
        if found:
            labels = tuple(pool[i] if target == "loss/worst_shard" else _strip(pool[i]) for i in found)
            worst.append((target, np.array(found), labels))
    return Derived(
        names=shares + tuple(ratio_names) + tuple(name for name, _, _ in worst),
        measured=len(names),
        shares=np.array([column[name] for name in layers], dtype=np.intp),
        ratios=np.array(pairs, dtype=np.intp).reshape(-1, 2),
        ratio_names=tuple(ratio_names),
        worst=tuple(worst),
    )
