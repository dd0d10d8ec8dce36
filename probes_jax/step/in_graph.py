"""What is read from merged leaves inside of the step, where a report would be too large with the leaves themselves."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from probes_jax.observe.point import Point
from probes_jax.observe.roles import role_of
from probes_jax.signals.experts import find_expert_shards
from probes_jax.signals.modality import SCALE, scale_ratios
from probes_jax.signals.parameters import ENCODER
from probes_jax.stats.shape import kurtosis
from probes_jax.stats.sketch import sketched
from probes_jax.step.gain import name_gains
from probes_jax.step.objective import Notes, Part
from probes_jax.step.pack import Scalars
from probes_jax.step.reduce import Reduced
from probes_jax.step.settings import Settings


def read_in_graph(
    settings: Settings, part: Part, reduced: Reduced, params: Any, notes: Notes, *, scan: bool
) -> Scalars:
    """Quantiles of tokens, balance of experts, scales of modalities, kurtosis.

    Args:
        settings: What does not change.
        part: What the forward pass left behind.
        reduced: All merged leaves of the step.
        params: Parameters by path.
        notes: Takes what cannot be told, and why.
        scan: Whether this is the full program.
    """
    told = _quantiles(reduced) | _media(settings, part, reduced, params)
    told |= name_gains(_blocks(settings, part), reduced)
    return told | _loads(settings, part, reduced, params, notes, scan=scan) | _kurtosis(reduced)


def _blocks(settings: Settings, part: Part) -> list[tuple[Point, tuple[int, ...]]]:
    if "grad_act" in settings.plan.left_out:
        return []
    points = zip(part.gradient_names, part.gradients, strict=True)
    return [(p, rows.stack_shape()) for p, rows in points if role_of(p, settings.plan.roles) == "residual"]


def _quantiles(reduced: Reduced) -> Scalars:
    """Quantiles of every sketch: a sketch is a thousand numbers, so they are read in the graph."""
    found: Scalars = {}
    for entry in reduced.layout.entries[reduced.visible :]:
        if entry.kind != "sketch":
            continue
        buckets = reduced.leaf(entry.key, "buckets")
        values = sketched(buckets, reduced.leaf(entry.key.removesuffix("sketch") + "{stat}", "max"))
        for stat, value in values.items():
            names = tuple(label.removesuffix("sketch") + stat for label in entry.labels)
            found[names] = (value, buckets.sum(axis=-1) > 0)
    return found


def _media(settings: Settings, part: Part, reduced: Reduced, params: Any) -> Scalars:
    """Scale of each modality beside the text, and what the encoder has of gradient and parameters."""
    found: Scalars = {}
    if "scale" in part.rows:
        names = settings.plan.modalities
        total, weight = (reduced.leaf(SCALE.format(names[0]), leaf) for leaf in ("total", "weight"))
        found |= scale_ratios(total, weight, names)
    if ENCODER in {entry.key for entry in reduced.layout.entries}:
        own, whole = (reduced.leaf(key, "sum_sq")[0] for key in (ENCODER, "grad/{stat}"))
        found["media/encoder_gradient_share"] = (own / jnp.where(whole > 0, whole, 1.0), whole > 0)
        sizes = [(params[path].size, info.encoder) for path, info in settings.infos.items()]
        share = sum(size for size, encoder in sizes if encoder) / sum(size for size, _ in sizes)
        found["media/encoder_parameter_share"] = (jnp.float32(share), True)
    return found


def _loads(settings: Settings, part: Part, reduced: Reduced, params: Any, notes: Notes, *, scan: bool) -> Scalars:
    """Balance of the experts, of loads that are merged over everything."""
    found: Scalars = {}
    for loads in part.loads:
        shards = find_expert_shards(loads.path, loads.experts, params, settings.infos) or settings.plan.expert_shards
        if shards is None or loads.experts % shards:
            notes.missing["router/shard_imbalance"] = (
                f"no parameter beside {'/'.join(loads.path)} is sharded along its {loads.experts} experts; where "
                "they are sharded otherwise, say into how many shards: pj.Plan(expert_shards=...)"
            )
            shards = None
        limbs = reduced.leaf(loads.measured().entry.key, "count")
        found |= loads.read(limbs, shards, scan=scan)
    return found


def _kurtosis(reduced: Reduced) -> Scalars:
    """Of every entry with central moments."""
    entries = {entry.key: entry for entry in reduced.layout.entries}
    return {entries[key].names("kurtosis"): kurtosis(parts) for key, parts in reduced.parts.items()}
