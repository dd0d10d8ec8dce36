"""One microbatch: call the loss function, weigh its tokens, and keep what was measured as partial rows."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from probes_jax.observe.binding import Captured
from probes_jax.observe.chosen import means
from probes_jax.observe.evaluation import Evaluation
from probes_jax.observe.named import LossObserver, observing
from probes_jax.observe.point import INPUT, Point
from probes_jax.observe.probes import Probes
from probes_jax.observe.rngs import Rngs
from probes_jax.observe.roles import role_of
from probes_jax.signals.experts import Loads
from probes_jax.signals.logits import has_classes, measure_logits
from probes_jax.signals.loss import measure_extra, measure_loss, measure_scalar_loss, weighted_sums
from probes_jax.signals.modality import measure_scales, measure_shares
from probes_jax.signals.tokens import Spread, fit_valid, measure_tokens
from probes_jax.spec.plan import Plan
from probes_jax.stats.attention import LOGIT, apart, measure_attention
from probes_jax.stats.branch import measure_branch
from probes_jax.stats.explicit import summarize_where_it_lies
from probes_jax.stats.moments import summarize_moments
from probes_jax.stats.partial import WHOLE, Split
from probes_jax.stats.per_token import ATTENTION, FAMILIES, MEDIA, RESIDUAL, ROUTER, PerToken, mean_square
from probes_jax.stats.precision import summarize_moments_precisely
from probes_jax.stats.routing import count_experts, margins, read_routing, summarize_bias
from probes_jax.stats.summary import Summary
from probes_jax.step.batch import naming_keys
from probes_jax.step.loss import Tokens, check_loss, find_logits
from probes_jax.step.partition import Partition
from probes_jax.step.select import Path

UNFIT = (
    "positions of shape {0} are not those of the loss, {1}, so which of them hold a token is not known; say so: "
    "pj.Loss(valid=...)"
)
LEFT_OUT = "left out by Plan without"
UNSEEN = {  # what a plan asked for, and the model has nothing of that kind that is seen
    RESIDUAL: "no sum of a residual stream and a branch was seen: they are found where a module adds them with +, as "
    "the layers gave them (no jnp.add, no cast between)",
    ATTENTION: "no attention was seen: it is measured in jax.nn.dot_product_attention and in Flax's attention layers",
}
Layers = Mapping[Point, tuple[int, ...]]  # length of each axis of scanned layers


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "weight",
        "rows",
        "points",
        "extra",
        "state",
        "aux",
        "raw",
        "gradients",
        "tokens",
        "loads",
        "noise",
    ),
    meta_fields=("names", "gradient_names", "seen", "missing"),
)
@dataclasses.dataclass(frozen=True)
class Part:
    """What one microbatch leaves behind beside its gradient.

    Attributes:
        weight: Sum of the token weights, float32 scalar; 1 for a loss given as one scalar.
        rows: Loss and logit summaries by name.
        points: Activation summaries, in forward order.
        extra: Summaries of the optimized scalars by name.
        state: The model's new state.
        aux: `Loss.aux`.
        names: The point behind each of `points` (static).
        raw: Everything observed, as `Evaluation` keeps it: the structure of the slots of taps.
        gradients: Summaries of the backward gradients, and `gradient_names` the point behind each (static).
        seen: Every point of the trace, and `missing` (name, reason) of what does not report (static). Filled in for a
            loop of the user's, which hands nothing else from the forward pass to `Monitor.measure`.
        tokens: Summaries of what was measured of each token.
        loads: Valid tokens of each expert.
        noise: What the gradients of microbatches leave for the gradient noise scale (`step.noise.Noise`), or None.
    """

    weight: jax.Array
    rows: dict[str, Summary]
    points: tuple[Summary, ...]
    extra: dict[str, Summary]
    state: Any
    aux: Any
    names: tuple[Point, ...]
    raw: Any = ()
    gradients: tuple[Summary, ...] = ()
    gradient_names: tuple[Point, ...] = ()
    seen: tuple[Point, ...] = ()
    missing: tuple[tuple[str, str], ...] = ()
    tokens: tuple[Spread, ...] = ()
    loads: tuple[Loads, ...] = ()
    noise: Any = None

    def merge(self, later: Part) -> Part:
        """Both parts together; the state is the later one's."""

        def both(mine: dict[str, Summary], theirs: dict[str, Summary]) -> dict[str, Summary]:
            return {key: value.merge(theirs[key]) for key, value in mine.items()}

        return Part(
            self.weight + later.weight,
            both(self.rows, later.rows),
            tuple(mine.merge(theirs) for mine, theirs in zip(self.points, later.points)),
            both(self.extra, later.extra),
            later.state,
            later.aux,
            self.names,
            tokens=tuple(mine.merge(theirs) for mine, theirs in zip(self.tokens, later.tokens)),
            loads=tuple(mine.merge(theirs) for mine, theirs in zip(self.loads, later.loads)),
            noise=None if self.noise is None else self.noise.merge(later.noise),
        )


