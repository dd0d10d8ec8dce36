"""What monitoring costs, read from the compiled programs: for the devices at hand, or for some that are not."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any

import jax
import numpy as np

from probes_jax.cost import traffic
from probes_jax.cost.hlo import parse
from probes_jax.cost.parts import parts_of
from probes_jax.spec import check
from probes_jax.spec.layout import Layout
from probes_jax.spec.plan import FAMILIES, Plan
from probes_jax.spec.readings import decoder_of
from probes_jax.step.batch import check_leaves
from probes_jax.step.settings import Settings
from probes_jax.step.state import TrainState
from probes_jax.step.train import compiled

_log = logging.getLogger("probes_jax.inspect")
_MONITORED = ("light", "full")
ALWAYS = "always measured"  # what no plan leaves out: the loss, the totals of gradients and updates, the detectors


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one program costs on one device.

    Attributes:
        collectives: Exchanges between devices in one step, those of loops once for each turn.
        looped: How many collectives stand inside of a loop.
        bytes: Bytes to and from the device's main memory in one step.
        temporary: Bytes of memory beside arguments and results, as the compiler plans it.
        payload: Bytes of the report that goes to the host.
        series: Metrics that the report holds.
        compile_seconds: Processor time of tracing and compiling, over all threads.
    """

    collectives: int
    looped: int
    bytes: int
    temporary: int
    payload: int
    series: int
    compile_seconds: float

    def __sub__(self, other: Cost) -> Cost:
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return Cost(*(a - b for a, b in zip(mine, theirs, strict=True)))


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled program.

    Attributes:
        cost: All that it costs, training included.
        collectives: Each of its collectives.
    """

    cost: Cost
    collectives: tuple[traffic.Collective, ...]


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What monitoring adds. `print` shows it as a table.

    Attributes:
        device: What it was compiled for.
        devices: How many of them.
        scan_every: Steps from one full program to the next.
        programs: `off` (the plain train step), and those asked for of `light` and `full`.
        parts: For each program and part, what the program costs with it minus what it costs without.
    """

    device: str
    devices: int
    scan_every: int
    programs: dict[str, Program]
    parts: dict[str, dict[str, Cost]]

    def added(self, program: str) -> Cost:
        """What a monitored program costs more than the plain step."""
        return self.programs[program].cost - self.programs["off"].cost

    def ratio(self, program: str, what: str = "bytes") -> float:
        """What is added, as a share of what the plain step costs. NaN where the plain step has none of it."""
        plain = getattr(self.programs["off"].cost, what)
        return getattr(self.added(program), what) / plain if plain else float("nan")

    def average(self, what: str = "bytes") -> float:
        """What is added to a step on average over a scan and the light steps up to the next, as `ratio`.

        Raises:
            KeyError: Not both programs were compiled.
        """
        light, full = self.ratio("light", what), self.ratio("full", what)
        return (light * (self.scan_every - 1) + full) / self.scan_every

    def exchanges(self, program: str) -> tuple[traffic.Collective, ...]:
        """The collectives that the plain step does not have; of one that it has with fewer arrays, those are left out.

        Two arrays of one type and size that are reduced alike are not told apart: the compiler flattens some, and joins
        some of the probes' with some of the loss's own (GPU).

        One inside of a loop (`looped`) is a wrong guess of how a tensor is sharded. `Plan(token_axes=, feature_axes=)`
        mends the guess, or an annotation of the tensor in the model.
        """
        return traffic.more(self.programs[program].collectives, self.programs["off"].collectives)

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            **{name: getattr(self, name) for name in ("device", "devices", "scan_every")},
            "programs": {name: dataclasses.asdict(program.cost) for name, program in self.programs.items()},
            "parts": {
                name: {part: dataclasses.asdict(cost) for part, cost in parts.items()}
                for name, parts in self.parts.items()
            },
            "exchanges": {
                name: [dataclasses.asdict(found) for found in self.exchanges(name)]
                for name in self.programs
                if name != "off"
            },
        }

    def __str__(self) -> str:
        from probes_jax.cost.table import table

        return table(self)


