"""Nothing of ours stays: not in collections, not in what callers get back, not in Flax, not in compiled programs."""

from __future__ import annotations

import functools
import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import DenyList, lift
from flax.linen import module as linen_module

from probes_jax.observe.record import slots_like
from probes_jax.observe.rngs import Rngs
from probes_jax.observe.wrap import wrap
from probes_jax.stats.moments import summarize_magnitude
from tests.observe.evaluate import KEY, assert_same, evaluate, make_step, observed_and_plain, start

X = jnp.linspace(-1.0, 2.0, 12).reshape(3, 4)


def squares(model, batch, rngs):
    return jnp.sum(jnp.square(model(batch)))


class Cached(nn.Module):
    """Keeps a cache, sows, and has layers in transforms."""

    @nn.compact
    def __call__(self, x):
        cache = self.variable("cache", "last", jnp.zeros, x.shape)
        layers = nn.scan(nn.remat(Layer), {"params": 0, "intermediates": 0}, split_rngs={"params": True}, length=2)
        x, _ = layers(name="layers")(x + cache.value, None)
        cache.value = 0.5 * x
        self.sow("intermediates", "x", x)
        return nn.jit(nn.Dense)(4, name="head")(x)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        self.sow("intermediates", "mlp_in", x)
        return nn.tanh(nn.Dense(4, name="mlp")(x)), None


def leaves(tree):
    return sorted(jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree))


@pytest.mark.parametrize(
    ("mutable", "taps"), [(True, False), (True, True), (["cache", "intermediates"], True), (DenyList("params"), True)]
)
def test_l001_callers_that_take_collections_back_get_their_own_and_no_recompile(mutable, taps):
    """A trainer that merges what `apply` returns into its variables, as many do."""
    module, binding = Cached(), wrap(Cached())
    own = module.init(jax.random.key(0), X)
    traces = []

    def apply(variables, call):
        y, new = call({**variables, "params": variables["params"]})
        return jnp.sum(jnp.square(y)), {**variables, **new}

    def plain(variables):
        return apply(variables, lambda v: module.apply(v, X, mutable=mutable))

    def monitored(variables):
        traces.append(1)
        state = {name: value for name, value in variables.items() if name not in ("params", "intermediates")}

        def evaluate_once(params, slots):
            bound = binding.bind(params, state, rngs=Rngs(KEY), measure=summarize_magnitude, taps=slots)
            y, new = bound(X, mutable=mutable)
            captured = bound.finish()
            assert len(captured.points) == 4
            assert not captured.missing
            return jnp.sum(jnp.square(y)), (new, captured.raw)

        params = variables["params"]
        if not taps:
            loss, (new, _) = evaluate_once(params, None)
        else:
            slots = slots_like(jax.eval_shape(lambda: evaluate_once(params, None))[1][1])
            (loss, (new, _)), _ = jax.value_and_grad(evaluate_once, argnums=(0, 1), has_aux=True)(params, slots)
        return loss, {**variables, **new}

    step, twin = jax.jit(monitored), jax.jit(plain)
    ours = theirs = {name: own[name] for name in ("params", "cache")}
    sizes = []
    for _ in range(4):
        loss, ours = step({name: value for name, value in ours.items() if name != "intermediates"})
        expected, theirs = twin({name: value for name, value in theirs.items() if name != "intermediates"})
        np.testing.assert_array_equal(loss, expected)
        assert leaves(ours) == leaves(theirs)
        sizes.append(len(leaves(ours)))
    assert len(set(sizes)) == 1
    assert len(traces) == 1
    assert_same(jax.device_get(ours["cache"]), jax.device_get(theirs["cache"]))


def test_l001_a_copy_of_ours_that_comes_back_in_is_dropped():
    binding, parts = start(Cached(), squares, X)
    bound = binding.bind(parts.params, parts.state, rngs=Rngs(KEY), measure=summarize_magnitude)
    bound(X)
    captured = bound.finish()
    assert set(captured.state) == set(parts.state) == {"cache"}
    old = bound._recorder
    for name in (old.collection, old.slots):  # as a checkpoint of a run that kept it would hold it
        carried = {**parts.state, name: captured.raw[0].records}
        again = binding.bind(parts.params, carried, rngs=Rngs(KEY), measure=summarize_magnitude)
        again(X)
        result = again.finish()
        assert set(result.state) == {"cache"}
        assert list(map(str, result.points)) == list(map(str, captured.points))
        given = binding.init(squares, X, KEY, {"params": parts.params, **carried})
        assert set(given.state) == {"cache"}


