"""Names of layers: the same for scanned and unrolled models, with and without remat.

Three rules turn a module path into a name:

* a number ends a layer's name in brackets: `block_3` becomes `block[3]`, and so does item 3 of a list `block`;
* a scanned layer has one name per iteration: `blocks` of length 2 becomes `blocks[0]`, `blocks[1]`;
* what Flax puts before the class name of a lifted module is dropped: `CheckpointBlock_0` becomes `Block[0]`.

A rule that would give two siblings the same name is not applied to them, so names stay unique. Characters with a
meaning in names are percent-encoded.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

Path = tuple[str, ...]
# Parameter path prefix -> (layer axis, number of layers); where it was stacked twice, (outer, its number, inner, ...).
# Of nested stacks, an inner axis is counted in what the outer ones leave.
Stacks = Mapping[Path, tuple[int, ...]]
Axes = int | tuple[int, ...] | None  # of a parameter: its layer axis, several where stacks are nested, the outer first

ROOT = "output"  # the name of the root module's own output
LAYER = "[*]"  # stands where a layer index goes

_RESERVED = re.compile(r"[%/\[\]{}#:*~\s]")
_LIFTED = re.compile(r"(?:Scan|Checkpoint|Vmap|Jit|Remat_scan|Map_variables|Fold_rngs)+(?=[A-Z]\w*_\d+\Z)")
_NUMBERED = re.compile(r"(.+)_(0|[1-9]\d*)")
_INDEX = re.compile(r"0|[1-9]\d*")


def escape(element: str) -> str:
    """Percent-encodes the characters that have a meaning in names.

    >>> escape("enc/layer.1[x]")
    'enc%2Flayer.1%5Bx%5D'
    """
    return _RESERVED.sub(lambda match: f"%{ord(match.group()):02X}", element)


class Names:
    """Names of module and parameter paths of one model.

    Args:
        paths: Parameter paths. They decide first: a name never depends on whether activations are observed.
        stacks: Scanned parameter subtrees.
        also: Paths of modules without parameters, and of points.

    Example:
        >>> names = Names([("blocks_0", "w"), ("blocks_1", "w")])
        >>> names.path(("blocks_1", "w"))
        'blocks[1]/w'
    """

    def __init__(self, paths: Iterable[Path], stacks: Iterable[Path] = (), also: Iterable[Path] = ()) -> None:
        self._stacks = frozenset(stacks)
        self._first = _children(paths)
        self._second = _children(also)
        self._cache: dict[Path, dict[str, str]] = {}

    def path(self, path: Path, stack: Sequence[int] = ()) -> str:
        """The name of a path, with `[*]` after `path[:position]` for each position in `stack`."""
        parts: list[str] = ["scan" + LAYER * stack.count(0)] if path and 0 in stack else []
        for depth, element in enumerate(path):
            text = self._siblings(path[:depth])[element]
            if text.startswith("[") and parts:
                parts[-1] += text
            else:
                parts.append(text)
            parts[-1] += LAYER * list(stack).count(depth + 1)
        return "/".join(parts)

    def _siblings(self, parent: Path) -> dict[str, str]:
        """Element to name, for all below `parent`."""
        if parent not in self._cache:
            first = self._first.get(parent, [])
            second = [element for element in self._second.get(parent, []) if element not in first]
            family = _Family(parent, [*first, *second], self._is_indexed, self._stacks)
            names = family.names(first, {})
            self._cache[parent] = {**names, **family.names(second, names)}
        return self._cache[parent]

    def _is_indexed(self, path: Path) -> bool:
        """Whether an index follows the name: a list, or a scanned layer."""
        children = (*self._first.get(path, ()), *self._second.get(path, ()))
        return path in self._stacks or any(_INDEX.fullmatch(child) for child in children)


class _Family:
    """The rules for the elements below one parent."""

    def __init__(
        self, parent: Path, elements: list[str], is_indexed: Callable[[Path], bool], stacks: frozenset[Path]
    ) -> None:
        self._parent = parent
        self._stacks = stacks
        self._lists = {_base(e) for e in elements if is_indexed((*parent, e))}
        stripped = [_LIFTED.sub("", e) for e in elements]
        self._bases = collections.Counter(re.sub(r"_\d+\Z", "", e) for e in stripped)

    def names(self, group: list[str], taken: Mapping[str, str]) -> dict[str, str]:
        """Names of siblings, those of higher rank (`taken`) already having theirs."""
        short = _unless_clash(group, lambda e: _LIFTED.sub("", e), {*group, *taken})
        texts = {element: self._text(element, short[element]) for element in group}
        count = collections.Counter([*taken.values(), *texts.values()])
        return {e: text if count[text] == 1 else escape(e) for e, text in texts.items()}

    def _text(self, element: str, short: str) -> str:
        numbered = _NUMBERED.fullmatch(short)
        if self._parent and _INDEX.fullmatch(element):
            return f"[{element}]"
        if (*self._parent, element) in self._stacks:
            alone = numbered is not None and numbered[2] == "0" and self._bases[numbered[1]] == 1
            return escape(numbered[1] if numbered and alone else short)
        if numbered and numbered[1] not in self._lists:
            return f"{escape(numbered[1])}[{numbered[2]}]"
        return escape(short)


def _base(element: str) -> str:
    """`element` as a scanned layer's name would read: without lifting prefix and without a trailing `_0`."""
    return re.sub(r"_0\Z", "", _LIFTED.sub("", element))


