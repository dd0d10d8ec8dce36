"""The buffer of a report as it is handed to the recorder: what it must be, and where it lies."""

from __future__ import annotations

from typing import Any

import numpy as np

from probes_jax.spec.layout import Layout
from probes_jax.spec.report import PackedReport

_UINT32 = np.dtype(np.uint32)


def parts(report: PackedReport) -> tuple[Any, Layout]:
    """Buffer and layout of a report."""
    try:
        return report.buffer, report.layout
    except AttributeError:
        what = type(report).__name__
        raise TypeError(f"record() needs the report that monitored_train_step returns, got {what}") from None


def checked_nbytes(buffer: Any, layout: Layout) -> int:
    """Size of a buffer that fits its layout. Asks each property once: they cost microseconds on a device array."""
    if not isinstance(buffer, np.ndarray) and not hasattr(buffer, "copy_to_host_async"):
        raise TypeError(
            f"report buffer must be a device array or a NumPy array, got {type(buffer).__name__}; inside a jitted "
            "function there is only a tracer: call record() with the report that the function returns"
        )
    shape, dtype = buffer.shape, buffer.dtype
    if len(shape) not in (1, 2) or shape[-1] != layout.size or dtype != _UINT32:
        raise ValueError(
            f"report buffer must be uint32 [{layout.size}] or [T, {layout.size}], got {dtype} {list(shape)}; "
            "is the layout that of another program?"
        )
    return 4 * layout.size * (shape[0] if len(shape) == 2 else 1)


def is_far(buffer: Any) -> bool:
    """Whether a device array lies outside of the host's memory.

    On CPU it does not, and asking for a copy there takes as long as all the rest of `record`.
    """
    devices = getattr(buffer, "devices", None)
    return devices is None or any(device.platform != "cpu" for device in devices())


def local(buffer: Any) -> Any:
    """The part of a buffer of a multi-process job that this process can read, if that is all of it; else None."""
    if isinstance(buffer, np.ndarray) or buffer.is_fully_addressable:
        return buffer
    return buffer.addressable_data(0) if buffer.is_fully_replicated else None
