import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from probes_jax.detect.guard import GuardState, count_outcome, decide, init_guard, release, select
from probes_jax.spec.plan import Guard
from probes_jax.stats.moments import summarize_magnitude
from probes_jax.stats.partial import Split

GOOD, NAN, CO_SPIKE, EMPTY = "good", "nan", "co_spike", "empty"


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decide(guard, skip_empty, state, finite, co_spike, empty):
    skip, state = decide(guard, state, finite=finite, co_spike=co_spike, empty=empty, skip_empty=skip_empty)
    yes, no = jnp.bool_(True), jnp.bool_(False)
    return skip, count_outcome(state, skip=skip, finite=finite, update_finite=yes, applied=yes, dropped=no)


def _run(guard, steps, *, skip_empty=False, state=None):
    """Which steps are skipped, and the counters after them."""
    state = init_guard() if state is None else state
    skipped = []
    for step in steps:
        skip, state = _decide(guard, skip_empty, state, step != NAN, step == CO_SPIKE, step == EMPTY)
        skipped.append(bool(skip))
    return skipped, GuardState(*(int(leaf) for leaf in state))


def test_a_bad_update_is_skipped_and_counted():
    skipped, counts = _run(Guard(), [GOOD, NAN, NAN, GOOD, CO_SPIKE, NAN])
    assert skipped == [False, True, True, False, False, True]
    assert counts == GuardState(
        attempted=6,
        applied=3,
        skipped=3,
        consecutive=1,
        nonfinite_steps=3,
        accepted_bad=0,
        empty_steps=0,
        stopped=0,
    )


def test_a_co_spike_is_skipped_only_where_the_guard_says_so():
    skipped, counts = _run(Guard(nonfinite=False, co_spike=True), [CO_SPIKE, NAN, GOOD])
    assert skipped == [True, False, False]
    assert (counts.skipped, counts.accepted_bad, counts.nonfinite_steps) == (1, 1, 1)


def test_l074_counters_keep_their_meaning_past_the_limit():
    steps = [NAN] * 5 + [GOOD, NAN]
    skipped, counts = _run(Guard(max_consecutive=2), steps)
    assert all(skipped)  # it stopped after the second, and never accepts
    assert (counts.nonfinite_steps, counts.accepted_bad, counts.stopped) == (6, 0, 1)
    assert (counts.skipped, counts.consecutive, counts.applied) == (7, 7, 0)
    # What a limit that accepts does (optax applies 3, 4, 5): without a guard each one accepted is counted as such.
    skipped, counts = _run(None, steps)
    assert not any(skipped)
    assert (counts.nonfinite_steps, counts.accepted_bad, counts.applied, counts.skipped) == (6, 6, 7, 0)


def test_the_guard_stops_at_the_stated_run_and_not_before():
    guard = Guard(max_consecutive=3)
    skipped, counts = _run(guard, [NAN, NAN, GOOD, NAN, NAN])
    assert counts.stopped == 0
    assert counts.consecutive == 2
    skipped, counts = _run(guard, [NAN, NAN, NAN, GOOD, GOOD])
    assert counts.stopped == 1
    assert skipped == [True] * 5


def test_a_released_run_goes_on():
    guard = Guard(max_consecutive=1)
    state = init_guard()
    _, state = _decide(guard, False, state, False, False, False)
    assert int(state.stopped) == 1
    skipped, counts = _run(guard, [GOOD, GOOD], state=release(state))
    assert skipped == [False, False]
    assert (counts.attempted, counts.applied, counts.skipped, counts.stopped) == (3, 2, 1, 0)


def test_an_empty_step_is_applied_unless_the_plan_says_otherwise():
    skipped, counts = _run(None, [EMPTY, GOOD])
    assert skipped == [False, False]
    assert (counts.empty_steps, counts.applied, counts.skipped) == (1, 2, 0)
    skipped, counts = _run(None, [EMPTY, GOOD], skip_empty=True)
    assert skipped == [True, False]
    assert (counts.empty_steps, counts.applied, counts.skipped, counts.attempted) == (1, 1, 0, 2)


def test_an_empty_step_that_is_left_out_neither_counts_as_a_skip_nor_ends_a_run_of_them():
    _, counts = _run(Guard(max_consecutive=3), [NAN, EMPTY, NAN], skip_empty=True)
    assert (counts.consecutive, counts.skipped, counts.stopped) == (2, 2, 0)


