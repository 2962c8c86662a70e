"""Gradients beyond their bits (test_values.py has those): orders, modes, dtypes, and what is computed at all.

The second derivatives are compared with rules derived by hand from the table of first derivatives, in which the mask
and round(t) - t are constants.
"""

import itertools
from functools import partial

import granularities
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import assert_same_bits, assert_same_sum

import jaxquant

forward_mode = jaxquant.forward_mode
close = partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-5)


@pytest.fixture
def operands():
    return granularities.PER_CHANNEL_FIRST.operands(zero_point_dtype=np.float32)


def fake_quantize(x, scale, zero_point, *, functions=jaxquant, **keywords):
    return functions.fake_quantize(x, scale, zero_point, axis=0, **keywords)


def carried_quantize(x, scale, zero_point, *, functions=jaxquant, **keywords):
    return functions.quantize(x, scale, zero_point, axis=0, dtype=jnp.float32, **keywords)


def dequantize(q, scale, zero_point, *, functions=jaxquant, **keywords):
    return functions.dequantize(q, scale, zero_point, axis=0, **keywords)


OPERATIONS = {
    "fake_quantize": (fake_quantize, oracle.fake_quantize_gradient),
    "quantize": (carried_quantize, oracle.quantize_gradient),
    "dequantize": (dequantize, oracle.dequantize_gradient),
}


def primals(name, operands):
    """dequantize takes codes, carried in float32."""
    if name != "dequantize":
        return operands.x, operands.scale, operands.zero_point
    codes = oracle.quantize(operands.x, operands.scale, operands.zero_point, axis=0, dtype=np.float32)
    return codes, operands.scale, operands.zero_point


SUBSETS = [subset for size in (1, 2, 3) for subset in itertools.combinations(range(3), size)]