def inspect(
    state: TrainState,
    batch: Any,
    *,
    programs: tuple[str, ...] = _MONITORED,
    by: str | None = "family",
    points: str = "",
    progress: bool = True,
) -> Inspection:
    """Compiles the monitored step and the plain one, and says what the probes add. Runs nothing.

    Args:
        state: From `TrainState.create`. With `abstract=True` and a mesh of `pj.topology` devices it needs no memory and
            none of the hardware.
        batch: A batch as the step is called with; `jax.ShapeDtypeStruct`s with shardings will do.
        programs: Which programs to compile beside the plain one.
        by: `"family"`: also what each family of metrics costs, by compiling each program without it, and what is left
            without all of them; `"point"`: the same for each observed point, the layers of a stack as one
            (`block[*]/mlp`); None: only the whole. Each part is one compilation more.
        points: For `by="point"`, which of them, as `Plan.include` has it: `"mlp"`, `"block[*]/mlp"`, `"^head$"`.
        progress: Whether a line in the log says which program is being compiled, since each may take a minute.

    Returns:
        The costs on one device of each program.

    Raises:
        TypeError, ValueError: An argument does not fit; or no point matches.

    Example:
        >>> import flax.linen as nn, jax.numpy as jnp, optax
        >>> loss = lambda model, batch, rngs: jnp.mean(model(batch) ** 2)
        >>> batch = jax.ShapeDtypeStruct((8, 4), jnp.float32)
        >>> state = TrainState.create(
        ...     model=nn.Dense(2), tx=optax.sgd(0.1), loss_fn=loss, batch=batch, abstract=True
        ... )
        >>> inspect(state, batch, programs=("light",), by=None).added("light").collectives
        0
    """
    _check(state, batch)
    if not isinstance(programs, tuple) or any(name not in _MONITORED for name in programs):
        raise ValueError(f"programs must be a tuple of {_MONITORED}, got {programs!r}")
    if by not in ("family", "point", None):
        raise ValueError(f'by must be "family", "point" or None, got {by!r}')
    check.pattern("points", points)
    check.flag("progress", progress)
    settings = state.settings
    batch = jax.tree.map(_described, batch)
    core = jax.tree.map(_described, state.core)

    # By program and part; where the part is empty, nothing is left out.
    plans: dict[tuple[str, str], Plan] = {(program, ""): settings.plan for program in ("off", *programs)}
    for program in programs if by else ():
        without = parts_of(by, settings.plan, names_of(state, batch, program), points)
        without |= {ALWAYS: dataclasses.replace(settings.plan, without=FAMILIES)} if by == "family" else {}
        plans |= {(program, part): plan for part, plan in without.items()}
    done: dict[tuple[str, str], Program] = {}
    for (program, part), plan in plans.items():
        if progress:
            less = f" with nothing but what is {ALWAYS}" if part == ALWAYS else f" without {part}" if part else ""
            _log.warning("inspect compiles program %d of %d: %s%s", len(done) + 1, len(plans), program, less)
        done[program, part] = _compile(dataclasses.replace(settings, plan=plan, programs={}), program, core, batch)
    found = {program: done[program, ""] for program in ("off", *programs)}
    parts: dict[str, dict[str, Cost]] = {program: {} for program in (programs if by else ())}
    for (program, part), without in done.items():
        if part == ALWAYS:
            parts[program][part] = without.cost - found["off"].cost
        elif part:
            parts[program][part] = found[program].cost - without.cost
    device = _devices(settings)
    return Inspection(device[0].device_kind, len(device), settings.plan.scan_every, found, parts)


def names_of(state: TrainState, batch: Any, program: str) -> list[str]:
    """The names that a program reports, `{stat}` for the statistic."""
    return [label for entry in layout_of(state, batch, program).entries for label in entry.labels]


def _described(x: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array and where it lies, so that nothing is held and nothing moved."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    return jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.result_type(x), sharding=getattr(x, "sharding", None))


def _devices(settings: Settings) -> list[Any]:
    partition = settings.partition
    return list(partition.mesh.devices.flat) if partition.mesh is not None else list(partition.everywhere().device_set)


def _step(settings: Settings) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), np.int32, sharding=settings.partition.everywhere())


def layout_of(state: TrainState, batch: Any, program: str) -> Layout:
    """What a program reports. Traced, not compiled."""
    _check(state, batch)
    shapes = _step(state.settings), *jax.tree.map(_described, (state.core, batch))
    # Without its programs: by these the step knows whether it is the first, at which processes are compared.
    settings = dataclasses.replace(state.settings, programs={})
    return jax.eval_shape(compiled(settings, program), *shapes)[1].layout


def _check(state: Any, batch: Any) -> None:
    if not isinstance(state, TrainState):
        raise TypeError(f"state must be a pj.TrainState (TrainState.create(...)), got {type(state).__name__}")
    check_leaves(batch)


def _compile(settings: Settings, program: str, core: Any, batch: Any) -> Program:
    start = time.process_time()
    lowered = compiled(settings, program).lower(_step(settings), core, batch)
    done = lowered.compile()
    seconds = time.process_time() - start
    layout = lowered.out_info[1].layout
    module = parse(done.as_text())
    exchanges = tuple(traffic.collectives(module))
    memory = done.memory_analysis()
    return Program(
        Cost(
            collectives=sum(found.times for found in exchanges),
            looped=sum(found.looped for found in exchanges),
            bytes=traffic.bytes_accessed(module),
            temporary=getattr(memory, "temp_size_in_bytes", 0),
            payload=4 * layout.size if layout.entries else 0,
            series=len(decoder_of(layout).names),
            compile_seconds=seconds,
        ),
        exchanges,
    )
