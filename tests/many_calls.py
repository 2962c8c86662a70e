"""Many kernel calls in one program, from 8 threads at once: run by test_threads.py, in a process that may be killed.

python many_calls.py [cpu ...]     pinned to these CPUs before JAX starts its thread pools
"""

import concurrent.futures
import os
import sys

if sys.argv[1:]:
    os.sched_setaffinity(0, {int(cpu) for cpu in sys.argv[1:]})

import jax
import jax.numpy as jnp
import numpy as np

import jaxquant

THREADS, ROUNDS, CALLS = 8, 6, 12

# Large enough to be cut into chunks for the thread pool, packed codes and sums included.
X = np.random.default_rng(0).normal(size=(48, 4096)).astype(np.float32)


@jax.jit
def many(x, scale):
    """Independent calls: XLA runs them at the same time, on the pool that they hand their chunks to."""
    results = []
    for i in range(CALLS):

        def loss(x, s, i=i):
            return jaxquant.fake_quantize(x * (1 + i), s, axis=0, implementation="ffi").sum()

        packed = jaxquant.quantize(x + i, scale, axis=0, qtype=jnp.int4, packed=True, implementation="ffi")
        results.append((jax.grad(loss, (0, 1))(x, scale), packed))
    return results


def main():
    scale = np.linspace(0.01, 0.05, len(X), dtype=np.float32)
    expected = jax.device_get(many(X, scale))

    def work(_):
        for _ in range(ROUNDS):
            actual = jax.device_get(many(X, scale))
            for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
                np.testing.assert_array_equal(a, b)
        return True

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        print("done", sum(pool.map(work, range(THREADS))))


if __name__ == "__main__":
    main()
