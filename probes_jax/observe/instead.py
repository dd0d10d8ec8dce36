"""What to write instead of a transform that brings nothing out, for messages about what is missing."""

from __future__ import annotations

_OBSERVE = "observe what {0} returns: pj.observe(name, x)"
_BRANCHES = "run {0} branches and choose with {1}"

# By transform: inside of a linen model, and of an nnx model where it is not lifted.
_LINEN = {
    "jax.checkpoint": "use nn.remat",
    "jax.vmap": "use nn.vmap",
    "jax.lax.scan": "use nn.scan",
    "jax.lax.fori_loop": "use nn.scan",
    "jax.lax.while_loop": "use nn.scan if its length is known",
    "jax.lax.cond": _BRANCHES.format("both", "jnp.where"),
    "jax.lax.switch": _BRANCHES.format("all", "jnp.select"),
    "jax.jit": "leave it out (the step is jitted), use nn.jit",
    "jax.grad": "use nn.grad, nn.value_and_grad or nn.vjp",
    "jax.jvp": "use nn.jvp",
    "nn.cond": _BRANCHES.format("both", "jnp.where"),
    "nn.switch": _BRANCHES.format("all", "jnp.select"),
    "nn.while_loop": "use nn.scan if its length is known",
}
_NNX = {
    **dict.fromkeys(
        ("jax.checkpoint", "jax.vmap", "jax.lax.cond", "jax.lax.switch"), "apply it in the model's own call"
    ),
    "jax.lax.scan": "use nnx.scan or jax.lax.scan in the model's own call",  # a fori_loop may be a scan
    "jax.lax.fori_loop": "make it a jax.lax.scan",
    "jax.lax.while_loop": "make it a jax.lax.scan if its length is known",
    "jax.jit": "leave it out (the step is jitted), pass the module to nnx.jit instead of closing over it",
    "jax.grad": "pass the module to nnx.grad or nnx.value_and_grad instead of closing over it",
    "jax.shard_map": "pass the module to nnx.shard_map instead of closing over it",
}


def instead_in_linen(name: str) -> str:
    """What to write in a linen model instead of a transform.

    >>> instead_in_linen("jax.checkpoint")
    'use nn.remat, move the module out of it, or observe what jax.checkpoint returns: pj.observe(name, x)'
    """
    return _together(_LINEN.get(name), name)


def instead_in_nnx(name: str) -> str:
    """What to write in an nnx model instead of a transform."""
    return _together(_NNX.get(name), name)


def _together(first: str | None, name: str) -> str:
    ways = [first] if first else []
    return f"{', '.join([*ways, 'move the module out of it'])}, or {_OBSERVE.format(name)}"
