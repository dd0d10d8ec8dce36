"""What a wrapped model can do, whatever framework it is written in."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from probes_jax.observe.evaluation import Evaluation
from probes_jax.observe.point import Point
from probes_jax.observe.probes import Probes
from probes_jax.observe.rngs import Rngs
from probes_jax.observe.tap import Measure
from probes_jax.stats.per_token import PerToken
from probes_jax.stats.summary import Summary

LossFn = Callable[..., Any]  # (model, batch, rngs) -> anything


class ModelParts(NamedTuple):
    """A model's arrays.

    Attributes:
        params: Nested dict of the trained arrays; all keys are strings, also list indices.
        state: Nested dict of everything else the model carries (batch statistics, caches); `{}` if none.
    """

    params: Any
    state: Any


@dataclasses.dataclass(frozen=True)
class Captured:
    """What one evaluation of a loss function left behind.

    Attributes:
        points: A summary per point, in the order in which the values were computed. Summaries from inside a scan
            over layers have leading stack axes.
        state: The model's new state, of the same structure as the one bound.
        outputs: What each root call returned, in order.
        seen: Every point the trace came across, also those without a summary.
        missing: Points seen but not reported: why, and the line that mends it.
        stacks: Scanned parameter subtrees: path prefix to (layer axis, number of layers), see `names.Stacks`.
        raw: Everything observed, as it came back: a pytree. `slots_like` makes of it what `bind(taps=)` takes.
        backward: From the gradient of the slots to a summary per point, of the gradients that came by. A point whose
            value the loss does not depend on has a summary of nothing.
        axes: Layer axis of each parameter of which it is known for itself.
        tokens: What was measured of each token; their class is the family (`per_token.FAMILIES`).
    """

    points: dict[Point, Summary]
    state: Any
    outputs: list[Any]
    seen: tuple[Point, ...]
    missing: dict[Point, str]
    stacks: dict[tuple[str, ...], tuple[int, ...]]
    raw: Any = ()
    backward: Callable[[Any], dict[Point, Summary]] = lambda gradient: {}
    axes: dict[tuple[str, ...], int] = dataclasses.field(default_factory=dict)
    tokens: dict[Point, PerToken] = dataclasses.field(default_factory=dict)


class Bound(abc.ABC):
    """A model bound to its parameters: what a loss function gets as `model`.

    Callable like the module. Methods of the module are called in the same bound way (`bound.encode(x)`), submodules
    too (`bound.decoder(x)`); other attributes read through.
    """

    @abc.abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""

    @abc.abstractmethod
    def finish(self) -> Captured:
        """Everything observed since `bind`. Call it once, in the same trace as `bind`."""


class Binding(abc.ABC):
    """A model, and how to make, bind and observe its arrays. The model is not edited and not changed.

    Attributes:
        has_arrays: The arrays exist already, and `init` copies them (nnx). False: `init` computes them (linen), and
            under `jax.jit` with output shardings no device ever holds the whole of a large model.
    """

    has_arrays: bool = False

    @abc.abstractmethod
    def init(self, loss_fn: LossFn, batch: Any, key: jax.Array, variables: Any = None) -> ModelParts:
        """The model's first arrays. Pure: it may be traced.

        Args:
            loss_fn: The user's loss function; only it knows how the model is called.
            batch: An example batch.
            key: A random key.
            variables: Weights to start from. They are checked against the model.

        Raises:
            TypeError, ValueError: `variables` do not fit the model; the message says where.
        """

    @abc.abstractmethod
    def partition_specs(self, params: Any, state: Any) -> ModelParts:
        """The model's own partition metadata: a `PartitionSpec` per array, None where the model says nothing."""

    @abc.abstractmethod
    def bind(
        self,
        params: Any,
        state: Any,
        *,
        rngs: Rngs | None = None,
        measure: Measure | Probes | None = None,
        taps: Any = None,
        evaluation: Evaluation | None = None,
    ) -> Bound:
        """Binds arrays to the model, for one evaluation of the loss function.

        Args:
            params: As `init` returns them.
            state: As `init` returns it, or as the last step left it.
            rngs: Random keys of this step; None for a model that needs none.
            measure: Called on every observed float array where it is produced, also inside the body of a scan or a
                checkpointed block; the summary leaves that body as one of its outputs. `Probes` measures more than
                that. None observes nothing, and the model runs as if unwrapped.
            taps: Slots for what is measured of backward gradients, from `slots_like`. Their gradient is what
                `Captured.backward` reads. None takes no gradient.
            evaluation: Keeps what is observed, and has the slots, where others observe the same evaluation; None makes
                one of these taps.
        """

    @abc.abstractmethod
    def module(self, params: Any, state: Any, *, copy: bool = True) -> Any:
        """The model with these weights, usable without this library.

        Args:
            params: As `init` returns them.
            state: As `init` returns it.
            copy: Copy the arrays, so that they outlive a step that donates its state.
        """
