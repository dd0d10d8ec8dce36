"""Which parameters a term's gradient reaches: as its gradient itself says, taken term by term."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from probes_jax.observe.reach import find_reach


@jax.custom_vjp
def half(x, y):
    return x * y


half.defvjp(lambda x, y: (x * y, (x, y)), lambda kept, g: (g * kept[1], jnp.zeros_like(kept[1])))  # drops y's gradient


def plain(p):
    gate = jax.nn.softmax(p["a"])
    counts = jax.nn.one_hot(jnp.argmax(p["a"]), 3)
    return {
        "balance": (gate * counts).sum(),
        "detached": jax.lax.stop_gradient((gate * p["b"]).sum()),
        "counts": counts.sum(),
        "off": 0.0 * (gate * p["b"]).sum(),
        "constant": jnp.float32(1.0),
        "half": half(p["a"], p["b"]).sum(),
    }


def scanned(p):
    def body(carry, w):
        hidden, total, dropped = carry
        hidden = jnp.tanh(hidden * w)
        return (hidden, total + hidden.sum(), dropped + jax.lax.stop_gradient(hidden.sum())), (w * p["b"]).sum()

    start = (p["a"], jnp.float32(0), jnp.float32(0))
    (hidden, total, dropped), each = jax.lax.scan(jax.checkpoint(body), start, p["c"])
    return {"last": hidden.sum(), "total": total, "dropped": dropped, "each": each.sum()}


def branched(p):
    chosen = jax.lax.cond(p["b"].sum() > 0, lambda x, y: x.sum(), lambda x, y: (x * y).sum(), p["a"], p["b"])
    inner = jax.jit(lambda a, b: (a.sum() ** 2, jax.lax.stop_gradient(b).sum()))
    first, second = inner(p["a"], p["b"])
    return {"chosen": chosen, "first": first, "second": second, "mapped": jax.vmap(jnp.sin)(p["c"]).sum()}


@pytest.mark.parametrize("terms", [plain, scanned, branched])
def test_as_the_gradient_of_each_term_says(terms):
    rng = np.random.default_rng(0)
    # Of `cond` both branches count: with b below zero the one is taken that depends on both.
    params = {"a": jnp.asarray(rng.normal(size=3), jnp.float32), "b": -jnp.ones(3), "c": jnp.full((4, 3), 0.5)}
    names = tuple(terms(params))
    found = find_reach(terms, names, params)
    for name in names:
        gradient = jax.grad(lambda p, name=name: terms(p)[name])(params)
        assert {key for key in params if name in found[key]} == {k for k, g in gradient.items() if jnp.any(g != 0)}
    assert {name for name in names if not any(name in of for of in found.values())} == {
        plain: {"detached", "counts", "off", "constant"}, scanned: {"dropped"}, branched: {"second"},
    }[terms]  # fmt: skip


def test_what_it_does_not_know_counts_as_reached():
    def terms(p):
        return {"solved": jnp.linalg.solve(jnp.eye(3) + p["c"][:3], p["a"]).sum()}

    params = {"a": jnp.ones(3), "b": jnp.ones(3), "c": jnp.ones((4, 3))}
    found = find_reach(terms, ("solved",), params)
    assert {key: bool(of) for key, of in found.items()} == {"a": True, "b": False, "c": True}
