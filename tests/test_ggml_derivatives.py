"""Derivatives of the block formats' products, of any order, against float64, and through other transformations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ggml_cases import (
    EXPERTS,
    FLOAT,
    FLOAT_LHS,
    LINEAR,
    ROWS,
    TOKENS,
    K,
    assert_same_bits,
    decoded,
    every_product,
    nmse,
    normal,
    q8_0,
    same,
)

from jaxquant import ggml


def matrix_of(case):
    """float64 [tokens, results of a token, values of a token] of a product's linear map."""
    w = decoded(case.operands[1])
    x = case.operands[0]
    if case.name.startswith("linear"):
        return np.broadcast_to(w, (x.size // K, *w.shape))
    if case.name == "ragged_linear":
        ids = np.repeat(np.arange(EXPERTS), case.operands[2])
        ids = np.append(ids, [-1] * (TOKENS - len(ids)))[:, None]
    else:
        ids = np.asarray(case.operands[2])
    chosen = np.where(((ids >= 0) & (ids < EXPERTS))[..., None, None], w[np.clip(ids, 0, EXPERTS - 1)], 0)
    if case.name == "ragged_linear":
        return chosen[:, 0]
    tokens, slots = ids.shape
    if x.shape[1] == 1:
        return chosen.reshape(tokens, slots * ROWS, K)
    out = np.zeros((tokens, slots, ROWS, slots, K))
    for s in range(slots):
        out[:, s, :, s] = chosen[:, s]
    return out.reshape(tokens, slots * ROWS, slots * K)


@every_product
def test_derivatives(case):
    """First derivatives forward and backward, Jacobians, linearisation and its transpose, against float64."""
    x, *rest = case.operands
    matrix = matrix_of(case)
    tokens, out, inner = matrix.shape
    shape, weights = case.weights.shape, np.asarray(case.weights, np.float64).reshape(tokens, out, 1)
    tangent = jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)

    def call(x):
        return case.call(x, *rest)

    def every(x):
        value, pushed = jax.jvp(call, (x,), (tangent,))
        _, linear = jax.linearize(call, x)
        return {
            "value": value,
            "grad": jax.grad(case.loss)(x, *rest),
            "pushed": pushed,
            "linearized": linear(tangent),
            "transposed": jax.linear_transpose(linear, x)(case.weights)[0],
            "many pushed": jax.vmap(lambda t: jax.jvp(call, (x,), (t,))[1])(jnp.stack([tangent, x])),
            "many pulled": jax.vmap(jax.vjp(call, x)[1])(jnp.stack([case.weights, 2 * case.weights])),
            "jacrev": jax.jacrev(call)(x),
            "jacfwd": jax.jacfwd(call)(x),
        }

    actual = jax.jit(every)(x)
    same(actual["value"], case.compiled(*case.operands))
    pulled = (matrix * weights).sum(1).reshape(x.shape)
    push = lambda t: (matrix @ np.asarray(t, np.float64).reshape(tokens, inner, 1)).reshape(shape)  # noqa: E731
    assert nmse(actual["value"], push(x)) <= (FLOAT if case.keywords else 1e-4)
    for name in ("grad", "transposed"):
        assert nmse(actual[name], pulled) <= FLOAT, name
        assert_same_bits(actual[name], actual["grad"])
    for name in ("pushed", "linearized"):
        assert nmse(actual[name], push(tangent)) <= FLOAT, name
    assert nmse(actual["many pushed"], np.stack([push(tangent), push(x)])) <= FLOAT
    assert nmse(actual["many pulled"][0], np.stack([pulled, 2 * pulled])) <= FLOAT
    jacobian = np.einsum("tij,ts->tisj", matrix, np.eye(tokens)).reshape(*shape, *x.shape)
    for name in ("jacrev", "jacfwd"):
        assert nmse(actual[name], jacobian) <= FLOAT, name
    same(jax.grad(case.loss)(x, *rest), actual["grad"])


@every_product
def test_second_derivatives(case):
    """Of a loss whose second derivative is known: sum(sin(y)) / 2 has -sin(y) on its diagonal."""
    if "float" not in case.name:
        keywords = {**case.keywords, **FLOAT_LHS}
        case = dataclasses.replace(case, keywords=keywords)
    x, *rest = case.operands
    matrix = matrix_of(case)
    tokens, _, inner = matrix.shape
    direction = jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)

    def loss(x):
        return jnp.sin(case.call(x, *rest) / 8).sum()

    def along(x):
        return (jax.grad(loss)(x) * direction).sum()

    y = (matrix @ np.asarray(x, np.float64).reshape(tokens, inner, 1)) / 8
    hessian = np.einsum("tio,to,toj->tij", np.swapaxes(matrix, 1, 2), -np.sin(y)[..., 0] / 64, matrix)
    expected = (hessian @ np.asarray(direction, np.float64).reshape(tokens, inner, 1)).reshape(x.shape)
    every = jax.jit(
        lambda x: (
            jax.jvp(jax.grad(loss), (x,), (direction,))[1],
            jax.grad(along)(x),
            jax.grad(lambda x: jax.jvp(loss, (x,), (direction,))[1])(x),
            jax.hessian(loss)(x) if x.size <= 2 * K else None,
        )
    )
    *products, full = every(x)
    for actual in products:
        assert nmse(actual, expected) <= 1e-9
    if full is not None:
        assert nmse(full, np.asarray(hessian).reshape(full.shape)) <= 1e-9


