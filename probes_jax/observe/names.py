"""Names of layers: the same for scanned and unrolled models, with and without remat.

Three rules turn a module path into a name:

* a number ends a layer's name in brackets: `block_3` becomes `block[3]`, and so does item 3 of a list `block`;
* a scanned layer has one name per iteration: `blocks` of length 2 becomes `blocks[0]`, `blocks[1]`;
* what Flax puts before the class name of a lifted module is dropped: `CheckpointBlock_0` becomes `Block[0]`.

A rule that would give two siblings the same name is not applied to them, so names stay unique. Characters with a
meaning in names are percent-encoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Path = tuple[str, ...]
Stacks = Mapping[Path, tuple[int, int]]  # parameter path prefix -> (layer axis, number of layers)

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
        if parent not in self._cache:
            first = self._first.get(parent, [])
            second = [element for element in self._second.get(parent, []) if element not in first]
            texts: dict[str, str] = {}
            for group in (first, second):
                texts.update(self._name(parent, group, texts))
            self._cache[parent] = texts
        return self._cache[parent]

    def _name(self, parent: Path, group: list[str], taken: Mapping[str, str]) -> dict[str, str]:
        """Applies the rules to siblings, those of higher rank (`taken`) already having their names."""
        short = _unless_clash(group, lambda e: _LIFTED.sub("", e), set(group) | set(taken))
        texts = {element: self._text(parent, element, short[element]) for element in group}
        names = [*taken.values(), *texts.values()]
        return {e: text if names.count(text) == 1 else escape(e) for e, text in texts.items()}

    def _text(self, parent: Path, element: str, short: str) -> str:
        numbered = _NUMBERED.fullmatch(short)
        if (*parent, element) in self._stacks:
            alone = numbered and numbered[2] == "0" and not self._has_base(parent, element, numbered[1])
            return escape(numbered[1] if numbered and alone else short)
        if parent and _INDEX.fullmatch(element):
            return f"[{element}]"
        if numbered and not self._has_indexed(parent, numbered[1]):
            return f"{escape(numbered[1])}[{numbered[2]}]"
        return escape(short)

    def _all(self, parent: Path) -> list[str]:
        return [*self._first.get(parent, []), *self._second.get(parent, [])]

    def _has_base(self, parent: Path, element: str, base: str) -> bool:
        """Whether a sibling is named `base`, or `base` and a number."""
        pattern = re.compile(rf"{re.escape(base)}(_\d+)?")
        return any(e != element and pattern.fullmatch(_LIFTED.sub("", e)) for e in self._all(parent))

    def _is_indexed(self, parent: Path, element: str) -> bool:
        """Whether the name of `element` is followed by an index: a list, or a scanned layer."""
        path = (*parent, element)
        return path in self._stacks or any(_INDEX.fullmatch(child) for child in self._all(path))

    def _has_indexed(self, parent: Path, base: str) -> bool:
        return any(_base(e) == base and self._is_indexed(parent, e) for e in self._all(parent))


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


def _unless_clash(group: list[str], rule: Any, everyone: set[str]) -> dict[str, str]:
    """`rule` applied to each element, except where two would become the same."""
    result = {element: rule(element) for element in group}
    values = list(result.values())
    return {e: r if values.count(r) == 1 and (r == e or r not in everyone) else e for e, r in result.items()}


def expand(name: str, index: Sequence[int]) -> str:
    """Puts layer indices in the place of `[*]`; those without a place are appended.

    >>> expand("blocks[*]/mlp", (3,))
    'blocks[3]/mlp'
    """
    for number in index:
        name = name.replace(LAYER, f"[{number}]", 1) if LAYER in name else f"{name}[{number}]"
    return name.replace(LAYER, "")


def param_labels(
    path: Path, shape: Sequence[int], stacks: Stacks, names: Names | None = None
) -> tuple[tuple[str, ...], int | None]:
    """Names of one parameter: one per layer where it belongs to a scanned stack.

    Args:
        path: Path of the parameter in the tree of parameters.
        shape: Its shape.
        stacks: Scanned parameter subtrees. Where they are nested, the outermost has the rows.
        names: Names of the whole model; without it, siblings are not looked at.

    Returns:
        The names, and the axis to unstack (None: a single name).

    Example:
        >>> param_labels(("blocks", "mlp", "kernel"), (2, 8, 8), {("blocks",): (0, 2)})
        (('blocks[0]/mlp/kernel', 'blocks[1]/mlp/kernel'), 0)
    """
    names = names or Names([path], stacks)
    for depth in range(len(path) + 1):
        axis, length = stacks.get(path[:depth], (0, -1))
        if length >= 0 and -len(shape) <= axis < len(shape) and shape[axis] == length:
            name = names.path(path, (depth,))
            return tuple(expand(name, (layer,)) for layer in range(length)), axis % len(shape)
    return (names.path(path),), None


def label_params(
    shapes: Mapping[Path, Sequence[int]], stacks: Stacks
) -> dict[Path, tuple[tuple[str, ...], int | None]]:
    """`param_labels` of every parameter of a model, unique over all of them."""
    names = Names(shapes, stacks)
    labels: dict[Path, tuple[tuple[str, ...], int | None]] = {}
    taken: set[str] = set()
    for path, shape in shapes.items():
        own, axis = param_labels(path, shape, stacks, names)
        suffix, count = "", 1
        while any(label + suffix in taken for label in own):
            count += 1
            suffix = f"~{count}"
        labels[path] = (tuple(label + suffix for label in own), axis)
        taken.update(labels[path][0])
    return labels