@pytest.mark.parametrize("argnums", SUBSETS, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_subset_of_arguments(name, argnums, operands, implementation):
    function, rule = OPERATIONS[name]
    arguments = primals(name, operands)

    def loss(*a):
        return (function(*a, implementation=implementation) * operands.dy).sum()

    gradients = jax.jit(jax.grad(loss, argnums=argnums))(*arguments)
    wanted = rule(operands.dy, *arguments, axis=0)
    for argnum, gradient in zip(argnums, gradients, strict=True):
        if argnum == 0:
            assert_same_bits(gradient, wanted.dx)
        else:
            expected = wanted.dscale if argnum == 1 else wanted.dzero_point
            assert_same_sum(gradient, expected, np.float32, exact=implementation != "xla")


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("zero_point", [None, 3, "array"])
def test_integer_zero_points(name, zero_point, operands, implementation):
    """They have no gradient, and leave the others alone."""
    function, rule = OPERATIONS[name]
    x, scale, learned = primals(name, operands)
    zero_point = learned.astype(np.int32) if zero_point == "array" else zero_point

    def loss(x, s):
        return (function(x, s, zero_point, implementation=implementation) * operands.dy).sum()

    dx, dscale = jax.grad(loss, argnums=(0, 1))(x, scale)
    wanted = rule(operands.dy, x, scale, zero_point, axis=0)
    assert_same_bits(dx, wanted.dx)
    assert_same_sum(dscale, wanted.dscale, np.float32, exact=implementation != "xla")
    if not isinstance(zero_point, np.ndarray):
        return

    def whole(x, s, z):
        return (function(x, s, z, implementation=implementation) * operands.dy).sum()

    dx, dscale, dzero_point = jax.grad(whole, argnums=(0, 1, 2), allow_int=True)(x, scale, zero_point)
    assert dzero_point.dtype == jax.dtypes.float0 and dzero_point.shape == zero_point.shape
    assert_same_bits(dx, wanted.dx)
    assert_same_sum(dscale, wanted.dscale, np.float32, exact=implementation != "xla")


@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16", "float16"])
def test_gradients_come_back_in_the_dtype_of_their_operand(x_dtype, scale_dtype, implementation):
    operands = granularities.PER_CHANNEL_FIRST.operands(x_dtype)
    dtype = oracle.DTYPES[scale_dtype]
    scale, zero_point = operands.scale.astype(dtype), operands.zero_point.astype(dtype)
    for name in ("fake_quantize", "quantize"):
        function, rule = OPERATIONS[name]
        _, backward = jax.vjp(partial(function, implementation=implementation), operands.x, scale, zero_point)
        dy = operands.dy if name == "fake_quantize" else operands.dy.astype(np.float32)
        gradients = backward(dy)
        wanted = rule(dy, operands.x, scale, zero_point, axis=0)
        assert_same_bits(gradients[0], wanted.dx)
        assert_same_sum(gradients[1], wanted.dscale, dtype, exact=implementation != "xla")
        assert_same_sum(gradients[2], wanted.dzero_point, dtype, exact=implementation != "xla")


def test_python_scale(implementation):
    x = np.linspace(-3, 3, 100, dtype=np.float32)
    dscale = jax.grad(lambda s: jaxquant.fake_quantize(x, s, qtype=jnp.int4, implementation=implementation).sum())(0.3)
    wanted = oracle.fake_quantize_gradient(np.ones_like(x), x, np.float32(0.3), qtype="int4").dscale
    assert_same_sum(dscale, wanted, np.float32, exact=implementation != "xla")


def test_gradient_through_qparams(operands, implementation):
    """A pytree of parameters gets a pytree of gradients."""
    params = jaxquant.QParams(operands.scale[:, None], operands.zero_point[:, None], qtype=jnp.int8)

    def loss(p):
        return (jaxquant.fake_quantize(operands.x, p, implementation=implementation) * operands.dy).sum()

    gradient = jax.grad(loss)(params)
    wanted = oracle.fake_quantize_gradient(operands.dy, operands.x, params.scale, params.zero_point)
    assert_same_sum(gradient.scale, wanted.dscale, np.float32, exact=implementation != "xla")
    assert_same_sum(gradient.zero_point, wanted.dzero_point, np.float32, exact=implementation != "xla")


def test_integer_codes_have_no_tangent(operands):
    """Documented: a gradient through stored codes is silently zero."""
    _, backward = jax.vjp(lambda x: jaxquant.quantize(x, operands.scale, axis=0), operands.x)
    (dx,) = backward(np.zeros(operands.x.shape, jax.dtypes.float0))
    assert_same_bits(dx, np.zeros_like(operands.x))
    _, tangent = jax.jvp(lambda x: forward_mode.quantize(x, operands.scale, axis=0), (operands.x,), (operands.dy,))
    assert tangent.dtype == jax.dtypes.float0

    def stored(x):
        return jaxquant.dequantize(jaxquant.quantize(x, operands.scale, axis=0), operands.scale, axis=0).sum()

    assert_same_bits(jax.grad(stored)(operands.x), np.zeros_like(operands.x))


# ---------------------------------------------------------------------------------------------------- what is computed


def equations(jaxpr):
    """All equations, those of inner jaxprs included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def outputs_of(primitive, function, *arguments):
    """The number of results of each equation whose primitive's name ends so."""
    closed = jax.make_jaxpr(function)(*arguments)
    return [len(e.outvars) for e in equations(closed.jaxpr) if e.primitive.name.endswith(primitive)]


@pytest.mark.parametrize("name", OPERATIONS)
def test_only_wanted_gradients_are_computed(name, operands, implementation):
    function, _ = OPERATIONS[name]
    arguments = primals(name, operands)

    def loss(*a):
        return function(*a, implementation=implementation).sum()

    for argnums in SUBSETS:
        computed = outputs_of(f"{name}_gradient", jax.grad(loss, argnums=argnums), *arguments)
        assert computed == [len(argnums)], (argnums, computed)
    assert outputs_of(f"{name}_gradient", loss, *arguments) == []


def test_a_scale_without_gradient_costs_no_reduction(operands, implementation):
    def backward(x, dy):
        return jax.vjp(lambda x: fake_quantize(x, operands.scale, None, implementation=implementation), x)[1](dy)

    closed = jax.make_jaxpr(backward)(operands.x, operands.dy)
    names = [e.primitive.name for e in equations(closed.jaxpr)]
    assert not any(name.startswith("reduce") for name in names), names


def test_a_result_nobody_uses_has_no_gradient(operands, implementation):
    """Its upstream gradient is a symbolic zero, and no gradient primitive runs."""

    def loss(x, scale):
        unused = fake_quantize(x, scale, None, implementation=implementation)
        return (x * 2 + jax.lax.stop_gradient(unused)).sum()

    dx, dscale = jax.grad(loss, argnums=(0, 1))(operands.x, operands.scale)
    assert_same_bits(dx, np.full_like(operands.x, 2))
    assert_same_bits(dscale, np.zeros_like(operands.scale))
    gradient = jax.grad(loss, argnums=(0, 1))
    assert outputs_of("fake_quantize_gradient", gradient, operands.x, operands.scale) == []


# -------------------------------------------------------------------------------------------------------- second order


def table(name, x, scale, zero_point):
    """First and second partial derivatives of each element, from the table, with x, s, z as indices 0, 1, 2."""
    grid = {"axis": 0, "qtype": "int8"}
    if name == "dequantize":
        s, z = (np.broadcast_to(a[:, None], x.shape).astype(np.float64) for a in (scale, zero_point))
        value = (x - z) * s
        first = s, x - z, -s
        second = {(0, 1): np.ones_like(s), (1, 2): -np.ones_like(s)}
        return value, first, second
    a = oracle.steps(x, scale, zero_point, **grid)
    s, z, t, x = (v.astype(np.float64) for v in (a.s, a.z, a.t, a.x))
    inside, outside = a.mask.astype(np.float64), (a.above | a.below).astype(np.float64)
    if name == "quantize":
        value = np.clip(a.v, a.qmin, a.qmax).astype(np.float64)
        first = inside / s, -inside * t / s, inside
        return value, first, {(0, 1): -inside / s**2, (1, 1): 2 * inside * t / s**2}
    limit = np.where(a.above, a.qmax, a.qmin)
    value = (np.clip(a.v, a.qmin, a.qmax) - z) * s
    first = inside, np.where(a.mask, a.rounded - a.t, limit - z), -s * outside
    return value, first, {(1, 2): -outside}


def hessian_blocks(name, arguments):
    """d2/da db of sum(y^3): 6 y ya yb + 3 y^2 yab, per element, before summing over a shared scale."""
    value, first, second = table(name, *arguments)
    blocks = {}
    for i, j in itertools.product(range(3), repeat=2):
        mixed = second.get((min(i, j), max(i, j)), 0)
        blocks[i, j] = 6 * value * first[i] * first[j] + 3 * value**2 * mixed
    return blocks


@pytest.mark.parametrize("mode", ["reverse over reverse", "forward over reverse", "forward mode twice"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_second_order(name, mode, implementation):
    """All nine blocks, and what links elements that share nothing is exactly zero."""
    small = granularities.Granularity("small", (3, 5), (3,), axis=0).operands(zero_point_dtype=np.float32)
    arguments = tuple(np.asarray(a) for a in primals(name, small))
    function, _ = OPERATIONS[name]
    functions = forward_mode if mode == "forward mode twice" else jaxquant

    def loss(*a):
        return (function(*a, functions=functions, implementation=implementation) ** 3).sum()

    argnums = (0, 1, 2)
    second = {
        "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f, argnums), argnums),
        "forward over reverse": lambda f: jax.jacfwd(jax.grad(f, argnums), argnums),
        "forward mode twice": lambda f: jax.jacfwd(jax.jacfwd(f, argnums), argnums),
    }[mode](loss)
    actual = jax.jit(second)(*arguments)
    blocks = hessian_blocks(name, arguments)
    rows = np.arange(3)
    for i, j in itertools.product(range(3), repeat=2):
        block = blocks[i, j]
        if i == 0 and j == 0:
            wanted = np.diag(block.reshape(-1)).reshape(3, 5, 3, 5)
        elif i == 0:
            wanted = np.zeros((3, 5, 3))
            wanted[rows, :, rows] = block
        elif j == 0:
            wanted = np.zeros((3, 3, 5))
            wanted[rows, rows] = block
        else:
            wanted = np.diag(block.sum(axis=1))
        scale = max(np.abs(wanted).max(), 1)
        np.testing.assert_allclose(np.asarray(actual[i][j]) / scale, wanted / scale, rtol=2e-5, atol=2e-6)


def test_second_order_masks_by_select(implementation):
    """A NaN that the first derivative did not let through is not let through by its derivative either."""
    x, dy = np.float32([0.2, 500.0]), np.float32([np.nan, 1.0])

    def dzero_point(scale):
        function = partial(jaxquant.fake_quantize, x, scale, implementation=implementation)
        return jax.vjp(function, np.float32(0))[1](dy)[0]

    first, second = jax.jvp(dzero_point, (np.float32(0.5),), (np.float32(1),))
    assert (first, second) == (-0.5, -1.0)


def test_hessian_of_the_cube_is_exact(operands, implementation):
    """diag(6 fake_quantize(x) mask), by the product of a Hessian with the ones vector."""
    x = operands.x.reshape(-1)

    def loss(x):
        return (jaxquant.fake_quantize(x, 0.1, implementation=implementation) ** 3).sum()

    _, product = jax.jvp(jax.grad(loss), (x,), (np.ones_like(x),))
    value = oracle.fake_quantize(x, np.float32(0.1))
    mask = oracle.steps(x, np.float32(0.1)).mask
    close(product, 6 * value * mask)
    hessian = jax.jit(jax.hessian(loss))(x[:24])
    close(hessian, np.diag((6 * value * mask)[:24]))


# -------------------------------------------------------------------------------------------------------- forward mode


@pytest.mark.parametrize("name", OPERATIONS)
def test_forward_mode(name, operands, implementation):
    """jvp is the table's linear map, linearize splits it, and its transpose is the gradient."""
    function, rule = OPERATIONS[name]
    function = partial(function, functions=forward_mode, implementation=implementation)
    arguments = primals(name, operands)
    rng = np.random.default_rng(3)
    tangents = tuple(rng.normal(size=a.shape).astype(np.float32) for a in arguments)
    _, first, _ = table(name, *arguments)
    wide = tangents[0], tangents[1][:, None], tangents[2][:, None]
    wanted = sum(f * t for f, t in zip(first, wide, strict=True))
    value, tangent = jax.jit(lambda p, t: jax.jvp(function, p, t))(arguments, tangents)
    oracle_function = {
        "fake_quantize": oracle.fake_quantize,
        "quantize": oracle.quantize,
        "dequantize": oracle.dequantize,
    }
    keywords = {"dtype": np.float32} if name == "quantize" else {}
    assert_same_bits(value, oracle_function[name](*arguments, axis=0, **keywords))
    close(tangent, wanted, atol=1e-4)
    linear_value, linear = jax.linearize(function, *arguments)
    assert_same_bits(linear_value, np.asarray(value))
    close(linear(*tangents), wanted, atol=1e-4)
    gradients = jax.jit(jax.grad(lambda *a: (function(*a) * operands.dy).sum(), argnums=(0, 1, 2)))(*arguments)
    expected = rule(operands.dy, *arguments, axis=0)
    assert_same_bits(gradients[0], expected.dx)
    close(gradients[1], expected.dscale.value, atol=1e-3)
    close(gradients[2], expected.dzero_point.value, atol=1e-3)


@pytest.mark.parametrize("argnum", [0, 1, 2])
@pytest.mark.parametrize("name", OPERATIONS)
def test_forward_mode_per_argument(name, argnum, operands, implementation):
    """Only one operand moves; the others have no tangent at all."""
    function, _ = OPERATIONS[name]
    arguments = primals(name, operands)
    tangent = np.random.default_rng(4).normal(size=arguments[argnum].shape).astype(np.float32)

    def along(a):
        replaced = (*arguments[:argnum], a, *arguments[argnum + 1 :])
        return function(*replaced, functions=forward_mode, implementation=implementation)

    _, actual = jax.jvp(along, (arguments[argnum],), (tangent,))
    _, first, _ = table(name, *arguments)
    close(actual, first[argnum] * (tangent if argnum == 0 else tangent[:, None]), atol=1e-4)


def test_forward_mode_with_integer_zero_points(operands, implementation):
    """jvp gives them a float0 tangent."""
    x, scale = operands.x, operands.scale
    zero_point = operands.zero_point.astype(np.int32)
    function = partial(fake_quantize, functions=forward_mode, implementation=implementation)
    none = np.zeros(zero_point.shape, jax.dtypes.float0)
    value, tangent = jax.jvp(function, (x, scale, zero_point), (operands.dy, np.ones_like(scale), none))
    _, first, _ = table("fake_quantize", x, scale, zero_point)
    assert_same_bits(value, oracle.fake_quantize(x, scale, zero_point, axis=0))
    close(tangent, first[0] * operands.dy + first[1], atol=1e-4)


@pytest.mark.parametrize("name", OPERATIONS)
def test_reverse_mode_functions_refuse_forward_mode(name, operands):
    """By JAX's own error; forward_mode is the spelling for that."""
    function, _ = OPERATIONS[name]
    arguments = primals(name, operands)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: function(x, *arguments[1:]), (arguments[0],), (arguments[0],))


def test_forward_mode_masks_by_select(implementation):
    """A NaN or infinite tangent outside the range is not seen."""
    x = np.float32([0.2, 500.0, np.nan, -np.inf])
    tangent = np.float32([1.0, np.nan, np.inf, np.nan])

    def call(x):
        return forward_mode.fake_quantize(x, 0.5, implementation=implementation)

    assert_same_bits(jax.jvp(call, (x,), (tangent,))[1], np.float32([1, 0, 0, 0]))


@pytest.mark.parametrize("name", ["fake_quantize", "quantize"])
def test_nan_in_x_has_no_gradient(name, implementation):
    """Neither its own nor a part in the scale's and the zero point's; an infinity has a finite part."""
    x = np.float32([[np.nan, 1.0, 300.0, np.inf], [np.nan] * 4])
    function, rule = OPERATIONS[name]
    scale, zero_point = np.float32([0.5, 0.5]), np.float32([2, 3])

    def loss(*a):
        return function(*a, implementation=implementation).sum()

    gradients = jax.grad(loss, argnums=(0, 1, 2))(x, scale, zero_point)
    wanted = rule(np.ones_like(x), x, scale, zero_point, axis=0)
    for actual, expected in zip(gradients, (wanted.dx, wanted.dscale.value, wanted.dzero_point.value), strict=True):
        assert np.isfinite(actual).all()
        assert_same_bits(actual, expected)
    assert gradients[1][1] == 0 and gradients[2][1] == 0


def test_founding_operation(operands, implementation):
    """quantize_per_channel in x's dtype, and its backward by itself."""
    x, scale, dy = operands.x, operands.scale, operands.dy
    zero_point = operands.zero_point.astype(np.int32)
    keywords = {"qtype": jnp.int8, "implementation": implementation}
    codes = jaxquant.quantize_per_channel(x, scale, zero_point, 0, **keywords)
    assert_same_bits(codes, oracle.quantize(x, scale, zero_point, axis=0))

    def carried(x):
        return jaxquant.quantize_per_channel(x, scale, zero_point, 0, dtype=x.dtype, **keywords)

    value, backward = jax.vjp(carried, x)
    assert_same_bits(value, oracle.quantize(x, scale, zero_point, axis=0, dtype=np.float32))
    wanted = oracle.quantize_backward(dy, x, scale, zero_point, axis=0)
    assert_same_bits(backward(dy)[0], wanted)
    assert_same_bits(jaxquant.quantize_per_channel_backward(dy, x, scale, zero_point, 0, **keywords), wanted)
    narrow = {**keywords, "qmin": -7, "qmax": 7}
    inside = jaxquant.quantize_per_channel_backward(dy, x, scale, np.zeros_like(zero_point), 0, **narrow)
    assert_same_bits(inside, oracle.quantize_backward(dy, x, scale, axis=0, qmin=-7, qmax=7))