def test_l005_sown_values_capture_intermediates_and_ours_are_all_right():
    module = Cached()
    binding, parts = start(module, squares, X)
    variables = {"params": parts.params, **parts.state}

    def run(variables, measure):
        bound = binding.bind(variables["params"], parts.state, rngs=Rngs(KEY), measure=measure)
        y, kept = bound(X, mutable=["cache"], capture_intermediates=True)
        return y, kept, list(map(str, bound.finish().points))

    names = []

    def monitored(variables):
        y, kept, points = run(variables, summarize_magnitude)
        names.append(points)
        return y, kept

    streams = Rngs(KEY).streams(("params", "dropout"))
    own = jax.jit(lambda v: module.apply(v, X, rngs=streams, mutable=["cache"], capture_intermediates=True))
    assert_same(jax.device_get(jax.jit(monitored)(variables)), jax.device_get(own(variables)))
    assert names[0] == ["layers[*]/mlp", "layers[*]", "head", "output"]


def test_initial_variables_hold_nothing_of_ours():
    _, parts = start(Cached(), squares, X)
    own = Cached().init(jax.random.key(0), X)
    assert leaves({"params": parts.params, **parts.state}) == leaves({k: own[k] for k in ("params", "cache")})
    inside = []

    class InitsInside(nn.Module):
        @nn.compact
        def __call__(self, x):
            inside.append(nn.Dense(4, parent=None).init(jax.random.key(0), x))
            return nn.Dense(4, name="layer")(x)

    evaluate(*start(InitsInside(), squares, X)[:1], squares, X, start(InitsInside(), squares, X)[1], jit=lambda f: f)
    assert all(set(variables) == {"params"} for variables in inside)


class Fails(nn.Module):
    where: str = ""

    @nn.compact
    def __call__(self, x):
        def body(module, x, _):
            x = nn.Dense(4, name="layer")(x)
            if module.where == "scan":
                raise KeyError("inside the model")
            return x, None

        scan = nn.scan(body, {"params": 0}, split_rngs={"params": True}, length=2)
        x = nn.remat(lambda module, x: scan(module, x, None)[0])(self, x)
        if self.where == "after":
            raise KeyError("inside the model")
        return x


PATCHED = [(lift, "pack"), (lift, "_split_in_out_axes"), (lift, "is_filter_empty"), (nn.Module, "sow")]


@pytest.mark.parametrize("where", ["scan", "after"])
def test_after_an_exception_everything_is_as_before_and_the_bound_model_still_works(where):
    before = [getattr(owner, name) for owner, name in PATCHED]
    binding, parts = start(Fails(), squares, X)
    wanted = evaluate(binding, squares, X, parts, jit=lambda f: f).rows
    failing = wrap(Fails(where)).bind(parts.params, parts.state, rngs=Rngs(KEY), measure=summarize_magnitude)
    with pytest.raises(KeyError, match="inside the model"):
        failing(X)
    assert [getattr(owner, name) for owner, name in PATCHED] == before
    assert len(linen_module._global_interceptor_stack) == 0
    assert linen_module._context.capture_stack == []
    assert linen_module._context.module_stack in ([], [None])
    assert evaluate(binding, squares, X, parts, jit=lambda f: f).rows == wanted
    own = Fails().apply({"params": parts.params}, X)
    np.testing.assert_allclose(own, wrap(Fails()).bind(parts.params, {})(X))


def test_a_call_that_fails_and_is_tried_again_counts_once():
    """A loss function that falls back to another method when one raises."""

    class Falls(nn.Module):
        def setup(self):
            self.layer = nn.Dense(4)

        def __call__(self, x):
            raise KeyError(str(self.layer(x).shape))

        def fallback(self, x):
            return self.layer(x)

    def loss_fn(model, batch, rngs):
        try:
            return jnp.sum(model(batch))
        except KeyError:
            return jnp.sum(model.fallback(batch))

    observed, _, parts = observed_and_plain(Falls(), loss_fn, X)
    y = X @ parts.params["layer"]["kernel"]
    assert set(observed.rows) == {"layer", "output.fallback"}
    assert observed.rows["layer"]["abs_max"] == pytest.approx(float(jnp.abs(y).max()))


