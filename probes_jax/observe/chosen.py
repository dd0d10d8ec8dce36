"""Whether a word of a plan means a point, in each of the forms in which its name is written."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from probes_jax.observe.names import expand

_NUMBERS = re.compile(r"\[(\*|(?:\d+(?:\.\.\d+)?,?)+)\]")


def means(text: str, name: str, layers: Sequence[int] = ()) -> bool:
    r"""Whether a regular expression is found in the name of a point.

    Tried are the name itself (`blocks[*]/mlp` of scanned layers, `blocks[2]/mlp` of others) and the name without the
    numbers of layers (`blocks/mlp`). Numbers in brackets, written as tables have them (`blocks[0..2]/mlp`), mean those
    layers: a scanned one is meant where all of its layers are, because they are computed together.

    Args:
        text: The regular expression.
        name: Name of the point.
        layers: Length of each axis of scanned layers.

    Example:
        >>> [means(text, "blocks[*]/mlp", (3,)) for text in ("blocks/mlp", "blocks[0..2]/mlp", "blocks[0]/mlp")]
        [True, True, False]
        >>> [means(text, "blocks[1]/mlp") for text in (r"blocks\[1\]", "blocks[0..2]/mlp", "blocks[0]/mlp")]
        [True, True, False]
    """
    if re.search(text, name) or re.search(text, re.sub(r"\[[^]]*\]", "", name)):
        return True
    if not _NUMBERS.search(text):
        return False
    written = re.compile(_NUMBERS.sub(_any_of, text))
    indices = itertools.product(*(range(length) for length in layers))
    return all(written.search(expand(name, index)) for index in indices)


def _any_of(match: re.Match[str]) -> str:
    """`[0..2,5]` as a regular expression of those numbers in brackets, `[*]` of all."""
    if match[1] == "*":
        return r"\[\d+\]"
    numbers: list[str] = []
    for stretch in match[1].strip(",").split(","):
        first, _, last = stretch.partition("..")
        numbers += map(str, range(int(first), int(last or first) + 1))
    return rf"\[(?:{'|'.join(numbers)})\]"
