"""From merged leaves and values computed in the graph to the report's one buffer."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from probes_jax.spec.layout import FORMAT, HEADER, PROGRAMS, Entry, Layout
from probes_jax.spec.summary import ABSENT_BITS, Reduce
from probes_jax.step.reduce import Reduced

Names = str | tuple[str, ...]
Scalars = dict[Names, tuple[jax.Array, jax.Array | bool]]  # name -> (float32 value, present); names: one for each
Counters = dict[str, jax.Array]  # name -> uint32 word, or two words [2], low first


def _scalar_bits(value: jax.Array, present: jax.Array | bool) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(jnp.asarray(value, jnp.float32), jnp.uint32)
    return jnp.where(present, bits, jnp.uint32(ABSENT_BITS)).reshape(-1)


def _counter_words(value: jax.Array) -> jax.Array:
    value = jnp.asarray(value).astype(jnp.uint32)
    return value if value.shape == (2,) else jnp.stack([value.reshape(()), jnp.uint32(0)])


def pack_report(reduced: Reduced, scalars: Scalars, counters: Counters, step: jax.Array) -> tuple[jax.Array, Layout]:
    """The buffer and the layout of one report."""
    shown = Layout(reduced.layout.program, reduced.layout.entries[: reduced.visible])
    entries = [*shown.entries]
    raw = []
    for name, (value, present) in scalars.items():
        entries.append(Entry("scalar", (name,) if isinstance(name, str) else name))
        raw.append(_scalar_bits(value, present))
    for name, value in counters.items():
        entries.append(Entry("counter", (name,)))
        raw.append(_counter_words(value))
    layout = Layout(reduced.layout.program, tuple(entries))
    sums, maxima = (sum(slot.size for slot in shown.section(how)) for how in (Reduce.SUM, Reduce.MAX))
    words = jnp.concatenate([reduced.sums[:sums], reduced.maxima[:maxima]]).astype(jnp.float32)
    return _assemble(layout, step, jax.lax.bitcast_convert_type(words, jnp.uint32), raw), layout


def _header(layout: Layout, step: jax.Array, fresh: bool = True) -> jax.Array:
    program = PROGRAMS.index(layout.program)
    fixed = [jnp.uint32(FORMAT), step.astype(jnp.uint32).reshape(()), jnp.uint32(fresh), jnp.uint32(program)]
    return jnp.stack(fixed)


def _assemble(layout: Layout, step: jax.Array, words: jax.Array, raw: list[jax.Array]) -> jax.Array:
    buffer = jnp.concatenate([_header(layout, step), words, *raw])
    if buffer.shape != (layout.size,):
        raise AssertionError(f"packed {buffer.shape[0]} words where the layout says {layout.size}")
    return buffer


def widen(buffer: jax.Array, layout: Layout, wide: Layout) -> jax.Array:
    """A light report in the layout of a full one: what it does not hold is absent.

    Needed where both programs must return the same structure (under `lax.cond`).
    """
    where = {(layout.entries[s.entry].key, s.reduce): s for s in layout.slots}
    pieces = [buffer[:HEADER]]
    for slot in wide.slots:
        found = where.get((wide.entries[slot.entry].key, slot.reduce))
        if found is not None and found.size == slot.size:
            pieces.append(buffer[found.offset : found.offset + found.size])
        else:
            pieces.append(jnp.full((slot.size,), _absent_word(slot.reduce), jnp.uint32))
    return jnp.concatenate(pieces)


def _absent_word(reduce: Reduce) -> int:
    return {Reduce.SUM: 0, Reduce.MAX: 0xFF800000, Reduce.RAW: ABSENT_BITS}[reduce]  # 0.0, -inf, "no measurement"
