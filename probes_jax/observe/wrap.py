"""Wraps a linen or nnx module."""

from __future__ import annotations

from typing import Any

from probes_jax.observe.binding import Binding


def wrap(model: Any) -> Binding:
    """Wraps a model."""
    if isinstance(model, Binding):
        return model
    from probes_jax.observe.linen import LinenBinding

    return LinenBinding(model)
