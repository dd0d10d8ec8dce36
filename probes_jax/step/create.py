"""From a model and an optimizer to the state before the first step, every array on the devices it stays on."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from probes_jax.observe.clip import find_clip
from probes_jax.observe.frozen import frozen_leaves
from probes_jax.observe.learning_rate import find_learning_rate
from probes_jax.observe.names import label_params
from probes_jax.observe.reach import find_reach
from probes_jax.signals.parameters import ParameterInfo
from probes_jax.spec.plan import Plan
from probes_jax.step.abstract import lying
from probes_jax.step.alike import check_alike, shape_facts
from probes_jax.step.batch import naming_keys
from probes_jax.step.loss_scale import LossScale
from probes_jax.step.manual import under
from probes_jax.step.monitor import init_monitor
from probes_jax.step.objective import LEFT_OUT, Notes, Objective
from probes_jax.step.partition import Partition
from probes_jax.step.reach import reach_of_extra
from probes_jax.step.replica import shardings_of, why_not
from probes_jax.step.select import Wrt, flatten, join, split_trained, unflatten
from probes_jax.step.settings import Settings
from probes_jax.step.update import Core


def make_core(
    binding: Any,
    tx: optax.GradientTransformation,
    loss_fn: Callable[..., Any],
    plan: Plan,
    key: jax.Array,
    batch: Any,
    variables: Any,
    shardings: Any,
    wrt: Wrt,
    loss_scale: LossScale | None,
    partition: Partition,
    abstract: bool = False,
) -> Core:
    """Initializes parameters, optimizer state and monitor state, sharded and committed; or only says how they lie."""

    def init(key: jax.Array, batch: Any, variables: Any) -> tuple[Any, Any]:
        parts = binding.init(loss_fn, batch, key, variables)
        return parts.params, parts.state

    with naming_keys(batch):
        shapes = jax.eval_shape(init, key, batch, variables)
    _check_params(shapes[0])
    check_alike(partition.mesh, shape_facts("parameter", shapes[0]) | shape_facts("model state", shapes[1]))
    specs = binding.partition_specs(*shapes)
    place = _placements(shapes, specs, shardings, partition)
    if abstract:
        return _lay_out(tx, plan, key, jax.tree.map(lying, shapes, place), wrt, loss_scale, partition)
    check_here(partition, "pass abstract=True, for pj.inspect")
    if binding.has_arrays:  # made already: under jit they would be constants of the program
        params, state = jax.device_put(init(key, batch, variables), place)
    else:
        params, state = jax.jit(init, out_shardings=place)(key, batch, variables)
    trained, frozen = split_trained(params, wrt)
    opt_shapes = jax.eval_shape(tx.init, trained)
    opt_state = jax.jit(tx.init, out_shardings=_optimizer_placements(opt_shapes, trained, partition))(trained)
    key_data = jnp.array(jax.random.key_data(key), copy=True)  # the step donates it, and the key is the caller's
    rest = jax.device_put((key_data, init_monitor(plan, loss_scale)), partition.everywhere())
    return Core(trained, frozen, state, opt_state, *rest)


def check_here(partition: Partition, instead: str) -> None:
    """Refuses devices of a topology, which only a compiler knows.

    Raises:
        ValueError: With what to do instead.
    """
    for device in partition.everywhere().device_set:
        try:
            here = device in jax.devices(device.platform)
        except RuntimeError:  # no such platform
            here = False
        if not here:
            raise ValueError(f"{device} is not here, only its compiler is: {instead}")


def _lay_out(
    tx: Any,
    plan: Plan,
    key: jax.Array,
    model: Any,
    wrt: Wrt,
    loss_scale: LossScale | None,
    partition: Partition,
) -> Core:
    """The same core as shapes with shardings, for devices that may not be here."""
    params, state = model
    trained, frozen = split_trained(params, wrt)
    opt_shapes = jax.eval_shape(tx.init, trained)
    opt_state = jax.tree.map(lying, opt_shapes, _optimizer_placements(opt_shapes, trained, partition))
    rest = jax.eval_shape(lambda key: (jax.random.key_data(key), init_monitor(plan, loss_scale)), key)
    everywhere = partition.everywhere()
    return Core(trained, frozen, state, opt_state, *jax.tree.map(lambda x: lying(x, everywhere), rest))


def _check_params(params: Any) -> None:
    leaves = jax.tree.leaves(params)
    if not leaves:
        raise ValueError("the model has no parameters: loss_fn must call the model that it is given")
    empty = [path for path, leaf in flatten(params).items() if hasattr(leaf, "size") and leaf.size == 0]
    if empty:
        raise ValueError(f"parameter {'/'.join(map(str, empty[0]))} has no elements; drop it from the model")


def _placements(shapes: Any, specs: Any, shardings: Any, partition: Partition) -> Any:
    """A sharding for every leaf of (params, state)."""
    mesh = partition.mesh
    if mesh is None:
        if shardings is not None:
            raise ValueError(
                "shardings was given, but no mesh was found: shard the example batch, or use NamedSharding"
            )
        return jax.tree.map(lambda _: partition.everywhere(), shapes)

    def named(spec: Any, shape: Any, strict: bool = False) -> Sharding:
        if isinstance(spec, Sharding):
            return spec
        spec = PartitionSpec() if spec is None else spec
        unknown = [axis for entry in spec for axis in _axes(entry) if axis not in mesh.shape]
        if unknown and strict:
            raise ValueError(f"shardings names the mesh axis {unknown[0]!r}; the mesh has {tuple(mesh.shape)}")
        # A model's own metadata may hold logical names that this mesh does not have: those are not sharded.
        known = tuple(tuple(a for a in _axes(entry) if a in mesh.shape) or None for entry in spec)
        return NamedSharding(mesh, PartitionSpec(*known))

    def is_spec(x: Any) -> bool:
        return x is None or isinstance(x, PartitionSpec | Sharding)

    params, state = shapes
    param_specs, state_specs = specs
    if callable(shardings):
        param_specs = unflatten({path: shardings(path, leaf.shape) for path, leaf in flatten(params).items()})
    elif shardings is not None:
        param_specs = shardings
    if jax.tree.structure(param_specs, is_leaf=is_spec) != jax.tree.structure(params):
        raise ValueError("shardings does not have the structure of the parameters (one spec for each array)")
    strict = functools.partial(named, strict=shardings is not None)
    return jax.tree.map(strict, param_specs, params, is_leaf=is_spec), jax.tree.map(
        named, state_specs, state, is_leaf=is_spec
    )


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _optimizer_placements(shapes: Any, params: Any, partition: Partition) -> Any:
    """Moments lie where their parameter lies, everything else on every device.

    A moment is a leaf of the parameter's shape whose path ends in the parameter's path, however optax wrapped it.
    """
    everywhere, known = partition.everywhere(), flatten(params)

    def place(keys: Any, leaf: Any) -> Sharding:
        names: tuple[Any, ...] = tuple(getattr(key, "key", None) for key in keys)
        own = (known.get(names[start:]) for start in range(len(names)))
        found = next((param for param in own if param is not None and param.shape == leaf.shape), None)
        return everywhere if found is None or partition.mesh is None else found.sharding

    return jax.tree_util.tree_map_with_path(place, shapes)


def describe(
    binding: Any,
    tx: optax.GradientTransformation,
    loss_fn: Callable[..., Any],
    plan: Plan,
    core: Core,
    partition: Partition,
    batch: Any,
    *,
    key: jax.Array | None = None,
    microbatches: int = 1,
    loss_scale: LossScale | None = None,
    donate: bool = True,
    runs: bool = True,
) -> Settings:
    """Traces the model once, abstractly, and works out what is known of each parameter.

    `runs`: the step calls the optimizer; False where a loop of the user's own does.
    """
    key = jax.random.key(0) if key is None else key
    notes, idle = Notes(), {}
    if binding is not None:
        notes, idle = _trace_model(binding, loss_fn, plan, core, partition, batch, key)
    points = {f"point {point}": str(point.shape) for point in notes.seen}
    check_alike(partition.mesh, points | shape_facts("optimizer state", core.opt_state))
    called, frozen = _try_update(tx, core.params, runs)
    never, leaves = flatten(frozen), flatten(core.params)
    labels = label_params({path: leaf.shape for path, leaf in leaves.items()}, notes.stacks, notes.axes)
    infos = {
        path: ParameterInfo(
            names=labels[path][0],
            stack_axis=labels[path][1],
            split=partition.parameter(leaf),
            embedding=re.search(plan.embeddings, "/".join(map(str, path))) is not None,
            frozen=bool(never[path]),
            encoder=plan.encoder is not None and re.search(plan.encoder, "/".join(map(str, path))) is not None,
        )
        for path, leaf in leaves.items()
    }
    clip, no_clip = find_clip(tx, core.params, frozen)
    rate, no_rate = find_learning_rate(core.opt_state)
    missing = {} if clip else {"grad/clip_rate": no_clip}
    missing |= {} if rate else {"opt/learning_rate": no_rate}
    missing |= {} if "replica" in plan.left_out else why_not(core, partition.mesh, partition.manual)
    missing |= dict.fromkeys(plan.without, LEFT_OUT) | idle
    reach, warnings = reach_of_extra(notes, leaves, infos, plan)
    return Settings(
        binding=binding,
        tx=called,
        loss_fn=loss_fn,
        plan=plan,
        partition=partition,
        microbatches=microbatches,
        loss_scale=loss_scale,
        key_impl=str(jax.random.key_impl(key)),
        infos=infos,
        shardings=None if partition.mesh is None else jax.tree.map(lambda x: x.sharding, core),
        lies=shardings_of(core),
        donate=donate,
        clip=clip,
        missing=missing,
        routes=notes.routes,
        reach=reach,
        warnings=warnings,
    )


def _try_update(tx: Any, params: Any, runs: bool) -> tuple[optax.GradientTransformationExtraArgs, Any]:
    """The optimizer as a step calls it, with the loss as `value=` if it can be, and which leaves it never moves."""
    known = optax.with_extra_args_support(tx)
    strict = optax.with_extra_args_support(optax.GradientTransformation(tx.init, tx.update))  # takes nothing more
    try:
        return known, frozen_leaves(known, params, value=jnp.float32(0.0))
    except Exception:  # foreign code: it may fail in any way
        try:
            return strict, frozen_leaves(strict, params)
        except Exception as error:
            if not runs:  # who calls it knows what it needs; nothing is known of frozen leaves
                return known, jax.tree.map(lambda _: False, params)
            raise TypeError(
                f"tx cannot be called as tx.update(gradients, state, params, value=loss): {error}. An optimizer that "
                "needs more (value_fn=, grad_fn=, parameters of its own kind) runs in a loop of your own, which "
                "pj.Monitor measures"
            ) from error


def _trace_model(
    binding: Any, loss_fn: Any, plan: Plan, core: Core, partition: Partition, batch: Any, key: jax.Array
) -> tuple[Notes, dict[str, str]]:
    """Finds out about the model without computing anything; and what of the plan means nothing in it."""
    notes = Notes()
    # Also what the plan leaves out is looked at here: a parameter's layers are known from the module that scans it.
    whole = dataclasses.replace(plan, without=tuple(family for family in plan.without if family != "act"))
    objective = Objective(binding, loss_fn, whole, partition, scan=True, probes=True)

    def trace(params: Any, frozen: Any, state: Any, batch: Any, key: jax.Array) -> Any:
        *sums, part = objective(join(params, frozen), state, batch, key, notes)
        if notes.extra:
            notes.reach = flatten(
                find_reach(lambda p: objective.extra(join(p, frozen), state, batch, key), notes.extra, params)
            )
        return *sums, part

    args = (core.params, core.frozen, core.model_state, batch, key)
    jax.eval_shape(under(partition, trace, args) if partition.manual else trace, *args)
    return notes, _check_chosen(objective, notes)


def _check_chosen(objective: Objective, notes: Notes) -> dict[str, str]:
    """Words that mean no point: to include nothing is an error, to exclude nothing is said by the coverage."""
    points = (*notes.seen, *notes.left_out)
    names = ", ".join(dict.fromkeys(str(point) for point in points[:8]))
    nothing = f"matches no point of this model; its points are {names}, ..."

    def idle(texts: Sequence[str]) -> list[str]:
        return [text for text in texts if not any(objective.matches(text, point, notes.layers) for point in points)]

    for text in idle(objective.plan.include):
        raise ValueError(f"Plan include {text!r} {nothing}")
    return {f"Plan exclude {text!r}": nothing for text in idle(objective.plan.exclude) if points}
