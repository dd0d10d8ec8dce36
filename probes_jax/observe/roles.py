"""Which role a point has, from the names that Flax's own layers and common models use."""

from __future__ import annotations

import re
from collections.abc import Sequence

from probes_jax.observe.point import INPUT, Point

_Q, _K, _V = r"q|query|queries", r"k|key|keys", r"v|value|values"
_NORM = r"ln|norm|layer_?norm|rms_?norm"


def _projection(name: str) -> str:
    return rf"(?:{name})(?:_?(?:proj|projection|lin|linear|dense|einsum))?|w_?(?:{name})|to_(?:{name})"


def _normalized(name: str) -> str:
    return rf"(?:{name})_?(?:{_NORM})|(?:{_NORM})_?(?:{name})"


# The first rule that fits is taken. Names: the last element of the path, in small letters, without its number.
_NORMALIZED = (
    ("normalized_query", _normalized(_Q)),
    ("normalized_key", _normalized(_K)),
)
# Of the class, whatever the name says: `attention_norm` is no attention, `attn_dropout` neither.
_FIRST_BY_CLASS = (
    ("norm", r"\w*[Nn]orm(?:alization)?(?:_?\d+d?)?"),
    ("other", r"\w*(?:Dropout|Rotary|RoPE|Rope)\w*"),
    ("expert_output", r"\w*(?:MoE|Moe|Experts?)(?:Layer|Block)?"),
)
_BY_NAME = (
    ("query", _projection(_Q)),
    ("key", _projection(_K)),
    ("value", _projection(_V)),
    ("router", r"router|routing|moe_gate|gate_logits"),
    ("expert_output", r"experts?|moe|mixture|.*_experts?"),
    ("logits", r"(?:lm_)?head|logits?|lm_logits|unembed\w*|output_projection|classifier"),
    ("embedding", r"\w*embed\w*|wte|wpe|token_type"),
    ("attention_output", r"(?:self_|cross_)?att(?:n|ention)\w*"),
    ("feed_forward", r"mlp\w*|ffn?\w*|feed_?forward\w*|intermediate|(?:c_)?fc"),
    ("norm", rf"\w*(?:{_NORM})\w*"),
)
_BY_CLASS = (
    ("embedding", r"\w*Embed\w*"),
    ("attention_output", r"\w*Attention\w*"),
    ("feed_forward", r"\w*(?:MLP|Mlp|FeedForward|FFN)\w*"),
    ("router", r"\w*Router\w*"),
    ("residual", r"\w*(?:Block|Layer)(?:_\d+)?"),
)
_INSIDE_ATTENTION = re.compile(r"\w*att(?:n|ention)\w*")
_INSIDE_FEED_FORWARD = re.compile(r"mlp\w*|ffn?\w*|feed_?forward\w*|intermediate")
_EMBEDDING = re.compile(r"\w*embed\w*")
_LAYER_NORM = re.compile(r"\w*(?:Layer|RMS|Rms)_?Norm\w*")
_OUT = re.compile(r"o|out|o_?proj|out_?proj|output|c_?proj|wo|proj|attn_vec_einsum")


def role_of(point: Point, given: Sequence[tuple[str, str]] = ()) -> str:
    r"""One of `probes_jax.spec.roles.ROLES`, or a word of the caller's own.

    Args:
        point: Any point.
        given: (regular expression on the point's name, role) pairs; they go first, in their order.

    Example:
        >>> role_of(Point(("block_3", "attn", "query"), "DenseGeneral"))
        'query'
        >>> role_of(Point(("block_3",), "Block"), [(r"block\[3\]$", "last_residual")])
        'last_residual'
    """
    for pattern, role in given:
        if re.search(pattern, str(point)):
            return role
    if point.method == INPUT:
        return "expert_input" if _role(point) == "expert_output" else "residual"
    return _role(point)


def takes_input(point: Point) -> bool:
    """Whether what a module is given is a point too, named `<module>.input`.

    The sum of a residual stream is no module's output: it is read where a norm takes it in. A block that normalizes
    first has it before each branch there, one that normalizes last has it after each branch.

    Example:
        >>> takes_input(Point(("block_3", "ln_1"), "LayerNorm")), takes_input(Point(("block_3", "mlp"), "MLP"))
        (True, False)
    """
    role = _role(point)
    return role == "expert_output" or (role == "norm" and _LAYER_NORM.fullmatch(point.class_name) is not None)


def _role(point: Point) -> str:
    names = [re.sub(r"_?\d+\Z", "", element).lstrip("_").lower() for element in point.path if not element.isdecimal()]
    last, above = (names or [""])[-1], names[-2] if len(names) > 1 else ""
    if _is_output_layer(point, last) or (not point.path and point.method == "__call__"):
        return "logits"
    for rules, word in ((_NORMALIZED, last), (_FIRST_BY_CLASS, point.class_name)):
        if (role := _first(rules, word)) is not None:
            return role
    if _INSIDE_ATTENTION.fullmatch(above) and _OUT.fullmatch(last):
        return "attention_output"
    role = _first(_BY_NAME, last) or _first(_BY_CLASS, point.class_name)
    return role or ("feed_forward" if _INSIDE_FEED_FORWARD.fullmatch(above) else "other")


def _is_output_layer(point: Point, last: str) -> bool:
    """An embedding used the other way round."""
    is_embedding = _EMBEDDING.fullmatch(last) or "Embed" in point.class_name
    return point.method in ("attend", "decode") and bool(is_embedding)


def _first(rules: Sequence[tuple[str, str]], word: str) -> str | None:
    return next((role for role, pattern in rules if re.fullmatch(pattern, word)), None)
