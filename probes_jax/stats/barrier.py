"""A measured tensor must not steer the partitioner: how it lies may decide how its summary lies, never the reverse.

XLA chooses the sharding of everything that nobody annotated by propagation, forwards and backwards. Rows that end in
a psum over named axes would propagate back through the statistics into the model, and change how *it* is computed
(measured on a v5e-256: a third all-gather per layer). Shardy's propagation barrier stops that; it costs nothing.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxlib.mlir.dialects import sdy

_barrier = Primitive("probes_jax_sharding_barrier")
_barrier.def_impl(lambda x: x)
_barrier.def_abstract_eval(lambda x: x)
batching.defvectorized(_barrier)
ad.deflinear(_barrier, lambda gradient: [gradient])


def _lower(context: Any, x: Any) -> Any:
    if not jax.config.values["jax_use_shardy_partitioner"]:  # the older partitioner has no such thing
        return [x]
    return [sdy.propagation_barrier(x, sdy.PropagationDirection.FORWARD)]


mlir.register_lowering(_barrier, _lower)


def sharding_barrier(x: jax.Array) -> jax.Array:
    """`x` itself; what is done with the result has no say in how `x` lies on the mesh.

    Example:
        >>> import jax.numpy as jnp
        >>> sharding_barrier(jnp.float32(2.0)).item()
        2.0
    """
    return _barrier.bind(x)
