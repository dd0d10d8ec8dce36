"""What a loss function returns."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss per token (or example, or pixel), and what is needed to weigh and group them.

    What is optimized is `sum(m * nll) / sum(m)` over all microbatches and shards, plus the scalars of `extra`
    (averaged over microbatches, weighted by their valid tokens). `aux` is not optimized.

    Attributes:
        nll: Negative log-likelihood in nats, or any other loss to be averaged: `[batch, length]`, `[batch]`, or with
            more axes. One element is one token; `Plan.unit` says what else it is.
        mask: Mask or weights that broadcast to `nll`; None counts every token. Valid means weight > 0. A constant of
            the loss: no gradient flows through it.
        group: Integer id of the data source or modality, `[batch]` or the shape of `nll`; index of `Plan.groups`.
        logits: Output logits `[..., classes]`. None: the model's one float output with the largest last axis.
        extra: Optimized scalars reported apart, for example a z-loss.
        aux: Anything else; handed back in `Report.aux`.
        valid: Which positions of the model hold a token, bool, where these are not those of `mask > 0`: a prompt that
            is not trained on, images before a text. In the shape that the model has them in, `[batch, positions]`.
            Metrics of residual paths, experts and attention count these.
        modality: Integer id of the modality of each position, index of `Plan.modalities`, in the shape of `valid` (or
            of `nll`, without it).
    """

    nll: jax.Array
    mask: jax.Array | None = None
    group: jax.Array | None = None
    logits: jax.Array | None = None
    extra: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)
    aux: Any = None
    valid: jax.Array | None = None
    modality: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Tokens:
    """A checked loss: all arrays of one shape. `weight` is None for a loss given as one scalar.

    `valid` says which positions of the model count, in a shape of its own; None: all.
    """

    nll: jax.Array
    weight: jax.Array | None
    group: jax.Array | None
    logits: jax.Array | None
    extra: dict[str, jax.Array]
    aux: Any
    valid: jax.Array | None = None
    modality: jax.Array | None = None

    def __post_init__(self) -> None:
        for leaf in jax.tree.leaves(self.aux):
            if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex):
                raise TypeError(f"Loss aux must hold arrays only, got {type(leaf).__name__}; leave it out of aux")


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(jnp.shape(value))


