"""Random keys of one step: any stream by name, all from one key."""

from __future__ import annotations

import dataclasses
import functools
import hashlib

import jax
import jax.numpy as jnp


def stream_hash(name: str) -> int:
    """A 32-bit number that depends on the name only, the same in every process and version."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


@functools.partial(jax.tree_util.register_dataclass, data_fields=("key",), meta_fields=())
@dataclasses.dataclass(frozen=True)
class Rngs:
    """One key, and a stream for every name.

    Attributes:
        key: A typed key (`jax.random.key`) or a raw one (`jax.random.PRNGKey`).

    Example:
        >>> import jax
        >>> rngs = Rngs(jax.random.key(0))
        >>> bool((rngs["dropout"] == rngs.dropout).all())
        True
    """

    key: jax.Array

    def __getitem__(self, name: str) -> jax.Array:
        return jax.random.fold_in(self.key, jnp.uint32(stream_hash(name)))

    def __getattr__(self, name: str) -> jax.Array:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def streams(self, names: tuple[str, ...]) -> dict[str, jax.Array]:
        """A dictionary of streams, as linen's `apply` takes it."""
        return {name: self[name] for name in names}