def test_l076_all_devices_decide_alike_from_a_reduced_flag():
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",))
    gradients = np.ones((2, 4), np.float32)
    gradients[1, 2] = np.nan  # only in the second device's part
    gradients = jax.device_put(gradients, NamedSharding(mesh, P("data")))

    @jax.jit
    def step(gradients, state):
        rows = summarize_magnitude(gradients, Split.of((("data",),), mesh.shape))
        finite = jnp.sum(rows.leaves["nan"] + rows.leaves["inf"]) == 0
        return decide(
            Guard(), state, finite=finite, co_spike=jnp.zeros((), bool), empty=jnp.zeros((), bool), skip_empty=False
        )

    skip, state = step(gradients, jax.device_put(init_guard(), NamedSharding(mesh, P())))
    assert [bool(shard.data) for shard in skip.addressable_shards] == [True, True]
    assert [int(shard.data) for shard in state.skipped.addressable_shards] == [1, 1]


def test_l078_optimizer_steps_and_attempted_steps_are_counted_apart_without_leaving_the_device():
    tx = optax.adam(0.1)
    params = {"w": jnp.ones((3,))}

    def step(carry, gradient):
        params, opt_state, guard = carry
        updates, new_opt = tx.update({"w": gradient}, opt_state)
        new = (optax.apply_updates(params, updates), new_opt)
        no = jnp.zeros((), bool)
        finite = jnp.isfinite(gradient).all()
        skip, guard = decide(Guard(), guard, finite=finite, co_spike=no, empty=no, skip_empty=False)
        guard = count_outcome(guard, skip=skip, finite=finite, update_finite=finite, applied=~no, dropped=no)
        return (*select(skip, (params, opt_state), new), guard), None

    gradients = np.ones((20, 3), np.float32)
    gradients[[7, 12], 1] = np.nan
    run = jax.jit(lambda carry, g: jax.lax.scan(step, carry, g)[0])  # one program: nothing is read on the way
    params_skipped, opt_skipped, guard = run((params, tx.init(params), init_guard()), gradients)
    assert (int(guard.applied), int(guard.attempted), int(guard.skipped)) == (18, 20, 2)
    assert int(opt_skipped[0].count) == 18
    # The two bad steps left no trace: the same as eighteen good ones.
    params_good, opt_good, _ = run((params, tx.init(params), init_guard()), np.delete(gradients, [7, 12], axis=0))
    jax.tree.map(np.testing.assert_array_equal, (params_skipped, opt_skipped), (params_good, opt_good))


def test_select_is_exact_for_every_kind_of_leaf():
    old = {
        "f": jnp.asarray([1.0, -0.0, 2.5]),
        "h": jnp.asarray([1.0], jnp.bfloat16),
        "i": jnp.asarray(7, jnp.uint32),
        "b": jnp.asarray([True, False]),
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(3), 2),
        "none": None,
    }
    new = {
        "f": jnp.asarray([np.nan, np.inf, 3.0]),
        "h": jnp.asarray([np.nan], jnp.bfloat16),
        "i": jnp.asarray(8, jnp.uint32),
        "b": jnp.asarray([False, False]),
        "key": jax.random.key(1),
        "keys": jax.random.split(jax.random.key(4), 2),
        "none": None,
    }

    def raw(tree):
        def bits(leaf):
            leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
            return np.asarray(leaf).tobytes()

        return jax.tree.map(bits, tree)

    chosen = jax.jit(select)
    assert raw(chosen(True, old, new)) == raw(old)
    assert raw(chosen(False, old, new)) == raw(new)
    assert jax.tree.map(lambda x: x.dtype, chosen(True, old, new)) == jax.tree.map(lambda x: x.dtype, old)


def test_select_refuses_a_leaf_that_changed_its_type_and_names_it():
    with pytest.raises(ValueError, match=r"\['w'\].*float32.*bfloat16"):
        select(jnp.asarray(True), {"w": jnp.ones((2,))}, {"w": jnp.ones((2,), jnp.bfloat16)})


def test_structure_is_fixed_under_scan_x64_and_strict_promotion():
    start = init_guard()

    def step(state, finite):
        no = jnp.zeros((), bool)
        skip, state = decide(Guard(co_spike=True), state, finite=finite, co_spike=no, empty=no, skip_empty=True)
        state = count_outcome(state, skip=skip, finite=finite, update_finite=finite, applied=~no, dropped=no)
        return state, skip

    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
        end, skips = jax.lax.scan(step, start, jnp.asarray([True, False, True]))
    assert all(leaf.dtype == jnp.uint32 and leaf.shape == () for leaf in (*start, *end))
    assert skips.tolist() == [False, True, False]
    assert (int(end.applied), int(end.skipped)) == (2, 1)


def test_no_two_counters_share_a_buffer():  # a donated state may not hold one twice
    pointers = [leaf.unsafe_buffer_pointer() for leaf in init_guard()]
    assert len(set(pointers)) == len(pointers)
