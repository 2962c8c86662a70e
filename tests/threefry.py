"""What stochastic rounding draws, in plain NumPy: nothing here imports the library or JAX."""

import math

import numpy as np


def threefry2x32(key, high, low):
    """The two words of the block with the counter (high, low): Salmon et al., 2011, 20 rounds."""
    k0, k1 = (np.uint32(word) for word in key)
    schedule = [k0, k1, k0 ^ k1 ^ np.uint32(0x1BD11BDA)]
    with np.errstate(over="ignore"):
        a = np.asarray(high, np.uint32) + schedule[0]
        b = np.asarray(low, np.uint32) + schedule[1]
        for i in range(20):
            distance = (13, 15, 26, 6, 17, 29, 16, 24)[i % 8]
            a = a + b
            b = (b << np.uint32(distance) | b >> np.uint32(32 - distance)) ^ a
            if i % 4 == 3:
                turn = i // 4 + 1
                a = a + schedule[turn % 3]
                b = b + schedule[(turn + 1) % 3] + np.uint32(turn)
    return a, b


def words(key, index):
    """One for each row-major index (uint64)."""
    index = np.asarray(index, np.uint64)
    pair = index >> np.uint64(1)
    even, odd = threefry2x32(key, (pair >> np.uint64(32)).astype(np.uint32), pair.astype(np.uint32))
    return np.where(index % np.uint64(2) == 0, even, odd)


def uniform(key, shape):
    """u of each element of an array."""
    index = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
    return (words(key, index) >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)
