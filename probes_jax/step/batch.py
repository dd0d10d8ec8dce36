"""What a batch must be, said before anything is traced with it."""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

_NO_NUMBERS = tuple("OSUMm")  # kinds of NumPy dtypes: objects, text, dates


def check_batch(batch: Any, microbatches: int) -> int:
    """Length of axis 0 of the batch.

    Raises:
        TypeError: A leaf of the batch is no array of numbers.
        ValueError: The batch is empty, ragged, or does not divide into microbatches.
    """
    check_leaves(batch)
    shapes = [tuple(jnp.shape(x)) for x in jax.tree.leaves(batch)]
    lengths = {shape[0] for shape in shapes if shape}
    if not lengths or 0 in lengths:
        raise ValueError(f"batch must hold arrays with at least one example on axis 0, got shapes {shapes}")
    if microbatches > 1:
        if len(lengths) > 1 or any(not shape for shape in shapes):
            raise ValueError(
                f"microbatches={microbatches} splits axis 0 of every batch array, but the shapes are {shapes}"
            )
        length = next(iter(lengths))
        if length % microbatches:
            raise ValueError(f"batch of {length} examples does not divide into microbatches={microbatches}")
    return max(lengths)


def check_leaves(batch: Any) -> None:
    """Refuses a batch with text or other Python objects in it.

    Raises:
        TypeError: The message names the leaf.

    Example:
        >>> check_leaves({"tokens": jnp.zeros((8, 4)), "about": {"source": "a.txt"}})
        Traceback (most recent call last):
        TypeError: batch['about']['source'] is the str 'a.txt', and a train step takes numbers only: leave it out of the
        batch, or encode it as integers
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not _is_numeric(leaf):
            dtype = getattr(leaf, "dtype", None)
            found = f"the {type(leaf).__name__} {reprlib.repr(leaf)}" if dtype is None else f"an array of dtype {dtype}"
            raise TypeError(
                f"batch{jax.tree_util.keystr(path)} is {found}, and a train step takes numbers only: leave it out of "
                "the batch, or encode it as integers"
            )


def _is_numeric(leaf: Any) -> bool:
    if hasattr(leaf, "dtype"):
        return getattr(leaf.dtype, "kind", None) not in _NO_NUMBERS  # a key's dtype is not NumPy's
    return isinstance(leaf, int | float | complex) or hasattr(leaf, "__jax_array__")


@contextlib.contextmanager
def naming_keys(batch: Any) -> Iterator[None]:
    """Adds to a `KeyError` that comes out of the loss function which keys its batch has, where it lacks that one."""
    try:
        yield
    except KeyError as error:
        key = error.args[0] if error.args else None
        if isinstance(batch, Mapping) and isinstance(key, str) and key not in batch:
            keys = ", ".join(sorted(map(repr, batch)))
            error.add_note(
                f"The batch= argument has no {key!r}: its keys are {keys}. Give it every key that loss_fn reads, in "
                "TrainState.create and pj.inspect as in the training loop."
            )
        raise
