"""What a run's folder says about its columns, so that the numbers can be read without this library."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import numpy as np

from probes_jax.spec.metric import Cadence, MetricSpec, Priority
from probes_jax.spec.registry import Registry


def columns_key(names: tuple[str, ...]) -> str:
    """Twelve hex digits that change with any name or with their order."""
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()[:12]


def _plain(spec: MetricSpec) -> dict[str, str]:
    values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    return {
        name: value.name if isinstance(value, Priority) else value.value if isinstance(value, Cadence) else str(value)
        for name, value in values.items()
    }


def columns_entry(names: tuple[str, ...], registry: Registry) -> dict[str, Any]:
    """Names of the columns, and the registry's entries behind them by template."""
    specs = {spec.name: spec for name in names if (spec := registry.find(name)) is not None}
    return {"names": list(names), "metrics": {template: _plain(spec) for template, spec in sorted(specs.items())}}


def exact_columns(names: tuple[str, ...], registry: Registry) -> np.ndarray:
    """Which columns keep every bit, bool `[columns]`: signals, and what the registry does not know."""
    specs = [registry.find(name) for name in names]
    return np.array([spec is None or spec.priority is Priority.P0 for spec in specs], dtype=bool)