@dataclasses.dataclass
class Notes:
    """What tracing found out about the model; the same on every trace of one program."""

    seen: tuple[Point, ...] = ()
    left_out: tuple[Point, ...] = ()  # by the plan
    layers: Layers = dataclasses.field(default_factory=dict)
    tokens: int = 1  # in one microbatch, valid or not
    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    routes: bool = False  # some router was seen
    extra: tuple[str, ...] = ()  # names of the optimized scalars
    reach: Mapping[Path, frozenset[str]] = dataclasses.field(default_factory=dict)  # those that train each parameter
    stacks: dict[tuple[str, ...], tuple[int, ...]] = dataclasses.field(default_factory=dict)
    axes: dict[tuple[str, ...], int] = dataclasses.field(default_factory=dict)
    backward: Callable[[Any], dict[Point, Summary]] = lambda gradient: {}


@dataclasses.dataclass(frozen=True)
class Objective:
    """The function that is differentiated.

    Attributes:
        binding: The wrapped model.
        loss_fn: The user's loss function.
        plan: What is measured.
        partition: What is known of the mesh.
        scan: Observe activations (the full program).
        probes: Measure anything at all; off gives the plain loss.
        routes: Look at routers also without a scan.
    """

    binding: Any
    loss_fn: Callable[..., Any]
    plan: Plan
    partition: Partition
    scan: bool
    probes: bool
    routes: bool = False

    @property
    def backward(self) -> bool:
        """Whether gradients of activations are measured."""
        return self.observes and self.plan.backward

    @property
    def observes(self) -> bool:
        """Whether the full program looks at the model: at activations, their gradients, or what of it is missing."""
        families = {"act", "residual", "attention", "router"}
        return self.scan and (self.plan.backward or not families <= set(self.plan.left_out))

    def __call__(
        self, params: Any, state: Any, batch: Any, key: jax.Array, notes: Notes, taps: Any = None
    ) -> tuple[jax.Array, jax.Array, Part]:
        """Sum of weighted losses, sum of weights, and everything measured, of one microbatch."""
        size = next((x.shape[0] for x in jax.tree.leaves(batch) if jnp.ndim(x)), 0)
        probes = self._probes(size) if self.observes or self.routes else None
        evaluation = Evaluation(taps)
        bound = self.binding.bind(params, state, rngs=Rngs(key), measure=probes, evaluation=evaluation)
        own = LossObserver(self._measure(size), evaluation)
        with contextlib.ExitStack() as stack:
            if self.observes:
                stack.enter_context(observing(own))
                stack.enter_context(evaluation.around(self.loss_fn))
            stack.enter_context(naming_keys(batch))
            tokens = check_loss(self.loss_fn(bound, batch, Rngs(key)), self.plan.groups, self.plan.modalities)
        captured, result = bound.finish(), own.result()
        notes.tokens, notes.extra = max(tokens.nll.size, 1), tuple(tokens.extra)
        missing = {**captured.missing, **result.missing}
        of_tokens, loads = self._of_tokens(captured.tokens, missing, tokens, notes)
        notes.routes = bool(loads)
        seen = tuple(point for point in (*captured.seen, *result.seen) if point.class_name not in FAMILIES)
        found = {**captured.points, **result.points}
        notes.layers = {point: rows.stack_shape() for point, rows in found.items()}
        notes.seen = tuple(point for point in seen if self._is_wanted(point, notes.layers))
        notes.left_out = tuple(point for point in seen if point not in notes.seen)
        notes.stacks, notes.axes = dict(captured.stacks), dict(captured.axes)
        notes.backward = lambda found: self._tapped({**captured.backward(found), **own.backward(found)}, notes.layers)
        missing = {point: why for point, why in missing.items() if point.class_name not in FAMILIES}
        missing = self._wanted(missing if self.observes else {}, notes.layers)
        notes.missing.update({str(point): why for point, why in missing.items()})
        total, weight = self._sums(tokens)
        rows, extra = self._rows(tokens, weight, captured.outputs, notes) if self.probes else ({}, {})
        rows |= self._of_modalities(captured, tokens, notes) if self.probes else {}
        points = self._wanted(found, notes.layers)
        names = tuple(points)
        part = Part(
            weight,
            rows,
            tuple(points.values()),
            extra,
            captured.state,
            tokens.aux,
            names,
            evaluation.raw,
            tokens=of_tokens,
            loads=loads,
        )
        return total, weight, part

    def extra(self, params: Any, state: Any, batch: Any, key: jax.Array) -> dict[str, jax.Array]:
        """The optimized scalars beside the loss, with nothing observed."""
        bound = self.binding.bind(params, state, rngs=Rngs(key))
        with naming_keys(batch):
            tokens = check_loss(self.loss_fn(bound, batch, Rngs(key)), self.plan.groups, self.plan.modalities)
        bound.finish()
        return tokens.extra

    def _probes(self, batch: int) -> Probes:
        without, plan = self.plan.left_out, self.plan
        return Probes(
            self._measure(batch) if self.observes else None,
            measure_branch if self.observes and "residual" not in without else None,
            None if "router" in without else lambda output: read_routing(output, plan.top_k),
            measure_attention if self.observes and "attention" not in without else None,
            mean_square if self.scan and self.plan.modalities else None,
            plan.roles,
        )

    def _of_tokens(
        self, found: Mapping[Point, PerToken], missing: Mapping[Point, str], tokens: Tokens, notes: Notes
    ) -> tuple[tuple[Spread, ...], tuple[Loads, ...]]:
        """Summaries of what was measured of each token, and the loads of experts."""
        loads = []
        alike: dict[Any, dict[tuple[str, ...], PerToken]] = {}
        asked = set(FAMILIES).difference(self.plan.left_out)
        missing = {point: why for point, why in missing.items() if point.class_name in asked}
        for point, each in found.items():
            if each.family == MEDIA:
                continue
            positions = each.values.shape[len(each.stack_shape()) : -1]
            if fit_valid(tokens.valid, positions) is None:
                missing[point] = UNFIT.format(positions, () if tokens.valid is None else tokens.valid.shape)
                continue
            rows = point.labels(each.stack_shape(), each.family)
            if each.family == ROUTER:
                loads.append(self._loads(point, each, tokens.valid, positions, rows))
                each = margins(each)
                if each is None or not self.scan:
                    continue
            for part in apart(each):
                labels = tuple(row.replace("{stat}", f"{name}/{{stat}}") for row in rows for name in part.names)
                alike.setdefault((positions, part.names, each.family), {})[labels] = part
        notes.missing.update({f"{point.class_name}/{point}": why for point, why in missing.items()})
        named = {each.family for each in found.values()} | {point.class_name for point in missing}
        if self.observes:
            notes.missing.update({family: why for family, why in UNSEEN.items() if family in asked - named})
        measured = []
        for (positions, names, family), group in alike.items():
            valid = fit_valid(tokens.valid, positions)
            assert valid is not None  # asked above
            sketch = names != (LOGIT,)
            lies = self.partition.heads if family == ATTENTION else self.partition.tokens
            measured.append(measure_tokens(group, valid, lies(positions), self.partition.mesh, sketch=sketch))
        return tuple(measured), tuple(loads)

    def _of_modalities(self, captured: Captured, tokens: Tokens, notes: Notes) -> dict[str, Summary]:
        """Share of each modality, and in a scan the scale at which it enters the first block."""
        count, modality, valid = len(self.plan.modalities), tokens.modality, tokens.valid
        if modality is None or valid is None:
            if count:
                notes.missing["media"] = "loss_fn does not say which modality a token is of: pj.Loss(modality=...)"
            return {}
        split = self.partition.tokens(modality.shape)
        share = functools.partial(measure_shares, count=count)
        found = {"modality": summarize_where_it_lies(share, split, modality, valid)}
        entry = next((each for each in captured.tokens.values() if each.family == MEDIA), None)
        if not self.scan:
            return found
        if entry is None or entry.values.shape[len(entry.stack_shape()) : -1] != modality.shape:
            notes.missing["media/scale_ratio"] = (
                "no block of the model is given a stream of the modalities' shape "
                f"{modality.shape}; say which modules are blocks: pj.Plan(roles=(('name', 'residual'),))"
            )
            return found
        square = entry.values[(0,) * len(entry.stack_shape())][..., 0]
        scale = functools.partial(measure_scales, count=count)
        return found | {"scale": summarize_where_it_lies(scale, split, square, modality, valid)}

    def _loads(
        self, point: Point, found: PerToken, valid: jax.Array | None, positions: tuple[int, ...], rows: tuple[str, ...]
    ) -> Loads:
        fitting = fit_valid(valid, positions)
        assert fitting is not None  # asked before

        def count(values: jax.Array, valid: jax.Array, split: Split) -> Summary:
            return count_experts(dataclasses.replace(found, values=values), valid, split)

        stack = ((),) * len(found.stack_shape())
        tokens = self.partition.tokens(positions)
        split = Split((*stack, *tokens.dims), tokens.sizes)
        counted = summarize_where_it_lies(count, split, found.values, fitting)
        bias = None
        if self.scan and found.bias is not None:
            bias = summarize_where_it_lies(summarize_bias, WHOLE, found.bias)
        return Loads(counted, tuple(row.removesuffix("/{stat}") for row in rows), point.path, bias)

    def matches(self, text: str, point: Point, layers: Layers) -> bool:
        """Whether a word of `Plan.include` or `Plan.exclude` means this point."""
        if text.startswith("role:"):
            return text == f"role:{role_of(point, self.plan.roles)}"
        return means(text, str(point), layers.get(point, ()))

    def _is_wanted(self, point: Point, layers: Layers) -> bool:
        included = not self.plan.include or any(self.matches(text, point, layers) for text in self.plan.include)
        return included and not any(self.matches(text, point, layers) for text in self.plan.exclude)

    def _wanted(self, points: Mapping[Point, Any], layers: Layers) -> dict[Point, Any]:
        """Without those that the plan excludes; what nobody reads is not computed."""
        return {point: value for point, value in points.items() if self._is_wanted(point, layers)}

    def _tapped(self, points: Mapping[Point, Any], layers: Layers) -> dict[Point, Any]:
        return {point: value for point, value in self._wanted(points, layers).items() if point.method != INPUT}

    def _measure(self, batch: int) -> Callable[[jax.Array], Summary]:
        summarize = summarize_moments_precisely if self.plan.precision else summarize_moments

        def measure(x: jax.Array) -> Summary:
            return summarize_where_it_lies(summarize, self.partition.activation(x.shape, batch), x)

        return measure

    def _sums(self, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        """sum(m * nll) + sum(m) * sum(extra), and sum(m); the second is a constant to the gradient."""
        if tokens.weight is None:
            return tokens.nll.astype(jnp.float32), jnp.float32(1.0)
        losses, weights = weighted_sums(tokens.nll, jax.lax.stop_gradient(tokens.weight))
        weight = jnp.sum(weights)
        total = jnp.sum(losses)
        for value in tokens.extra.values():
            total = total + jnp.where(weight != 0, value.astype(jnp.float32) * weight, 0.0)
        return total, weight

    def _rows(
        self, tokens: Tokens, weight: jax.Array, outputs: list[Any], notes: Notes
    ) -> tuple[dict[str, Summary], dict[str, Summary]]:
        split = self.partition.tokens(tokens.nll.shape)
        if tokens.weight is None:
            rows = measure_scalar_loss(tokens.nll, split.axes)
            notes.missing["loss/shard"] = "loss_fn returns one number; return pj.Loss(nll=...), with a loss per token"
        else:
            rows = summarize_where_it_lies(
                functools.partial(measure_loss, groups=self.plan.groups), split, tokens.nll, tokens.weight, tokens.group
            )
            uncut = set(split.axes) - set(rows["loss"].axes)
            if uncut and not self.partition.manual:
                notes.missing["loss/shard"] = (
                    f"tokens of shape {tokens.nll.shape} do not divide over the mesh axes {sorted(uncut)}; use fewer "
                    "microbatches, or more examples"
                )
        logits, reason = find_logits(tokens, outputs)
        if "logits" in self.plan.left_out:
            notes.missing["logits"] = LEFT_OUT
        elif logits is None:
            notes.missing["logits"] = reason
        else:
            if not has_classes(logits.shape):
                notes.missing["logits/logsumexp"] = f"the model's output {list(logits.shape)} has no axis of classes"
            fits = tokens.weight is not None and logits.shape[:-1] == tokens.nll.shape
            leading = self.partition.activation(logits.shape, tokens.nll.shape[0] if tokens.nll.ndim else -1)
            rows |= summarize_where_it_lies(measure_logits, leading, logits, tokens.weight if fits else None)
        return rows, {name: measure_extra(value, weight, split.axes) for name, value in tokens.extra.items()}
