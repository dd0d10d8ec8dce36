"""Where values are taken: inside a model nobody edited, and between the stages of an optimizer."""

import sys
import types
from typing import Any


class _Package(types.ModuleType):
    """This package is also the function `pj.observe`: a module and its parent's attribute share one name."""

    def __call__(self, name: str, value: Any) -> Any:
        from probes_jax.observe.named import observe

        return observe(name, value)


sys.modules[__name__].__class__ = _Package
