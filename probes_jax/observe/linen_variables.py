"""linen variables: checked, kept in shape from step to step, and their partition metadata."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta, unfreeze
from flax.linen import spmd

from probes_jax.observe.compare import check_arrays, some
from probes_jax.observe.patch import patched


def conform(old: Any, new: Any) -> Any:
    """`new` in the structure of `old`.

    What a module adds while it runs does not stay: a variable that was not there is dropped, and of a tuple that
    `sow` made longer only the newest values are kept. So state never grows.
    """
    if isinstance(old, Mapping):
        new = new if isinstance(new, Mapping) else {}
        return {name: conform(value, new.get(name, value)) for name, value in old.items()}
    if isinstance(old, tuple) and isinstance(new, tuple) and len(new) > len(old) > 0:
        return new[-len(old) :]
    return new if jax.tree.structure(new) == jax.tree.structure(old) else old


def check_variables(variables: Any, expected: Mapping[str, Any], dropped: tuple[str, ...]) -> dict[str, Any]:
    """Pretrained variables, checked against the shapes the model would make.

    Args:
        variables: A dict of collections with `params`, or the tree of parameters alone.
        expected: Collections of shapes.
        dropped: Collections that are not state.

    Returns:
        A dict of collections; only `params` when only parameters were given.
    """
    if not isinstance(variables, Mapping):
        raise TypeError(
            f"variables must be a dict with 'params', or a dict of parameters, got {type(variables).__name__}"
        )
    given = unfreeze(dict(variables))
    whole = isinstance(given.get("params"), Mapping)
    if not whole and not set(given) & set(expected["params"]):
        raise ValueError(
            f"variables has no 'params' (its keys: {some(given)}); pass {{'params': ..., ...}}, or the parameters "
            f"alone, with the keys {some(expected['params'])}"
        )
    given = {k: v for k, v in given.items() if k not in dropped} if whole else {"params": given}
    lacking = [name for name in expected if whole and name not in given and jax.tree.leaves(expected[name])]
    if lacking:
        raise ValueError(
            f"variables has no collection {lacking[0]!r}, which this model carries; add it, or pass the parameters "
            "alone to start it anew"
        )
    for name in (name for name in expected if name in given):
        check_arrays(f"variables[{name!r}]", meta.unbox(given[name]), meta.unbox(expected[name]))
    return jax.tree.map(jnp.asarray, given)


def specs_of(variables: Any) -> Any:
    """The `PartitionSpec` of each boxed array; None for an array without a box."""

    def spec(leaf: Any) -> Any:
        if isinstance(leaf, spmd.LogicallyPartitioned):
            return spmd.logical_to_mesh_axes(leaf.names, leaf.rules)
        return leaf.get_partition_spec() if isinstance(leaf, meta.Partitioned) else None

    return jax.tree.map(spec, variables, is_leaf=meta.is_axis_metadata)


@contextlib.contextmanager
def without_sow(is_meant: Callable[[nn.Module], bool]) -> Iterator[None]:
    """Makes `sow` a no-op for the modules that `is_meant` chooses: what is sown is no state to start from."""

    def make(original: Callable[..., bool]) -> Callable[..., bool]:
        def sow(self: nn.Module, *args: Any, **kwargs: Any) -> bool:
            return False if is_meant(self) else original(self, *args, **kwargs)

        return sow

    with patched([(nn.Module, "sow", make)]):
        yield