def _children(paths: Iterable[Path]) -> dict[Path, list[str]]:
    """Parent path to the names below it, in order of appearance."""
    children: dict[Path, dict[str, None]] = {}
    for path in paths:
        for depth, element in enumerate(path):
            children.setdefault(path[:depth], {})[element] = None
    return {parent: list(names) for parent, names in children.items()}


def _unless_clash(group: list[str], rule: Callable[[str], str], everyone: set[str]) -> dict[str, str]:
    """`rule` applied to each element, except where two would become the same."""
    result = {element: rule(element) for element in group}
    count = collections.Counter(result.values())
    return {e: r if count[r] == 1 and (r == e or r not in everyone) else e for e, r in result.items()}


def expand(name: str, index: Sequence[int]) -> str:
    """Puts layer indices in the place of `[*]`; those without a place are appended.

    >>> expand("blocks[*]/mlp", (3,))
    'blocks[3]/mlp'
    """
    for number in index:
        name = name.replace(LAYER, f"[{number}]", 1) if LAYER in name else f"{name}[{number}]"
    return name.replace(LAYER, "")


def param_labels(
    path: Path, shape: Sequence[int], stacks: Stacks, names: Names | None = None, axis: int | None = None
) -> tuple[tuple[str, ...], Axes]:
    """Names of one parameter: one per layer where it belongs to a scanned stack.

    Args:
        path: Path of the parameter in the tree of parameters.
        shape: Its shape.
        stacks: Scanned parameter subtrees.
        names: Names of the whole model; without it, siblings are not looked at.
        axis: The layer axis of this parameter where it is not the one of the whole subtree.

    Returns:
        The names, and the axis to unstack: several where stacks are nested, the outermost first; None for a single
        name.

    Example:
        >>> param_labels(("blocks", "mlp", "kernel"), (2, 8, 8), {("blocks",): (0, 2)})
        (('blocks[0]/mlp/kernel', 'blocks[1]/mlp/kernel'), 0)
    """
    names = names or Names([path], stacks)
    left, taken, depths = list(range(len(shape))), [], []  # axes of `shape` that no stack has taken, and has
    for depth in range(len(path) + 1):
        stack = stacks.get(path[:depth], ())
        for common, length in zip(stack[::2], stack[1::2]):
            at = common if axis is None else axis
            if -len(left) <= at < len(left) and shape[left[at]] == length and (axis is None or not taken):
                taken.append(left.pop(at))
                depths.append(depth)
    name = names.path(path, depths)
    indices = itertools.product(*(range(shape[at]) for at in taken))
    return tuple(expand(name, index) for index in indices), taken[0] if len(taken) == 1 else tuple(taken) or None


def label_params(
    shapes: Mapping[Path, Sequence[int]], stacks: Stacks, axes: Mapping[Path, int] | None = None
) -> dict[Path, tuple[tuple[str, ...], Axes]]:
    """`param_labels` of every parameter of a model, unique over all of them."""
    names = Names(shapes, stacks)
    labels: dict[Path, tuple[tuple[str, ...], Axes]] = {}
    taken: set[str] = set()
    for path, shape in shapes.items():
        own, axis = param_labels(path, shape, stacks, names, (axes or {}).get(path))
        suffix, count = "", 1
        while any(label + suffix in taken for label in own):
            count += 1
            suffix = f"~{count}"
        labels[path] = (tuple(label + suffix for label in own), axis)
        taken.update(labels[path][0])
    return labels
