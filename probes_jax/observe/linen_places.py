"""Where records lie in a linen model's tree of variables: at their module, in a variable of their transform."""

from __future__ import annotations

from typing import Any

from flax.core import unfreeze

from probes_jax.observe.census import Returned
from probes_jax.observe.names import Path
from probes_jax.observe.record import Record

RECORDS = "probes_jax="  # how the variables that hold a module's records begin; no module has such a name

Places = dict[tuple[Path, str], tuple[Record, ...]]  # module path and variable to records


def path_of(keys: Any) -> Path:
    """The path that JAX gives a leaf, as strings."""
    return tuple(str(getattr(key, "key", key)) for key in keys)


def records_in(tree: Any) -> list[Returned]:
    """The records in our collection as a model returned it, those of one module and place in call order."""
    return [(*place, record) for place, records in take(unfreeze(tree)).items() for record in records]


def take(tree: Any, path: Path = ()) -> Places:
    """Removes all records from a tree of variables, leaving its dictionaries as they are."""
    found: Places = {}
    if isinstance(tree, dict):
        found |= {(path, name): tree.pop(name) for name in list(tree) if name.startswith(RECORDS)}
        for name, child in tree.items():
            found |= take(child, (*path, name))
    return found


def of_transform(slots: Any, variable: str) -> dict[str, Any]:
    """The slots of one transform and of those inside it: only they have its axes."""
    kept = {}
    for name, value in slots.items():
        if not name.startswith(RECORDS):
            kept[name] = of_transform(value, variable)
        elif name == variable or name.startswith(f"{variable}."):
            kept[name] = value
    return kept


def put(tree: Any, places: Places) -> None:
    """Puts records where `take` found them."""
    for (path, name), records in places.items():
        node = tree
        for element in path:
            node = node.setdefault(element, {})
        node[name] = records
