"""A hash of the bits of integer products."""

import hashlib

import jax
import numpy as np
from test_int_matmul import PROBLEMS, QTYPES, SIZES, Problem, codes

import jaxquant


def digest(a):
    return hashlib.sha256(np.ascontiguousarray(a).tobytes()).hexdigest()[:16]


def every_hash():
    rng = np.random.default_rng(0)
    sizes = [*SIZES[::2], (40, 130, 700), (3, 600, 133), (130, 40, 300), (50, 90, 1030)]
    pairs = {
        f"{m}x{n}x{k} {da.__name__} {db.__name__}": (codes(rng, da, m, k), codes(rng, db, k, n))
        for m, n, k in sizes
        for da, db in ((np.int8, np.int8), (np.uint8, np.int8), (np.int8, np.uint8))
    }
    every = {"integers": jax.jit(lambda pairs: {name: jaxquant.int_matmul(*p) for name, p in pairs.items()})(pairs)}
    zeros = {"zero_a": True, "zero_w": True}
    options = {
        **PROBLEMS,
        "large": {"m": 20, "k": 9000, "n": 20, "groups": 3, **zeros},
        "larger": {"m": 40, "k": 34_000, "n": 20, "groups": 2, "lhs": np.uint8, **zeros},
        "many groups": {"m": 35, "k": 2112, "n": 50, "groups": 32, **zeros},
    }
    problems = {f"{q} {name}": Problem(q, **o) for q in QTYPES for name, o in options.items()}
    operands = {name: [p.operands(False), p.operands(True)] for name, p in problems.items()}
    every["scaled"] = jax.jit(
        lambda operands: {
            name: [problems[name].call(*o, prepared=bool(i)) for i, o in enumerate(both)]
            for name, both in operands.items()
        }
    )(operands)
    leaves = jax.tree_util.tree_flatten_with_path(every)[0]
    return {jax.tree_util.keystr(path): digest(leaf) for path, leaf in leaves}
