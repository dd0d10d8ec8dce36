"""The train state: made once, then replaced step by step."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from probes_jax.observe.wrap import wrap
from probes_jax.spec import check
from probes_jax.spec.plan import Plan
from probes_jax.step.abstract import refuse_abstract
from probes_jax.step.alike import check_alike, setting_facts, shape_facts
from probes_jax.step.batch import check_batch
from probes_jax.step.create import describe, make_core
from probes_jax.step.loss import check_loss_fn
from probes_jax.step.loss_scale import as_loss_scale
from probes_jax.step.monitor import MonitorState
from probes_jax.step.partition import find_mesh, find_partition
from probes_jax.step.select import Wrt, chooser, join
from probes_jax.step.settings import Settings
from probes_jax.step.update import Core


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("step", "params", "frozen", "model_state", "opt_state", "key", "monitor"),
    meta_fields=("settings",),
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that training needs, as one pytree: save and restore it with orbax like any other.

    Attributes:
        step: Steps attempted so far. A 0-d NumPy array, so that the host knows it without asking the device.
        params: Trained parameters, nested dict.
        frozen: Parameters that `wrt` leaves out, nested dict.
        model_state: Everything else that the model carries (batch statistics, nnx state).
        opt_state: State of the optimizer.
        key: Raw data of the random key; a step uses `fold_in(key, step)`.
        monitor: Detector windows, counters, loss scale, cumulative tokens.
        settings: Static: model, optimizer, plan, compiled programs.
    """

    step: Any
    params: Any
    frozen: Any
    model_state: Any
    opt_state: Any
    key: jax.Array
    monitor: MonitorState
    settings: Settings

    @classmethod
    def create(
        cls,
        *,
        model: Any,
        tx: Any,
        loss_fn: Any,
        batch: Any,
        rngs: Any = 0,
        plan: Plan | None = None,
        variables: Any = None,
        shardings: Any = None,
        wrt: Wrt = None,
        microbatches: int = 1,
        loss_scale: Any = None,
        donate: bool = True,
        abstract: bool = False,
    ) -> TrainState:
        """Makes the state before the first step.

        Args:
            model: What `pj.wrap` returned, or a linen or nnx module.
            tx: Optimizer; `pj.chain` names its stages, so that learning rate and clip threshold are known.
            loss_fn: `loss_fn(model, batch, rngs)` returning `pj.Loss` or a float scalar.
            batch: An example batch: its shapes, dtypes and shardings are what the step will be called with.
            rngs: A `jax.random.key`, or an integer seed.
            plan: What is measured; `pj.Plan()` by default.
            variables: Pretrained parameters: linen variables, or nnx state. None initializes them.
            shardings: Tree of shardings for the parameters, or a rule `(path, shape) -> PartitionSpec | None`; the
                path is the tuple of names down to the array, `("blocks", "mlp", "up", "kernel")`.
                None: the model's own partition metadata. Parameters are initialized inside jit with them.
            wrt: What is trained: a regular expression on `a/b/kernel`, or a function of (path, array).
            microbatches: Splits axis 0 of the batch; gradients are added up before one update.
            loss_scale: A number (static), `"dynamic"`, or `pj.LossScale(...)`.
            donate: Let the step reuse the old state's memory. The old state is then gone after a step.
            abstract: Make shapes with shardings instead of arrays, for `pj.inspect`: of a model larger than this
                machine, or on a mesh of `pj.topology` devices. The batch may then be `jax.ShapeDtypeStruct`s.

        Raises:
            TypeError, ValueError: An argument does not fit; the message names it and says what to do. In a job of
                several processes also: a process was given something else than the others; it is named.
        """
        plan = Plan() if plan is None else plan
        if not isinstance(plan, Plan):
            raise TypeError(f"plan must be a pj.Plan, got {type(plan).__name__}")
        if not all(callable(getattr(tx, part, None)) for part in ("init", "update")):
            raise TypeError(
                f"tx must be an optimizer such as optax.adam(1e-3) or pj.chain(...), got {tx!r}; several are made one "
                "optimizer by optax.partition({label: optimizer}, labels), and models that are trained apart take a "
                "loop with a pj.Monitor each"
            )
        check_loss_fn(loss_fn)
        check.flag("donate", donate)
        check.flag("abstract", abstract)
        microbatches = check.integer("microbatches", microbatches, 1)
        chooser(wrt)
        check_batch(batch, microbatches)
        scale = as_loss_scale(loss_scale)
        key = _as_key(rngs)
        binding = wrap(model)
        partition = find_partition(plan, batch, find_mesh(batch, shardings))
        facts = setting_facts(plan, microbatches=microbatches, loss_scale=scale, donate=donate)
        check_alike(partition.mesh, facts | shape_facts("batch", batch))
        with partition.advice():
            core = make_core(
                binding, tx, loss_fn, plan, key, batch, variables, shardings, wrt, scale, partition, abstract
            )
            partition = partition.with_features(core.params, plan.feature_axes)
            settings = describe(
                binding,
                tx,
                loss_fn,
                plan,
                core,
                partition,
                batch,
                key=key,
                microbatches=microbatches,
                loss_scale=scale,
                donate=donate,
            )
        return cls.from_core(np.array(0, np.int32), core, settings)

    @classmethod
    def from_core(cls, step: Any, core: Core, settings: Settings) -> TrainState:
        return cls(step, *core, settings=settings)

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self.params)
        size = sum(np.size(leaf) for leaf in leaves)
        return f"<TrainState step={self.step}, {len(leaves)} trained tensors, {size:,} elements>"

    @property
    def core(self) -> Core:
        """The device part."""
        return Core(self.params, self.frozen, self.model_state, self.opt_state, self.key, self.monitor)

    def module(self) -> Any:
        """The model with the current weights: a fresh nnx module, or linen variables for `module.apply`.

        Raises:
            ValueError: The state holds shapes instead of weights.
        """
        refuse_abstract({"params": self.params, "frozen": self.frozen, "model_state": self.model_state})
        return self.settings.binding.module(join(self.params, self.frozen), self.model_state)


def _as_key(rngs: Any) -> jax.Array:
    """A typed random key from what a user may give: a typed key, raw key data, an integer seed."""
    if isinstance(rngs, int) and not isinstance(rngs, bool):
        return jax.random.key(rngs)
    if isinstance(rngs, jax.Array | np.ndarray):
        if jax.numpy.issubdtype(rngs.dtype, jax.dtypes.prng_key) and rngs.shape == ():
            return jax.numpy.asarray(rngs)
        if rngs.dtype == np.uint32 and rngs.ndim == 1:
            return jax.random.wrap_key_data(jax.numpy.asarray(rngs))
    raise TypeError(f"rngs must be a jax.random.key or an integer seed, got {type(rngs).__name__}")
