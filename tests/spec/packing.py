"""Report buffers made by hand: the layout's contract, written the other way round."""

from __future__ import annotations

import numpy as np

from probes_jax.spec.layout import FORMAT, HEADER, PROGRAMS, Layout
from probes_jax.spec.summary import KINDS, LIMB_BITS, LIMBS, Reduce


def limbs(*counts: int) -> np.ndarray:
    """Counts to float32 limbs `[n, 4]`, lowest first."""
    mask = 2**LIMB_BITS - 1
    rows = [
        [(c >> (LIMB_BITS * i)) & mask if i < LIMBS - 1 else c >> (LIMB_BITS * i) for i in range(LIMBS)] for c in counts
    ]
    return np.asarray(rows, np.float32)


def pack(layout: Layout, *entries: dict[str, object], step: int = 7, fresh: int = 1) -> np.ndarray:
    """The buffer of a report: one dict of leaves for each entry, in order."""
    words = [np.asarray([FORMAT, step, fresh, PROGRAMS.index(layout.program)], np.uint32)]
    assert len(words[0]) == HEADER
    for reduce in (Reduce.SUM, Reduce.MAX, Reduce.RAW):
        for slot in layout.section(reduce):
            block = np.zeros(slot.shape, np.uint32 if reduce is Reduce.RAW else np.float32)
            for name, (leaf_reduce, column) in KINDS[layout.entries[slot.entry].kind].columns.items():
                if leaf_reduce is reduce:
                    block[:, column] = np.asarray(entries[slot.entry][name])
            words.append(block.view(np.uint32).ravel())
    buffer = np.concatenate(words)
    assert buffer.shape == (layout.size,)
    return buffer