def test_names_of_what_is_patched_are_kept():
    seen = {}

    class Looks(nn.Module):
        @nn.compact
        def __call__(self, x):
            seen.update(
                {name: (getattr(owner, name).__name__, getattr(owner, name).__doc__) for owner, name in PATCHED}
            )
            return nn.remat(nn.Dense)(4)(x)

    names = {name: (getattr(owner, name).__name__, getattr(owner, name).__doc__) for owner, name in PATCHED}
    observed, _, parts = observed_and_plain(Looks(), squares, X)
    assert seen == names
    assert list(parts.params) == ["CheckpointDense_0"]
    assert set(observed.rows) == {"Dense[0]", "output"}


class Block(nn.Module):
    tell: object

    @nn.compact
    def __call__(self, x):
        self.tell(1)
        return nn.Dense(4, name="mlp")(x)


JitBlock = nn.jit(Block)


@pytest.mark.parametrize("first", ["plain", "monitored"])
def test_jit_inside_the_model_keeps_plain_and_monitored_apart(first):
    """Traced plain before it is monitored, and the other way round: no stale report, no new trace of the plain one."""
    traced = []
    tell = traced.append

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return JitBlock(tell, name="block")(x)

    module = Model()
    variables = module.init(jax.random.key(0), X)
    binding = wrap(module)

    def plain():
        before = len(traced)
        return module.apply(variables, X), len(traced) - before

    def monitored(scale=1.0):
        bound = binding.bind(variables["params"], {}, measure=lambda x: summarize_magnitude(scale * x))
        y = bound(X)
        return y, {str(point): float(value.leaves["abs_max"]) for point, value in bound.finish().points.items()}

    if first == "plain":
        assert plain()[1] == 1
    y, points = monitored()
    assert set(points) == {"block/mlp", "block", "output"}
    assert monitored(2.0)[1] == {name: 2.0 * value for name, value in points.items()}
    own, traces = plain()
    assert traces == (0 if first == "plain" else 1)
    assert plain()[1] == 0
    np.testing.assert_array_equal(own, y)
    unobserved = binding.bind(variables["params"], {})
    np.testing.assert_array_equal(unobserved(X), own)
    assert plain()[1] == 0


def test_threads_that_observe_and_run_plain_at_once_do_not_meet():
    class Model(nn.Module):
        depth: int

        @nn.compact
        def __call__(self, x):
            layers = nn.scan(Layer, {"params": 0}, split_rngs={"params": True}, length=self.depth)
            return nn.WeightNorm(nn.remat(nn.Dense)(4, name="head"))(layers(name="layers")(x, None)[0])

    bindings = {depth: start(Model(depth), squares, X) for depth in (1, 2)}
    wanted = {depth: evaluate(*b[:1], squares, X, b[1], jit=lambda f: f).rows for depth, b in bindings.items()}
    gate, results, errors = threading.Barrier(4), {}, []

    def work(depth, measure):
        try:
            gate.wait()
            for _ in range(3):
                binding, parts = bindings[depth]
                results[depth, measure] = evaluate(binding, squares, X, parts, measure=measure, jit=lambda f: f)
        except Exception as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=(depth, measure))
        for depth in (1, 2)
        for measure in (summarize_magnitude, None)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for depth in (1, 2):
        assert results[depth, summarize_magnitude].rows == wanted[depth]
        assert results[depth, None].captured.seen == ()
    assert lift.pack.__module__ == "flax.core.lift"
    assert not hasattr(lift.pack, "__wrapped__")


def test_the_step_compiles_once_with_every_transform():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = Cached(name="cached")(x)
            x = nn.WeightNorm(nn.Dense(4), name="norm")(x)
            return nn.vmap(nn.Dense, {"params": None}, split_rngs={"params": False})(4, name="each")(x)

    binding, parts = start(Model(), squares, X)
    step, traces = make_step(binding, squares)
    compiled = jax.jit(step)
    params, state = parts
    for _ in range(3):
        (_, (_, state, _)), _ = compiled(params, state, X, KEY)
        assert jax.tree.structure(state) == jax.tree.structure(parts.state)
    assert len(traces) == 1
    assert compiled._cache_size() == 1


def test_a_lambda_and_a_partial_of_a_transform_keep_their_names():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            block = functools.partial(nn.remat(Layer), name="layer")
            return block()(x, None)[0]

    observed, _, parts = observed_and_plain(Model(), squares, X)
    assert list(parts.params) == ["layer"]
    assert set(observed.rows) == {"layer", "layer/mlp", "output"}
