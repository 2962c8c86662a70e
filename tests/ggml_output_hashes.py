"""A hash of the bits of every output of the block formats."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant import ggml

ROWS, SIZE = 13, 768
# One of each way to multiply.
PRODUCTS = ("F32", "F16", "BF16", "Q1_0", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ2_XXS",
            "IQ3_S", "IQ1_M", "IQ4_XS", "TQ1_0", "MXFP4", "NVFP4")  # fmt: skip


def values(*shape, seed):
    """Rows of many sizes, tiny ones too: what flush-to-zero would change."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 10.0 ** rng.choice([0, -3, 2, -15, -38], (*shape[:-1], 1))
    return np.where(rng.random(shape) < 0.02, x * 50, x).astype(np.float32)


def quantised(x, imatrix):
    outputs = {}
    for name, kind in ggml.formats.items():
        with_one = ggml.quantize(x, name, imatrix=imatrix)
        outputs[name] = {
            "imatrix": with_one,
            "halves": with_one.dequantize(jnp.float16),
            "values": with_one.dequantize(),
        }
        if not kind.requires_imatrix:
            outputs[name]["plain"] = ggml.quantize(x, name)
    return outputs


def multiplied(name, w, x, dy):
    outputs = {}
    for lhs in (jnp.int8, None):
        for tokens in (1, 5, 37):
            outputs[f"{lhs} {tokens}"] = ggml.linear(x[:tokens], w, lhs_qtype=lhs)
        outputs[f"{lhs} bfloat16"] = ggml.linear(x.astype(jnp.bfloat16), w.prepare(), lhs_qtype=lhs)
        experts = ggml.QTensor(jnp.stack([w.data, jnp.roll(w.data, 1, 0)]), name)
        ids = jnp.arange(74, dtype=jnp.int32).reshape(37, 2) % 5 // 2
        # Fields of any bytes, with the largest codes.
        wild = ggml.QTensor(jnp.asarray(np.random.default_rng(8).integers(0, 256, w.data.shape, np.uint8)), name)
        outputs[f"{lhs} wild"] = ggml.linear(jnp.sign(x), wild, lhs_qtype=lhs)
        outputs[f"{lhs} moe"] = ggml.moe_linear(x[:, None], experts, ids, lhs_qtype=lhs)
    return outputs | {"dx": jax.vjp(lambda x: ggml.linear(x, w), x)[1](dy)[0]}


def digest(a):
    """NaN counts as NaN, whatever its bits."""
    a = np.ascontiguousarray(a)
    if a.dtype.kind in "fV":
        a = np.where(np.isnan(a), np.full_like(a, np.nan), a)
    return hashlib.sha256(a.tobytes()).hexdigest()[:16]


def every_hash():
    imatrix = (np.random.default_rng(3).standard_normal(SIZE) ** 2).astype(np.float32)
    every = jax.jit(quantised)(values(ROWS, SIZE, seed=1), imatrix)
    w = jax.jit(quantised)(np.random.default_rng(4).standard_normal((ROWS, SIZE)).astype(np.float32), imatrix)
    x, dy = values(37, SIZE, seed=5), values(37, ROWS, seed=6)
    products = jax.jit(lambda ws, x, dy: {name: multiplied(name, ws[name], x, dy) for name in ws})
    every = {"codec": every, "products": products({name: w[name]["imatrix"] for name in PRODUCTS}, x, dy)}
    leaves = jax.tree_util.tree_flatten_with_path(every)[0]
    return {jax.tree_util.keystr(path): digest(leaf) for path, leaf in leaves}
