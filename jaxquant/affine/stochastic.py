"""Stochastic rounding: which way an element rounds is drawn from a key and the element's place in its array.

    t    = x / s
    u    = (word >> 8) * 2^-24           24 random bits: 0, 2^-24, ..., 1 - 2^-24
    v    = floor(t) + (u >= 1 - (t - floor(t)) ? 1 : 0) + z

This is floor(t + u) + z without the rounding of the sum, which would move up to one in 2^17 of the elements that lie on
the grid already. The word: with i the element's row-major index in the whole array, threefry2x32 of the key and the
counter i >> 1 (high word, low word) gives two; even i take the first. There is no state: a shard, an example under vmap
or a backward pass that knows its place draws the same. The kernels have the same rule in ffi/affine/rounding.h.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant._core import compat, places
from jaxquant._core.errors import refuse
from jaxquant.affine import scales

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def operands(operation: str, rounding: Any, key: Any, resolved: scales.Resolved) -> tuple[tuple[Any, ...], Any]:
    """What a primitive takes: x, scale, zero point and, with a key, its words at x's rank; and further parameters."""
    given = (resolved.x, resolved.scale, resolved.zero_point)
    rank = resolved.x.ndim
    words = _words(operation, rounding, key, rank)
    return (compat.match_varying_axes(*given, *words), (("index_rank", rank),)) if words else (given, ())


def _words(operation: str, rounding: Any, key: Any, rank: int) -> tuple[Any, ...]:
    if rounding not in ("nearest", "stochastic"):
        raise refuse(operation, "rounding", '"nearest" or "stochastic"', repr(rounding), "choose one of them")
    if rounding == "nearest":
        if key is not None:
            raise refuse(operation, "key", 'None with rounding="nearest"', "a key", 'pass rounding="stochastic"')
        return ()
    if key is None:
        raise refuse(
            operation,
            "key",
            'a key with rounding="stochastic"',
            "None",
            "pass key=jax.random.key(seed), a new one each time",
        )
    dtype = getattr(key, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        name = str(jax.random.key_impl(key))
        if name != "threefry2x32":
            remedy = 'make one with jax.random.key(seed, impl="threefry2x32")'
            raise refuse(operation, "key", "a threefry2x32 key", f"one of {name}", remedy, TypeError)
        key = jax.random.key_data(key)
    elif dtype != jnp.uint32:
        got = type(key).__name__ if dtype is None else str(dtype)
        remedy = "make one with jax.random.key(seed)"
        raise refuse(operation, "key", "a typed key or its two uint32 words", got, remedy, TypeError)
    if np.shape(key) != (2,):
        got = f"shape {np.shape(key)} of words"
        raise refuse(operation, "key", "one key", got, "pass one key for the array, or map over keys with jax.vmap")
    key = jax.lax.stop_gradient(jnp.asarray(key))
    return tuple(key[i].reshape((1,) * rank) for i in range(2))


def threefry2x32(key: Sequence[Any], high: Any, low: Any) -> tuple[Any, Any]:
    """The two words of the block (high, low): Salmon et al., 2011, 20 rounds, as jax.random has it."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    a, b = high + schedule[0], low + schedule[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            a = a + b
            b = ((b << distance) | (b >> (32 - distance))) ^ a
        a = a + schedule[(group + 1) % 3]
        b = b + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return a, b


def uniform(shape: tuple[Any, ...], key: Sequence[Any], index_rank: int) -> Any:
    """u of every element of an array of `shape`, whose places count along the last `index_rank` axes."""
    axes = range(len(shape) - index_rank, len(shape))
    high, low = places.index(places.iotas(shape, axes), [shape[d] for d in axes])
    first, second = threefry2x32(key, high >> 1, (low >> 1) | (high << 31))
    bits = jnp.where((low & 1) == 0, first, second) >> 8
    return jnp.broadcast_to(bits.astype(jnp.float32) * np.float32(2.0**-24), shape)


def rounding(shape: tuple[Any, ...], key: Sequence[Any], index_rank: int) -> Callable[[Any], Any]:
    """t -> t rounded: half to even without a key."""
    if not key:
        return jnp.round

    def stochastically(t: Any) -> Any:
        u = uniform(shape, key, index_rank).astype(t.dtype)
        down = jnp.floor(t)
        # Adding +0 makes +0 of the -0 that floor leaves.
        return down + jnp.where(u >= 1 - (t - down), 1, 0).astype(t.dtype)

    return stochastically
