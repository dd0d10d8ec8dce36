"""Learning rates by layer: smaller ones further from the output, and a factor for groups such as embeddings."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from probes_jax.spec import check

_MODULE = r"(?:\w*(?:layer|block)s?|h)"
LAYERS = rf"(?i)(?:^|/){_MODULE}[_/](\d+)(?:/|$)"  # block_3, layers/3, TransformerBlock_3, h/3
STACKED = rf"(?i)(?:^|/){_MODULE}(?:/|$)"
NO_DECAY = r"(?i)(?:^|/)(?:bias|b|scale|gamma|beta)$|norm|(?:^|/)ln(?:_\w+|\d+)?(?:/|$)"


@dataclasses.dataclass(frozen=True)
class _Rules:
    decay: float
    groups: tuple[tuple[str, float], ...]
    layers: str
    stacked: str
    axis: int

    def factors(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
        """What the update of each parameter is multiplied by, of a shape that broadcasts against it."""
        found: dict[str, np.ndarray] = {}
        numbered: dict[str, dict[str, int]] = {}  # text before the number -> number of each parameter
        stacks: dict[str, list[str]] = {}
        for path in shapes:
            group = next((factor for pattern, factor in self.groups if re.search(pattern, path)), None)
            if group is not None:
                found[path] = np.asarray(group, np.float32)
            elif number := re.search(self.layers, path):
                numbered.setdefault(path[: number.start(1)], {})[path] = int(number[1])
            elif stack := re.search(self.stacked, path):
                stacks.setdefault(path[: stack.end()], []).append(path)
            else:
                raise ValueError(
                    f"layerwise_learning_rates finds no layer number in the parameter {path!r}, and no group for it; "
                    f"give it a factor, groups=[({re.escape(path.split('/')[0])!r}, 1.0)], or say with layers= (a "
                    "regular expression whose group is the number) or stacked= where layers are"
                )
        for numbers in numbered.values():
            last = max(numbers.values())
            found |= {path: np.asarray(self.decay ** (last - index), np.float32) for path, index in numbers.items()}
        for stack, paths in stacks.items():
            found |= self._of_stack(stack, {path: shapes[path] for path in paths})
        return found

    def _of_stack(self, stack: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
        lengths = {shape[self.axis] if -len(shape) <= self.axis < len(shape) else 0 for shape in shapes.values()}
        if len(lengths) > 1 or 0 in lengths:
            raise ValueError(
                f"layerwise_learning_rates: the parameters of {stack.rstrip('/')!r} have no layer number and do not "
                f"stack layers on axis {self.axis}, as their shapes {dict(shapes)} say; say where layers are with "
                "layers=, stacked= and axis=, or give it a factor with groups="
            )
        (length,) = lengths
        by_layer = (self.decay ** np.arange(length - 1, -1, -1, dtype=np.float64)).astype(np.float32)
        return {
            path: by_layer.reshape([-1 if axis == self.axis % len(shape) else 1 for axis in range(len(shape))])
            for path, shape in shapes.items()
        }


def layerwise_learning_rates(
    decay: float,
    *,
    groups: Sequence[tuple[str, float]] = (),
    weight_decay: float = 0.0,
    no_decay: str = NO_DECAY,
    layers: str = LAYERS,
    stacked: str = STACKED,
    axis: int = 0,
) -> optax.GradientTransformation:
    """Multiplies the update of layer i of N by `decay^(N - 1 - i)`, and that of a group by the group's factor.

    A stage between the preconditioner and the learning rate, which then is that of the last layer. Layers are numbers
    in the paths of parameters (`block_3/mlp/kernel`, `layers/3/...`), counted for each list of layers by itself, or an
    axis of parameters that stack the layers of a scan (`blocks/mlp/kernel` of shape `[N, ...]`).

    Args:
        decay: Factor from each layer to the one before it, above 0 and up to 1: 0.9 gives the first of 32 layers
            0.9^31 = 0.038.
        groups: (regular expression on the path, factor) pairs, for what is in no layer, such as embeddings and head.
            The first that fits decides, also for a parameter in a layer.
        weight_decay: Added before, times the parameter: that of a layer shrinks with its learning rate.
        no_decay: Regular expression on the path of what is not decayed: biases and norms.
        layers: Regular expression on the path whose one group is the layer's number.
        stacked: Regular expression on the path of what stacks layers.
        axis: The axis of the layers there.

    Returns:
        A stage for `chain`, without state.

    Raises:
        ValueError: A setting is wrong; on init, a parameter is in no layer and no group.

    Example:
        >>> tx = layerwise_learning_rates(0.9, groups=[("embed", 0.5)])
        >>> params = {"embed": jnp.ones(1), "block_0": jnp.ones(1), "block_1": jnp.ones(1)}
        >>> {name: round(float(u[0]), 3) for name, u in tx.update(params, tx.init(params))[0].items()}
        {'block_0': 0.9, 'block_1': 1.0, 'embed': 0.5}
    """
    who = "layerwise_learning_rates"
    if check.number(f"{who} decay", decay) > 1:
        raise ValueError(f"{who} decay must be above 0 and at most 1, got {decay!r}; 1 leaves all layers alike")
    check.number(f"{who} weight_decay", weight_decay, zero=True)
    if not isinstance(groups, tuple | list) or not all(isinstance(x, tuple | list) and len(x) == 2 for x in groups):
        raise ValueError(f"{who} groups must be (pattern, factor) pairs, got {groups!r}; write [('embed', 0.5)]")
    for pattern, factor in groups:
        check.pattern(f"{who} groups", pattern)
        check.number(f"{who} groups {pattern!r}", factor, zero=True)
    for name, pattern in (("no_decay", no_decay), ("layers", layers), ("stacked", stacked)):
        check.pattern(f"{who} {name}", pattern)
    if re.compile(layers).groups != 1:
        raise ValueError(f"{who} layers must have one group, the layer's number, got {layers!r}")
    rules = _Rules(float(decay), tuple(groups), layers, stacked, axis)

    def factors(tree: Any) -> Any:
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        found = rules.factors({_text(keys): jnp.shape(leaf) for keys, leaf in leaves})
        return jax.tree.unflatten(structure, [found[_text(keys)] for keys, _ in leaves])

    def decayed(keys: Any, update: jax.Array, param: jax.Array) -> jax.Array:
        return update if re.search(no_decay, _text(keys)) else update + weight_decay * param

    def init(params: optax.Params) -> optax.EmptyState:
        factors(params)
        return optax.EmptyState()

    def update(
        updates: optax.Updates, state: optax.EmptyState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        if weight_decay:
            if params is None:
                raise ValueError(
                    f"{who} with weight_decay={weight_decay} needs the parameters: tx.update(g, state, params)"
                )
            updates = jax.tree_util.tree_map_with_path(decayed, updates, params)
        return jax.tree.map(lambda u, factor: u * jnp.asarray(factor, u.dtype), updates, factors(updates)), state

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _text(keys: tuple[Any, ...]) -> str:
    """A path as `a/b/kernel`; an nnx Variable is a node with its array inside."""
    if len(keys) > 1 and keys[-1] == jax.tree_util.GetAttrKey("value"):
        keys = keys[:-1]
    return jax.tree_util.keystr(keys, simple=True, separator="/")
