"""Runs a wrapped model once, observed and plain, and the slow form of what was observed."""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import numpy as np

from probes_jax.observe.binding import Captured
from probes_jax.observe.evaluation import Evaluation as ObservedEvaluation
from probes_jax.observe.point import INPUT
from probes_jax.observe.record import slots_like
from probes_jax.observe.rngs import Rngs
from probes_jax.observe.wrap import wrap
from probes_jax.spec.summary import decode_count
from probes_jax.stats.moments import summarize_magnitude

KEY = jax.random.key(7)


@dataclasses.dataclass
class Evaluation:
    loss: np.ndarray
    grads: dict
    state: dict
    outputs: list
    captured: Captured  # of the trace: names, reasons; its arrays are tracers
    rows: dict[str, dict[str, float]]  # label -> statistics
    inputs: dict[str, dict[str, float]]  # the same of what modules are given
    backward: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)  # the same of gradients


def observe_loss(binding, loss_fn, params, state, batch, rngs, measure, taps=None):
    """As the step does it, without the points of the loss function itself."""
    evaluation = ObservedEvaluation(taps)
    bound = binding.bind(params, state, rngs=rngs, measure=measure, evaluation=evaluation)
    with evaluation.around(loss_fn) if measure else contextlib.nullcontext():
        loss = loss_fn(bound, batch, rngs)
    return loss, bound.finish()


def make_step(binding, loss_fn, measure=summarize_magnitude):
    """A jittable function, and the list to which each of its traces appends what it captured."""
    traces = []

    def step(params, state, batch, key):
        def objective(params):
            rngs = Rngs(key)
            loss, captured = observe_loss(binding, loss_fn, params, state, batch, rngs, measure)
            traces.append(captured)
            return loss, (list(captured.points.values()), captured.state, captured.outputs)

        return jax.value_and_grad(objective, has_aux=True)(params)

    return step, traces


def evaluate(binding, loss_fn, batch, parts, measure=summarize_magnitude, jit=jax.jit) -> Evaluation:
    step, traces = make_step(binding, loss_fn, measure)
    (loss, (values, state, outputs)), grads = jax.device_get(jit(step)(parts.params, parts.state, batch, KEY))
    rows = rows_of(traces[-1].points, values)
    inputs = rows_of(traces[-1].points, values, inputs=True)
    return Evaluation(loss, grads, state, outputs, traces[-1], rows, inputs)


def rows_of(points, summaries, inputs=False):
    """Statistics by label, one row per layer; of what modules return, or of what they are given."""
    rows = {}
    for point, summary in zip(points, summaries, strict=True):
        if (point.method == INPUT) is not inputs:
            continue
        labels = point.labels(summary.stack_shape())
        for row, label in enumerate(labels):
            leaves = {
                name: np.asarray(leaf).reshape(len(labels), *leaf.shape[len(summary.stack_shape()) :])[row]
                for name, leaf in summary.leaves.items()
            }
            assert label not in rows, label
            rows[label.removeprefix("act/").removesuffix("/{stat}")] = statistics(leaves)
    return rows


def statistics(leaves):
    return {
        "count": float(decode_count(leaves["count"])),
        "sum_sq": float(leaves["sum_sq"]),
        "sum_abs": float(leaves["sum_abs"]),
        "abs_max": float(leaves["abs_max"]),
    }


def slow_statistics(array):
    x = np.asarray(array, np.float64)
    return {
        "count": float(x.size),
        "sum_sq": float((x * x).sum()),
        "sum_abs": float(np.abs(x).sum()),
        "abs_max": float(np.abs(x).max()),
    }


def assert_rows(rows, arrays, only=None):
    """Every row has the statistics of the array of its name, and no array is without a row."""
    names = set(arrays) if only is None else only
    assert set(rows) == names
    for name in names:
        for statistic, value in slow_statistics(arrays[name]).items():
            np.testing.assert_allclose(
                rows[name][statistic], value, rtol=2e-5, atol=1e-6, err_msg=f"{name} {statistic}"
            )


def assert_same(left, right):
    """Bit for bit."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right)):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def start(module, loss_fn, batch, **options):
    binding = wrap(module, **options)
    return binding, jax.jit(lambda key, batch: binding.init(loss_fn, batch, key))(jax.random.key(0), batch)


def observed_and_plain(module, loss_fn, batch):
    """Observed; the same without observation, which must not differ in a bit."""
    binding, parts = start(module, loss_fn, batch)
    observed = evaluate(binding, loss_fn, batch, parts)
    plain = evaluate(binding, loss_fn, batch, parts, measure=None)
    assert_same((observed.loss, observed.grads, observed.state), (plain.loss, plain.grads, plain.state))
    assert plain.captured.points == {}
    assert plain.captured.seen == ()
    assert jax.tree.structure(observed.state) == jax.tree.structure(parts.state)
    assert set(observed.captured.points) | set(observed.captured.missing) == set(observed.captured.seen)
    return observed, binding, parts


def backward_rows(binding, loss_fn, batch, parts, measure=summarize_magnitude, jit=jax.jit, inputs=False):
    """Loss and parameter gradients of a run with taps, and the statistics of backward gradients by label."""
    step, found = _tapped_step(binding, loss_fn, batch, parts, measure)

    def backward(params):
        loss, grads, summaries, _ = step(params)
        return loss, grads, summaries

    loss, grads, summaries = jax.device_get(jit(backward)(parts.params))
    return loss, grads, rows_of(found["backward"], summaries, inputs)


def evaluate_tapped(binding, loss_fn, batch, parts, measure=summarize_magnitude, jit=jax.jit) -> Evaluation:
    """An evaluation with taps: forward and backward statistics from one program."""
    step, found = _tapped_step(binding, loss_fn, batch, parts, measure)
    loss, grads, summaries, (values, state, outputs) = jax.device_get(jit(step)(parts.params))
    captured = found["captured"]
    given, taken = (rows_of(captured.points, values, inputs=which) for which in (True, False))
    return Evaluation(loss, grads, state, outputs, captured, taken, given, rows_of(found["backward"], summaries))


def _tapped_step(binding, loss_fn, batch, parts, measure):
    """A jittable function of parameters, and what its last trace captured: points, and points of gradients."""
    found = {}

    def objective(params, taps):
        rngs = Rngs(KEY)
        loss, found["captured"] = observe_loss(binding, loss_fn, params, parts.state, batch, rngs, measure, taps)
        captured = found["captured"]
        return loss, (captured.raw, (list(captured.points.values()), captured.state, captured.outputs))

    def step(params):
        _, (raw, _) = jax.eval_shape(objective, params, None)
        differentiated = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
        (loss, (_, forward)), (grads, gradients) = differentiated(params, slots_like(raw))
        points = found["captured"].backward(gradients)
        found["backward"] = tuple(points)
        return loss, grads, list(points.values()), forward

    return step, found
