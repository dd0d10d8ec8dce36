"""A checksum of the bits of an array, as one word: exact, whatever the dtype.

It is the sum, mod 2^32, of a scrambled word for each element. The word is the element's bits plus a multiple of its
position, and the scrambling takes different words to different words. So a change of one element, by any number of
bits, always shows. Of changes of several elements, a swap of two of them among these, one in about 2^32 does not. (A
sum of bits times odd positions would miss every swap of x and -x: their bits differ by 2^31, the weights by an even
number.) Positions repeat after 2^32 elements.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from probes_jax.stats.manual import differing, spread

_STRIDE = np.uint32(0x9E3779B9)  # odd, so that 2^32 positions stay apart
_SMALL = 2**16  # elements; below this the plain form is as good
_BLOCK = 2**14  # elements; a block stays in cache
_LEAST_BLOCK = 2**7


def scramble(word: jax.Array) -> jax.Array:
    """uint32 to uint32, one to one, each bit of the result hanging on all of the word (Wellons 2018, lowbias32)."""
    word = (word ^ (word >> 16)) * np.uint32(0x7FEB352D)
    word = (word ^ (word >> 15)) * np.uint32(0x846CA68B)
    return word ^ (word >> 16)


def words_of(x: jax.Array) -> jax.Array:
    """The bits of each element, uint32 of the shape of `x`; elements of 64 bits have one more axis."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([words_of(jnp.real(x)), words_of(jnp.imag(x))])
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if x.dtype.itemsize < 4 and jnp.issubdtype(x.dtype, jnp.integer):
        x = x.astype(jnp.int32)
    elif jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 8:  # packed; every value has one pattern
        x = x.astype(jnp.float32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[x.dtype.itemsize]
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def checksum(x: jax.Array) -> jax.Array:
    """The checksum of an array of any shape and dtype, uint32, 0-d.

    Example:
        >>> import jax.numpy as jnp
        >>> a, b = checksum(jnp.asarray([1.0, -1.0])), checksum(jnp.asarray([-1.0, 1.0]))
        >>> bool(a == b), bool(a == checksum(jnp.asarray([1.0, -1.0])))
        (False, True)
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    block = min(x.size & -x.size, _BLOCK)
    if x.size < _SMALL or block < _LEAST_BLOCK or x.dtype.itemsize > 4:
        return _whole(x)
    return jax.lax.platform_dependent(x, cpu=lambda x: _by_blocks(x, block), default=_whole)


def _whole(x: jax.Array) -> jax.Array:
    words = words_of(x)
    position = jnp.zeros(words.shape, jnp.uint32)
    for axis, length in enumerate(words.shape):  # not a reshape, which moves data on TPU
        position = position * np.uint32(length % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    return jnp.sum(scramble(words + position * _STRIDE), dtype=jnp.uint32)


def _by_blocks(x: jax.Array, block: int) -> jax.Array:
    """The same, several times faster where XLA would write the scrambled words to memory first (see `stats.fold`)."""
    x = x.reshape(-1, block)
    inside = jax.lax.iota(jnp.uint32, block)

    def add(index: jax.Array, total: jax.Array) -> jax.Array:
        # Behind the barrier, XLA cannot convert the whole of a narrow array before the loop.
        array, index = jax.lax.optimization_barrier((x, index))
        words = words_of(jax.lax.dynamic_index_in_dim(array, index, keepdims=False))
        return total + scramble(words + (index.astype(jnp.uint32) * np.uint32(block) + inside) * _STRIDE)

    nothing = spread(jnp.zeros((block,), jnp.uint32), differing(x))
    return jnp.sum(jax.lax.fori_loop(0, x.shape[0], add, nothing), dtype=jnp.uint32)
