"""Which parameters the gradient of each of several terms can reach: its backward pass is traced, and nothing runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

Sources = frozenset[str]  # names of what a value depends on
_NONE: Sources = frozenset()
_CALLS = {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "shard_map"}
_CALLS |= {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
_CALL_PARAMS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def find_reach(terms: Callable[[Any], Mapping[str, jax.Array]], names: Sequence[str], params: Any) -> Any:
    """The terms that have a gradient with respect to each parameter.

    Read off the backward pass, so whatever JAX's derivatives say of a transform is what counts: a `stop_gradient`, an
    `argmax`, a rule of one's own that drops a gradient. A gradient that only happens to be zero counts as one, but for
    a product with a literal 0.

    Args:
        terms: From parameters to float scalars by name. Traceable.
        names: Their names.
        params: Pytree of arrays, or of their shapes.

    Returns:
        The tree of `params`, a `frozenset` of names for each leaf.

    Example:
        >>> import jax.numpy as jnp
        >>> terms = lambda p: {"z": p["w"].sum() ** 2, "logged": jax.lax.stop_gradient(p["b"]).sum()}
        >>> found = find_reach(terms, ("z", "logged"), {"w": jnp.ones(2), "b": jnp.ones(2)})
        >>> sorted(found["w"]), sorted(found["b"])
        (['z'], [])
    """

    def pull_back(params: Any, seed: tuple[jax.Array, ...]) -> Any:
        values, back = jax.vjp(lambda params: _in_order(terms(params), names), params)
        return back([x.astype(value.dtype) for x, value in zip(seed, values, strict=True)])[0]

    closed = jax.make_jaxpr(pull_back)(params, (jax.ShapeDtypeStruct((), np.float32),) * len(names))
    nothing = [_NONE] * len(jax.tree.leaves(params))
    reached = dependence(closed.jaxpr, [*nothing, *(frozenset([name]) for name in names)])
    return jax.tree.unflatten(jax.tree.structure(params), reached)


def dependence(jaxpr: core.Jaxpr, sources: Sequence[Sources]) -> list[Sources]:
    """What each output depends on, given what each input does; never too little. Loops go to a fixed point."""
    known = dict(zip(jaxpr.invars, sources, strict=True))

    def read(atom: Any) -> Sources:
        return _NONE if isinstance(atom, core.Literal) else known.get(atom, _NONE)

    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        if any(inputs):
            known.update(zip(eqn.outvars, _apply(eqn, inputs), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(eqn: core.JaxprEqn, inputs: list[Sources]) -> list[Sources]:
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return _scan(params["jaxpr"].jaxpr, inputs, *_lengths(params))
    if name == "while":
        return _while(params, inputs)
    if name == "cond":
        branches = [dependence(branch.jaxpr, inputs[1:]) for branch in params["branches"]]
        return [_union((inputs[0], *column)) for column in zip(*branches, strict=True)]
    if name in _CALLS:
        inner = next((params[key] for key in _CALL_PARAMS if key in params), None)
        inner = inner.jaxpr if isinstance(inner, core.ClosedJaxpr) else inner
        if inner is not None and len(inner.invars) == len(inputs):
            return dependence(inner, inputs)
    if name == "mul" and any(isinstance(x, core.Literal) and not np.any(x.val) for x in eqn.invars):
        return [_NONE]
    return [_union(inputs)] * len(eqn.outvars)


def _lengths(scan: Mapping[str, Any]) -> tuple[int, int]:
    """How many inputs of a scan are constants, and how many are carried."""
    if "num_carry" in scan:
        return scan["num_consts"], scan["num_carry"]
    consts, carried, _ = scan["ft_in"].unpack()  # jax 0.12
    return len(consts), len(carried)


def _scan(body: core.Jaxpr, inputs: list[Sources], consts: int, carried: int) -> list[Sources]:
    before, rest = inputs[: consts + carried], inputs[consts + carried :]
    fixed, carry = before[:consts], before[consts:]
    while True:
        out = dependence(body, [*fixed, *carry, *rest])
        grown = [old | new for old, new in zip(carry, out)]
        if grown == carry:
            return out
        carry = grown


def _while(params: Mapping[str, Any], inputs: list[Sources]) -> list[Sources]:
    tested, held = params["cond_nconsts"], params["body_nconsts"]
    test, fixed, carry = inputs[:tested], inputs[tested : tested + held], inputs[tested + held :]
    while True:
        (again,) = dependence(params["cond_jaxpr"].jaxpr, [*test, *carry])
        out = dependence(params["body_jaxpr"].jaxpr, [*fixed, *carry])
        grown = [old | new | again for old, new in zip(carry, out, strict=True)]
        if grown == carry:
            return carry
        carry = grown


def _union(parts: Sequence[Sources]) -> Sources:
    return functools.reduce(frozenset.union, parts, _NONE)


def _in_order(values: Mapping[str, jax.Array], names: Sequence[str]) -> list[jax.Array]:
    return [values[name] for name in names]
