"""Matrices of codes as NumPy makes them, in both layouts, and what they stand for in float64."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from jaxquant.affine.weight_only import Weight, no_zero_point, weight_only_gradient_p, weight_only_matmul_p

TYPES = ("int8", "uint8", "int4", "uint4", "int2", "uint2")


def pack(codes, bits):
    """Along the last axis, low bits first."""
    per = 8 // bits
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % per))).reshape(codes.shape[0], -(-codes.shape[1] // per), per)
    return np.bitwise_or.reduce(codes << (bits * np.arange(per)), axis=-1).astype(np.uint8)


def prepare(codes, bits):
    """Byte by byte, as the layout is defined."""
    k, n = codes.shape
    per = 8 // bits
    out = np.zeros((-(-n // 16), -(-k // (4 * per)), 64), np.uint8)
    rows, columns = np.indices((k, n))
    within = rows % (4 * per)
    at = columns // 16, rows // (4 * per), columns % 16 * 4 + within % 4
    np.bitwise_or.at(out, at, (codes << (within // 4 * bits)).astype(np.uint8))
    return out


@dataclasses.dataclass(frozen=True)
class Matrix:
    """codes [k, n], scale [groups, n or 1], zero_point of the scale's shape or None."""

    qtype: str
    codes: np.ndarray
    scale: np.ndarray
    zero_point: np.ndarray | None

    @property
    def bits(self):
        return int(self.qtype[-1])

    @property
    def signed(self):
        return self.qtype.startswith("int")

    @functools.cached_property
    def values(self):
        """float64 [k, n]."""
        each = self.codes.shape[0] // self.scale.shape[0]
        zero_point = 0.0 if self.zero_point is None else np.repeat(self.zero_point.astype(np.float64), each, 0)
        return (self.codes - zero_point) * np.repeat(self.scale.astype(np.float64), each, 0)

    def weight(self, layout):
        return Weight(self.bits, self.signed, self.codes.shape[1], self.codes.shape[0], layout)

    def data(self, layout):
        masked = self.codes.astype(np.int64) & (2**self.bits - 1)
        if layout == "prepared":
            return prepare(masked, self.bits)
        return pack(masked, self.bits) if self.bits < 8 else self.codes.astype(np.int8 if self.signed else np.uint8)

    def operands(self, layout):
        """Of the primitives, for a batch of one."""
        zero_point = no_zero_point() if self.zero_point is None else jnp.asarray(self.zero_point)[None]
        return jnp.asarray(self.data(layout))[None], jnp.asarray(self.scale)[None], zero_point


def matrix(qtype, k, n, groups=1, zero_point=False, per_tensor=False, seed=0):
    rng = np.random.default_rng(seed)
    bits = int(qtype[-1])
    low = -(2 ** (bits - 1)) if qtype.startswith("int") else 0
    shape = (groups, 1 if per_tensor else n)
    scale = rng.uniform(0.01, 0.03, shape).astype(np.float32)
    zero_points = rng.integers(low, low + 2**bits, shape).astype(np.float32) if zero_point else None
    return Matrix(qtype, rng.integers(low, low + 2**bits, (k, n)), scale, zero_points)


def matmul(x, w, layout="plain", implementation=None):
    """x [m, k] -> [m, n]"""
    operands = w.operands(layout)
    return weight_only_matmul_p.bind(
        jnp.asarray(x)[None], *operands, weight=w.weight(layout), implementation=implementation
    )[0]


def gradient(dy, w, layout="plain", implementation=None):
    """dy [m, n] -> [m, k]"""
    operands = w.operands(layout)
    return weight_only_gradient_p.bind(
        jnp.asarray(dy)[None], *operands, weight=w.weight(layout), implementation=implementation
    )[0]


def normal(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def nmse(actual, expected):
    """Normalised mean squared error; 0 where there is nothing to compare."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    return ((actual - expected) ** 2).sum() / max((expected**2).sum(), 1e-300)
