"""The bias terms of routers: an array of the router that has a number for each expert."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from probes_jax.signals.experts import Loads
from probes_jax.signals.measured import Measured, measured
from probes_jax.stats.explicit import summarize_where_it_lies
from probes_jax.stats.partial import WHOLE, Split
from probes_jax.stats.routing import summarize_bias
from probes_jax.step.objective import Notes
from probes_jax.step.select import Path, flatten
from probes_jax.step.settings import Settings
from probes_jax.step.update import Core

NO_BIAS = (
    "no array of the router, or beside it, is called a bias and has a number for each expert; where there is one, hand "
    "it over in the model: pj.observe_routing(name, indices, experts=..., bias=...)"
)
_NAME = re.compile(r"(?i).*bias(es)?|b")


def measure_biases(settings: Settings, core: Core, loads: Sequence[Loads], notes: Notes) -> list[Measured]:
    """A number for each expert of each router, as the forward pass of the step used it.

    Looked for in the router's module, and among the arrays that lie beside it, of parameters and of what the model
    carries. Several of one router are told apart by their names.

    Args:
        settings: What does not change.
        core: State before the step.
        loads: The routers.
        notes: Takes the routers that have none.
    """
    arrays, items = list(_arrays(settings, core)) if loads else [], []
    for router in loads:
        shape = router.rows.stack_shape()
        found = [(path, x, split) for path, x, split in arrays if x.shape == shape and _is_of(path, router.path)]
        if router.bias is not None:
            items.append(measured(router.names("bias"), router.bias))
        elif not found:
            notes.missing |= {f"{label}/bias": NO_BIAS for label in router.labels}
        for path, array, split in found if router.bias is None else ():
            alike = sum(other[-1] == path[-1] for other, *_ in found) > 1  # in the router and beside it
            own = "/".join(path[len(router.path) - 1 :]) if alike else path[-1]
            stat = "bias" if len(found) == 1 else f"{own}/bias"
            items.append(measured(router.names(stat), summarize_where_it_lies(summarize_bias, split, array)))
    return items


def _is_of(path: Path, router: tuple[str, ...]) -> bool:
    """Whether an array is a bias in the module of a router, or directly in the module that the router is in."""
    lies = path[: len(router)] == router or path[:-1] == router[:-1]
    return lies and _NAME.fullmatch(path[-1]) is not None


def _arrays(settings: Settings, core: Core) -> Iterator[tuple[Path, jax.Array, Split]]:
    """Parameters and carried arrays by their paths in the model, the layers in front, and how they are cut."""
    for path, array in flatten(core.params).items():
        info = settings.infos[path]
        axes = () if info.stack_axis is None else info.stack_axis
        axes = (axes,) if isinstance(axes, int) else axes
        order = [*axes, *(axis for axis in range(array.ndim) if axis not in axes)]
        dims = (*info.split.dims, *[()] * array.ndim)
        yield path, jnp.transpose(array, order), Split(tuple(dims[axis] for axis in order), info.split.sizes)
    collection = 0 if settings.binding.has_arrays else 1  # linen has its name in front of what is carried
    for name, start in (("frozen", 0), ("model_state", collection)):
        lies = flatten(getattr(settings.shardings, name, {}))
        for path, array in flatten(getattr(core, name)).items():
            like: Any = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=lies.get(path))
            split = settings.partition.parameter(like) if path in lies else WHOLE
            yield path[start:], array, split