def check_loss_fn(loss_fn: Any) -> None:
    """Refuses what cannot be called as `loss_fn(model, batch, rngs)`, without calling it.

    Raises:
        TypeError: With what to write.
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function (model, batch, rngs) -> pj.Loss, got {loss_fn!r}")
    called, refused = _inside_transforms(loss_fn), ""
    for follow in (True, False):  # a decorator may take what its function does not
        try:
            signature = inspect.signature(called, follow_wrapped=follow)
        except ValueError:  # what is not written in Python need not have one
            return
        try:
            signature.bind(*("model", "batch", "rngs"))
            return
        except TypeError as error:
            refused = refused or f"{getattr(called, '__name__', 'it')}{signature} does not ({error})"
    raise TypeError(
        f"loss_fn must take three arguments, loss_fn(model, batch, rngs), and {refused}; write def loss_fn(model, "
        "batch, rngs), also where rngs is not used, and fill in others with functools.partial"
    )


def _inside_transforms(loss_fn: Any) -> Any:
    """The function that JAX's and Flax's transforms around it call: they pass on what they get."""
    while hasattr(loss_fn, "__wrapped__"):
        home = getattr(loss_fn, "__globals__", {}).get("__name__") or type(loss_fn).__module__
        if home.partition(".")[0] not in ("jax", "jaxlib", "flax"):
            break
        loss_fn = loss_fn.__wrapped__
    return loss_fn


def check_loss(loss: Any, groups: tuple[str, ...], modalities: tuple[str, ...] = ()) -> Tokens:
    """Checks and broadcasts what the loss function returned.

    Raises:
        TypeError: It is neither a `Loss` nor a float scalar.
        ValueError: Shapes do not fit; the message names the field.
    """
    if not isinstance(loss, Loss):
        if not hasattr(loss, "dtype") or _shape(loss) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
            found = f"{type(loss).__name__} of shape {_shape(loss)}" if hasattr(loss, "dtype") else type(loss).__name__
            if loss is None:
                found = "None (it ends without a return)"
            raise TypeError(
                f"loss_fn must return pj.Loss or a float scalar, got {found}; return pj.Loss(nll=..., mask=...), with "
                "what is to be handed back as aux="
            )
        return Tokens(loss, None, None, None, {}, None)
    nll = _array("nll", loss.nll)
    if nll.ndim == 0 or not jnp.issubdtype(nll.dtype, jnp.floating):
        hint = "; a loss that is one number is returned as it is, without pj.Loss" if nll.ndim == 0 else ""
        raise ValueError(
            f"Loss nll must be float [batch, ...], one value per token or example, got {nll.dtype}{list(nll.shape)}"
            + hint
        )
    weight = jnp.ones(nll.shape, jnp.float32) if loss.mask is None else _fit("mask", loss.mask, nll)
    if not (
        jnp.issubdtype(weight.dtype, jnp.floating) or jnp.issubdtype(weight.dtype, jnp.integer) or weight.dtype == bool
    ):
        raise ValueError(f"Loss mask must be bool, integer or float, got {weight.dtype}")
    group = None
    if loss.group is not None:
        if not groups:
            raise ValueError(
                "Loss group is given but Plan.groups is empty; name the groups: pj.Plan(groups=('code', ...))"
            )
        group = _fit("group", loss.group, nll)
        if not jnp.issubdtype(group.dtype, jnp.integer):
            raise ValueError(f"Loss group must be integer ids into Plan.groups, got {group.dtype}")
    extra = {}
    if not isinstance(loss.extra, Mapping):
        raise TypeError(f"Loss extra must be a dict of scalars by name, got {type(loss.extra).__name__}")
    for name, value in loss.extra.items():
        if not isinstance(name, str) or not name or set(name) & set("/[]{} "):
            raise ValueError(f"Loss extra name {name!r} must be a word without '/', brackets, braces or spaces")
        extra[name] = _array(f"extra[{name!r}]", value)
        if extra[name].shape != ():
            raise ValueError(f"Loss extra[{name!r}] must be a scalar, got shape {_shape(value)}; reduce it first")
        if not jnp.issubdtype(extra[name].dtype, jnp.floating):
            raise ValueError(f"Loss extra[{name!r}] must be a float, got {extra[name].dtype}")
    logits = None if loss.logits is None else _array("logits", loss.logits)
    if logits is not None and (logits.ndim == 0 or not jnp.issubdtype(logits.dtype, jnp.floating)):
        raise ValueError(f"Loss logits must be float [..., classes], got {logits.dtype}{list(logits.shape)}")
    valid = weight > 0 if loss.valid is None else _array("valid", loss.valid)
    if valid.ndim == 0 or not (valid.dtype == bool or jnp.issubdtype(valid.dtype, jnp.integer)):
        raise ValueError(f"Loss valid must be bool [batch, positions], got {valid.dtype}{list(valid.shape)}")
    modality = None if loss.modality is None else _array("modality", loss.modality)
    if modality is not None:
        if not modalities:
            raise ValueError(
                "Loss modality is given but Plan.modalities is empty; name them, the text first: "
                "pj.Plan(modalities=('text', 'image'))"
            )
        if modality.shape != valid.shape or not jnp.issubdtype(modality.dtype, jnp.integer):
            raise ValueError(
                f"Loss modality must be integer ids {list(valid.shape)}, in the shape of valid (or of nll without it), "
                f"got {modality.dtype}{list(modality.shape)}"
            )
    valid = valid if valid.dtype == bool else valid > 0
    return Tokens(nll, weight, group, logits, extra, loss.aux, valid, modality)


def _array(field: str, value: Any) -> jax.Array:
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        raise TypeError(f"Loss {field} must be an array, got {type(value).__name__}") from None


def _fit(field: str, value: Any, nll: jax.Array) -> jax.Array:
    value = _array(field, value)
    if value.shape == nll.shape[: value.ndim] and value.ndim >= 1:  # per example: the same for its every token
        return jnp.broadcast_to(value.reshape(value.shape + (1,) * (nll.ndim - value.ndim)), nll.shape)
    raise ValueError(
        f"Loss {field} has shape {list(value.shape)}, nll has {list(nll.shape)}; they must be equal, or {field} [batch]"
    )


def find_logits(tokens: Tokens, outputs: list[Any]) -> tuple[jax.Array | None, str]:
    """The output logits, or None and the reason.

    Without `Loss.logits`: the model's one float output with the largest last axis, if there is exactly one.
    """
    if tokens.logits is not None:
        return jnp.asarray(tokens.logits), ""
    leaves = [
        x
        for x in jax.tree.leaves(outputs)
        if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating) and x.ndim >= 1
    ]
    if not leaves:
        return None, (
            "no float array came out of a call of the model (one inside a JAX transform in loss_fn stays inside); "
            "return the logits from the transform too, and pass Loss(logits=...)"
        )
    widest = max(x.shape[-1] for x in leaves)
    found = [x for x in leaves if x.shape[-1] == widest]
    if len(found) > 1:
        calls = f" in {len(outputs)} calls" if len(outputs) > 1 else ""
        return None, (
            f"{len(found)} outputs of the model{calls} have the largest last axis ({widest}), so which are the logits "
            "is not known; say so: pj.Loss(logits=...)"
        )
    return found[0], ""
