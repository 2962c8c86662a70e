"""A hash of the bits of dynamic quantisation."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np

import jaxquant

GRANULARITIES = (jaxquant.PerToken(), jaxquant.PerTensor(), jaxquant.PerAxis(1), jaxquant.PerGroup(5))
TYPES = ((jnp.int8, True), (jnp.uint8, False), (jnp.int4, True), (jnp.uint2, False))


def every_hash():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(33, 515)) * 10.0 ** rng.integers(-6, 6, (33, 1))
    x[3, 4], x[5, 6], x[7] = np.nan, np.inf, 0

    @jax.jit
    def results(xs):
        return {
            f"{x.dtype} {g} {qtype.__name__}": (
                jaxquant.dynamic_quantize(x, g, qtype=qtype, symmetric=symmetric),
                jaxquant.dynamic_fake_quantize(x, g, qtype=qtype, symmetric=symmetric).astype(jnp.float32),
            )
            for x in xs
            for g in GRANULARITIES
            for qtype, symmetric in TYPES
        }

    every = results([jnp.asarray(x, dtype) for dtype in ("float32", "bfloat16", "float16")])
    leaves = jax.tree_util.tree_flatten_with_path(every)[0]
    # The bits of a NaN are nobody's promise.
    return {
        jax.tree_util.keystr(path): hashlib.sha256(np.nan_to_num(np.asarray(leaf)).tobytes()).hexdigest()[:16]
        for path, leaf in leaves
    }
