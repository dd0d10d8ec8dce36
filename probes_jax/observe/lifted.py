"""JAX's own transforms bring what is observed in their bodies out as one more output.

While a model or a loss function is traced under observation, `jax.lax.scan`, `jax.checkpoint` and their like are
replaced by functions that call the originals with a body that returns its records beside its own output. Records of a
scan come out with one row per iteration, and so do the slots of its taps go in: maxima stay maxima. What is computed
stays as it is.

Reached is what is applied meanwhile, however it hands its arrays in: as state, in the carry, or closed over. A function
that was transformed before, such as a decorated method, holds JAX's original.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from probes_jax.observe.lift import Application, Carrier, carried_by
from probes_jax.observe.patch import Patch, patched
from probes_jax.stats.summary import Summary, is_summary
from probes_jax.stats.types import types_of


@contextlib.contextmanager
def lifting(carrier: Carrier | None, modules: Iterable[Any] = ()) -> Iterator[None]:
    """Makes transforms carry the carrier's records while the block runs, in this thread only.

    Args:
        carrier: Who observes; None leaves all transforms as they are.
        modules: Python modules whose global names may stand for transforms too (`from jax.lax import scan`).
    """
    with patched(_patches(modules) if carrier is not None else ()), carried_by(carrier):
        yield


def _scan(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scan(f: Any, init: Any, xs: Any = None, *args: Any, **kwargs: Any) -> Any:
        application = Application.begin("jax.lax.scan")
        if application is None:
            return original(f, init, xs, *args, **kwargs)

        @functools.wraps(f)
        def body(carry: Any, x: Any) -> Any:
            (carry, y), records = application.run(x[1], f, carry, x[0])
            return carry, (y, records)

        carry, (ys, records) = original(body, init, (xs, application.slots), *args, **kwargs)
        application.end(records, axis=True)
        return carry, ys

    return scan


def _map(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def map_(f: Any, xs: Any, **options: Any) -> Any:
        application = Application.begin("jax.lax.map")
        if application is None:
            return original(f, xs, **options)

        @functools.wraps(f)
        def body(x: Any) -> Any:
            return application.run(x[1], f, x[0])

        ys, records = original(body, (xs, application.slots), **options)
        application.end(records, axis=True)
        return ys

    return map_


def _checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def checkpoint(fun: Any, *options: Any, **named: Any) -> Callable[..., Any]:
        plain = original(fun, *options, **named)

        @functools.wraps(plain)
        def lifted(*args: Any, **kwargs: Any) -> Any:
            application = Application.begin("jax.checkpoint")
            if application is None:
                return plain(*args, **kwargs)

            @functools.wraps(fun)
            def body(*args: Any, **kwargs: Any) -> Any:
                return application.run(application.slots, fun, *args, **kwargs)

            output, records = original(body, *options, **named)(*args, **kwargs)
            application.end(records)
            return output

        return lifted

    return checkpoint


def _vmap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def vmap(fun: Any, in_axes: Any = 0, out_axes: Any = 0, *options: Any, **named: Any) -> Callable[..., Any]:
        plain = original(fun, in_axes, out_axes, *options, **named)

        @functools.wraps(plain)
        def lifted(*args: Any, **kwargs: Any) -> Any:
            application = Application.begin("jax.vmap")
            if application is None:
                return plain(*args, **kwargs)

            @functools.wraps(fun)
            def body(slots: Any, *args: Any, **kwargs: Any) -> Any:
                return application.run(slots, fun, *args, **kwargs)

            axes = in_axes if isinstance(in_axes, tuple | list) else [in_axes] * len(args)
            mapped = original(body, (0, *axes), (out_axes, 0), *options, **named)
            output, records = mapped(application.slots, *args, **kwargs)
            application.end(records, axis=True)
            return output

        return lifted

    return vmap


def _cond(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def cond(pred: Any, true_fun: Any, false_fun: Any, *operands: Any, **options: Any) -> Any:
        def plain(branches: Sequence[Any]) -> Any:
            return original(pred, *branches, *operands, **options)

        usual = callable(true_fun) and callable(false_fun) and not options
        return _branch("jax.lax.cond", plain, (true_fun, false_fun), operands, usual)

    return cond


def _switch(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def switch(index: Any, branches: Sequence[Any], *operands: Any, **options: Any) -> Any:
        def plain(branches: Sequence[Any]) -> Any:
            return original(index, branches, *operands, **options)

        return _branch("jax.lax.switch", plain, tuple(branches), operands, not options)

    return switch


def _branch(
    name: str, run: Callable[[Sequence[Any]], Any], branches: Sequence[Any], operands: tuple[Any, ...], usual: bool
) -> Any:
    """Every branch returns the records of all of them: its own, and the summary of nothing for the others."""
    application = Application.begin(name) if usual else None
    if application is None:
        return run(branches)
    numbers = range(len(branches))
    slots = application.slots or ((),) * len(branches)

    def trace(number: int, *operands: Any) -> tuple[Any, Any]:
        return application.run(slots[number], branches[number], *operands, branch=number)

    types = [types_of(lambda *operands, n=number: trace(n, *operands)[1], *operands) for number in numbers]
    if not jax.tree.leaves(types):
        output = run(branches)
        application.end(tuple(types))
        return output
    nothing = [jax.tree.map(Summary.identity, kept, is_leaf=is_summary) for kept in types]

    def body(number: int) -> Callable[..., Any]:
        @functools.wraps(branches[number])
        def branch(*operands: Any) -> Any:
            output, records = trace(number, *operands)
            return output, tuple(records if number == other else nothing[other] for other in numbers)

        return branch

    output, records = run([body(number) for number in numbers])
    application.end(records)
    return output


_MAKERS = {
    (jax.lax, "scan"): _scan,
    (jax.lax, "map"): _map,
    (jax.lax, "cond"): _cond,
    (jax.lax, "switch"): _switch,
    (jax, "checkpoint"): _checkpoint,
    (jax, "remat"): _checkpoint,
    (jax, "vmap"): _vmap,
}
_LIFTED = {original: make(original) for (owner, name), make in _MAKERS.items() for original in [getattr(owner, name)]}


def _patches(modules: Iterable[Any]) -> list[Patch]:
    """The transforms where JAX has them, and where others have imported them to."""
    places = list(_MAKERS)
    both = {id(function) for pair in _LIFTED.items() for function in pair}  # replaced: by another thread, for now
    for module in modules:
        places += [(module, name) for name, value in list(vars(module).items()) if id(value) in both]
    return [(*place, lambda original: _LIFTED.get(original, original)) for place in dict.fromkeys(places)]