def test_a_full_hessian():
    w, x = q8_0(ROWS, K), normal(K)
    hessian = jax.jit(jax.hessian(lambda x: jnp.sin(ggml.linear(x, w, lhs_qtype=None) / 8).sum()))(x)
    matrix = decoded(w)
    y = matrix @ np.asarray(x, np.float64) / 8
    assert nmse(hessian, matrix.T @ (-np.sin(y)[:, None] / 64 * matrix)) <= 1e-9


@every_product
def test_remat(case):
    policies = jax.checkpoint_policies
    names = ("nothing_saveable", "everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable")
    every = [None, *(getattr(policies, name) for name in names)]
    gradients = jax.jit(lambda *a: [jax.grad(jax.checkpoint(case.loss, policy=p))(*a) for p in every])
    for actual in gradients(*case.operands):
        assert_same_bits(actual, case.gradient(*case.operands))


@every_product
def test_gradient_of_transformed(case):
    expected = case.gradient(*case.operands)

    def branch(*a):
        return jax.lax.cond(a[0].sum() < 1e9, lambda: case.loss(*a), lambda: 0.0 * case.loss(*a))

    def one_step(*a):
        return jax.lax.scan(lambda c, _: (c + case.loss(*a), None), jnp.float32(0), None, 1)[0]

    def mapped(*a):
        return jax.vmap(case.loss)(*jax.tree.map(lambda leaf: jnp.expand_dims(leaf, 0), a)).sum()

    losses = [branch, one_step, mapped, jax.jit(case.loss)]
    for actual in jax.jit(lambda *a: [jax.grad(f)(*a) for f in losses])(*case.operands):
        assert_same_bits(actual, expected)


@pytest.mark.smoke
def test_weights_have_no_gradient():
    """Integers to JAX: a float0 of the data, in a QTensor; nothing of the weights' size is stored in floating point."""
    x, w = LINEAR
    gradient = jax.grad(lambda w: ggml.linear(x, w).sum(), allow_int=True)(w)
    assert isinstance(gradient, ggml.QTensor) and gradient.data.dtype == jax.dtypes.float0
    with pytest.raises(TypeError, match="grad requires real"):
        jax.grad(lambda w: ggml.linear(x, w).sum())(w)
    zeros = jax.tree.map(lambda a: np.zeros(a.shape, jax.dtypes.float0), w)
    _, tangent = jax.jvp(lambda w: ggml.linear(x, w), (w,), (zeros,))
    assert tangent.shape == (TOKENS, ROWS) and not np.asarray(tangent).any()
    _, backward = jax.vjp(lambda x: ggml.linear(x, w), x)
    saved = [leaf for leaf in jax.tree.leaves(backward) if np.size(leaf) >= min(x.size, w.size)]
    assert all(leaf.dtype == np.uint8 for leaf in saved), saved


@pytest.mark.smoke
def test_adapters_train_over_frozen_weights():
    """A low-rank addition beside a quantised matrix, the usual fine-tuning, lowers its loss."""
    x, w = normal(33, K), q8_0(ROWS, K)
    target = x @ normal(K, ROWS, seed=9)
    adapter = {"a": normal(K, 8, seed=3) / 8, "b": jnp.zeros((8, ROWS))}

    def loss(adapter, w):
        return ((ggml.linear(x, w) + x @ adapter["a"] @ adapter["b"] - target) ** 2).mean()

    @jax.jit
    def step(adapter, w):
        value, gradient = jax.value_and_grad(loss)(adapter, w)
        return jax.tree.map(lambda p, g: p - 0.03 * g, adapter, gradient), value

    values = []
    for _ in range(40):
        adapter, value = step(adapter, w)
        values.append(float(value))
    assert values[-1] < 0.6 * values[0]


def test_no_gradient_through_quantisation():
    """Neither quantising nor reading values is differentiable in its bytes; x's tangent ends there, as for any cast."""
    x = normal(2, K)
    gradient = jax.grad(lambda x: ggml.quantize(x, "Q8_0").dequantize().sum())(x)
    assert not np.asarray(gradient).any()
    x, w = LINEAR
    for call in (lambda w: w.prepare().dequantize(), lambda w: w.take(jnp.array([0, 1]))):
        gradient = jax.grad(lambda x, w: (x[:2] @ call(w)[:2].T).sum(), (0, 1), allow_int=True)(x, w)[0]  # noqa: B023
        np.testing.assert_allclose(gradient[0], decoded(w)[:2].sum(0), rtol=1e-5)
    _, tangent = jax.jvp(lambda x: ggml.quantize(x, "Q8_0").dequantize(), (x,), (x,))
    assert not np.asarray(tangent).any()
