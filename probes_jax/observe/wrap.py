"""From a Flax module to a binding."""

from __future__ import annotations

import inspect
from typing import Any

from probes_jax.observe.binding import Binding


def wrap(module: Any, *, take_ownership: bool = False, streams: tuple[str, ...] = ("params", "dropout")) -> Binding:
    """Wraps a linen or nnx module. Its class is not edited, and the module stays usable.

    Args:
        module: An instance of a `flax.linen.Module` or a `flax.nnx.Module`; a binding is returned as it is.
        take_ownership: nnx only: use the module's own arrays instead of copies. Saves their memory while a large
            model is set up; a training step that donates its state then makes the module unusable.
        streams: linen only: random streams that the model's calls get. Any other name falls back to `params`.

    Raises:
        TypeError: Not a module instance.

    Example:
        >>> import flax.linen as nn
        >>> type(wrap(nn.Dense(3))).__name__
        'LinenBinding'
    """
    if isinstance(module, Binding):
        return module
    if inspect.isclass(module):
        raise TypeError(f"wrap() got the class {module.__name__}; pass an instance, {module.__name__}(...)")
    bases = {f"{cls.__module__}.{cls.__name__}" for cls in type(module).__mro__}
    if "flax.linen.module.Module" in bases:
        from probes_jax.observe.linen import LinenBinding

        return LinenBinding(module, streams)
    if "flax.nnx.module.Module" in bases:
        from probes_jax.observe.nnx import NNXBinding

        return NNXBinding(module, take_ownership)
    raise TypeError(f"wrap() takes a flax.linen or flax.nnx module instance, got {type(module).__name__}")
