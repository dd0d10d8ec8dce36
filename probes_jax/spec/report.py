"""What leaves a monitored step, as the host sees it."""

from __future__ import annotations

from typing import Any, Protocol

from probes_jax.spec.layout import Layout


class PackedReport(Protocol):
    """One packed buffer and the layout that says what is where.

    Attributes:
        buffer: uint32 `[layout.size]`, or `[T, layout.size]` for the stacked reports of an outer `lax.scan`.
            A device array or a NumPy array.
        layout: Names and offsets.
    """

    buffer: Any
    layout: Layout
