"""What the tests of the block formats' transformations share: operations with small operands, and comparisons.

Weights are of Q8_0 (a scale and 32 signed bytes), which `decoded` reads without the package.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant import ggml

K, ROWS, TOKENS, EXPERTS = 64, 9, 5, 3  # all different, and no axis of another one's size
MAPPED, OUTER = 7, 2
FLOAT = 1e-10


def normal(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def q8_0(*shape, seed=2):
    return jax.device_get(ggml.quantize(normal(*shape, seed=seed), "Q8_0"))


def prepared(*shape):
    return jax.device_get(q8_0(*shape).prepare())


def decoded(w):
    """float64 values of Q8_0."""
    data = np.asarray(w.plain().data)
    blocks = data.reshape(*data.shape[:-1], -1, 34)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float64)
    values = scales * np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return values.reshape(*data.shape[:-1], -1)


def nmse(actual, expected):
    error = ((np.asarray(actual, np.float64) - expected) ** 2).sum()
    return 0.0 if error == 0 else error / (np.asarray(expected, np.float64) ** 2).sum()


def assert_same_bits(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual.view(np.uint8), expected.view(np.uint8))


def same(actual, expected):
    actual, expected = jax.device_get((actual, expected))
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(assert_same_bits, actual, expected)


def examples(size, operand):
    """Different values of one operand: an array of floats or of ids, or a QTensor."""
    if isinstance(operand, ggml.QTensor):
        plain = operand.plain()
        rolled = [ggml.QTensor(np.roll(plain.data, i, axis=-2), plain.format) for i in range(size)]
        return jax.device_get([w.prepare() if operand.layout == "prepared" else w for w in rolled])
    if operand.dtype.kind == "i":
        return [np.roll(operand, i) for i in range(size)]
    return [operand * np.float32(1 + i / 8) for i in range(size)]


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    function: Callable[..., Any]
    operands: tuple[Any, ...]
    keywords: dict = dataclasses.field(default_factory=dict)
    differentiable: bool = False  # in the first operand

    def __repr__(self):
        return self.name

    @functools.cached_property
    def call(self):
        return functools.partial(self.function, **self.keywords)

    @functools.cached_property
    def compiled(self):
        return jax.jit(self.call)

    @functools.cached_property
    def weights(self):
        return normal(*jax.eval_shape(self.call, *self.operands).shape, seed=7)

    def loss(self, *operands):
        return (self.call(*operands) * self.weights).sum()

    @functools.cached_property
    def gradient(self):
        return jax.jit(jax.grad(self.loss))


def dequantize(w, **keywords):
    return w.dequantize(**keywords)


def take(w, ids, **keywords):
    return w.take(ids, **keywords)


def quantize_with(x, imatrix, format):
    return ggml.quantize(x, format, imatrix=imatrix)


IDS = np.array([[0, 2], [1, 1], [-1, 0], [2, 2], [0, 1]], np.int32)
LINEAR = (normal(TOKENS, K), q8_0(ROWS, K))
SHARED = (normal(TOKENS, 1, K), q8_0(EXPERTS, ROWS, K), IDS)
BY_SLOT = (normal(TOKENS, 2, K), q8_0(EXPERTS, ROWS, K), IDS)
RAGGED = (normal(TOKENS, K), q8_0(EXPERTS, ROWS, K), np.array([2, 0, 2], np.int32))
FLOAT_LHS = {"lhs_qtype": None}

CASES = [
    Case("quantize", ggml.quantize, (normal(ROWS, K),), {"format": "Q5_1"}),
    Case("quantize_with_imatrix", quantize_with, (normal(ROWS, K), normal(K) ** 2), {"format": "Q4_0"}),
    Case("dequantize", dequantize, (q8_0(ROWS, K),)),
    Case("dequantize_half", dequantize, (prepared(16, K),), {"dtype": jnp.bfloat16}),
    Case("take", take, (q8_0(ROWS, K), np.array([[3, -1], [8, 9]], np.int32))),
    Case("prepare", ggml.QTensor.prepare, (q8_0(ROWS, K),)),
    Case("plain", ggml.QTensor.plain, (prepared(EXPERTS, ROWS, K),)),
    Case("linear", ggml.linear, LINEAR, differentiable=True),
    Case("linear_float", ggml.linear, LINEAR, FLOAT_LHS, differentiable=True),
    Case("linear_prepared", ggml.linear, (LINEAR[0], prepared(ROWS, K)), differentiable=True),
    Case("linear_vector", ggml.linear, (normal(K), q8_0(ROWS, K)), differentiable=True),
    Case("moe_linear", ggml.moe_linear, SHARED, differentiable=True),
    Case("moe_linear_float", ggml.moe_linear, BY_SLOT, FLOAT_LHS, differentiable=True),
    Case("moe_linear_prepared", ggml.moe_linear, (BY_SLOT[0], prepared(EXPERTS, ROWS, K), IDS), differentiable=True),
    Case("ragged_linear", ggml.ragged_linear, RAGGED, differentiable=True),
]
NAMED = {case.name: case for case in CASES}
PRODUCTS = [case for case in CASES if case.differentiable]
every_case = pytest.mark.parametrize("case", CASES, ids=repr)
every_product = pytest.mark.parametrize("case", PRODUCTS, ids=repr)


def stack(operands, axis):
    return jax.tree.map(lambda *leaves: np.stack(leaves, axis), *operands)


def rank(operand):
    return jax.tree.leaves(operand)[0].ndim


def looped(function, each):
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(a) for a in leaves]), *[function(*e) for e in each])


def subsets(case):
    indices = range(len(case.operands))
    return [s for size in indices for s in itertools.combinations(indices, size + 1)]
