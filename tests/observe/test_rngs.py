"""Random keys by stream name."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from probes_jax.observe.rngs import Rngs, stream_hash


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_streams_differ_by_name_and_key_and_repeat(make):
    def data(key):
        return np.asarray(jax.random.key_data(key) if jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key) else key)

    one, two = Rngs(make(0)), Rngs(make(1))
    np.testing.assert_array_equal(data(one["dropout"]), data(one.dropout))
    streams = [data(rngs[name]).tolist() for rngs in (one, two) for name in ("dropout", "noise", "params")]
    assert len({tuple(stream) for stream in streams}) == 6
    assert set(one.streams(("a", "b"))) == {"a", "b"}
    np.testing.assert_array_equal(data(one.key), data(make(0)))


def test_the_hash_of_a_name_never_changes():
    assert stream_hash("dropout") == 457968169
    assert stream_hash("dropout") != stream_hash("Dropout")


def test_it_is_a_pytree_and_has_no_private_streams():
    rngs = jax.jit(lambda rngs: rngs)(Rngs(jax.random.key(0)))
    assert isinstance(rngs, Rngs)
    with pytest.raises(AttributeError):
        _ = rngs._private
