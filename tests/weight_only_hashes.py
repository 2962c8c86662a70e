"""A hash of the bits of weight-only products."""

import jax
from output_hashes import digest
from weight_only_cases import TYPES, gradient, matmul, matrix, normal


def every_hash():
    hashes = {}
    for qtype in TYPES:
        for k, n, groups, zero_point, rows in ((768, 200, 6, True, 70), (130, 33, 1, False, 5), (30, 17, 3, True, 3)):
            w = matrix(qtype, k, n, groups, zero_point)
            x, dy = normal(rows, k), normal(rows, n)
            for layout in ("plain", "prepared"):
                name = f"{qtype} {k} {n} {layout}"
                hashes[name] = digest(jax.jit(lambda x, w=w, layout=layout: matmul(x, w, layout))(x))
                hashes[f"{name} gradient"] = digest(jax.jit(lambda y, w=w, layout=layout: gradient(y, w, layout))(dy))
    return hashes
