"""Everything the affine operations return for one set of operands: from the library, and from the oracle.

results(..., implementation=...)   a function of (x, scale, zero_point, dy), to be called as it is or under jit
expected(...)                      the same dictionary from the oracle; sums as `oracle.Sum`
compare(actual, wanted, ...)       every entry, bits where bits are promised
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle

import jaxquant

# Largest magnitude up to which every integer is exact.
EXACT = {"float16": 2048, "bfloat16": 256}


def precision(*dtypes):
    """A context in which float64 exists, where any of the dtypes needs it."""
    wide = any(np.dtype(dtype) == np.float64 for dtype in dtypes)
    return jax.enable_x64(True) if wide else contextlib.nullcontext()


def library_keywords(keywords):
    """The oracle's keywords with the code type as JAX names it."""
    return {**keywords, "qtype": getattr(jnp, keywords.get("qtype", "int8"))}


def carrier(dtype, qtype, qmin=None, qmax=None):
    """x's dtype, or float32 where that cannot hold the codes."""
    dtype = np.dtype(dtype)
    reach = max(map(abs, oracle.code_range(qtype, qmin, qmax)))
    return np.dtype(np.float32) if reach > EXACT.get(dtype.name, reach) else dtype


CORE = ("quantize", "fake_quantize", "dequantize", "quantize_backward", "fake_quantize_gradient")


def affordable(implementation):
    """What to compare where a test has many parameters: XLA takes far longer to compile its own code than a call."""
    return CORE if implementation == "xla" else None


def results(keywords, dtype, implementation=None, names=None):
    """Outputs and gradients (all, or those of ``names``) as a function of (x, scale, zero_point, dy)."""
    where = {name: keywords.get(name) for name in ("axis", "block_shape")} | {"implementation": implementation}
    grid = library_keywords(keywords) | {"implementation": implementation}
    carried_in = carrier(dtype, keywords.get("qtype", "int8"), keywords.get("qmin"), keywords.get("qmax"))

    def call(x, scale, zero_point, dy):
        learned = zero_point.astype(np.promote_types(scale.dtype, np.float32))

        @functools.cache
        def codes():
            return jaxquant.quantize(x, scale, zero_point, **grid)

        @functools.cache
        def fake():
            return jax.vjp(lambda *a: jaxquant.fake_quantize(*a, **grid), x, scale, learned)

        @functools.cache
        def carried():
            return jax.vjp(lambda *a: jaxquant.quantize(*a, **grid, dtype=carried_in), x, scale, learned)

        @functools.cache
        def back():
            return jax.vjp(lambda *a: jaxquant.dequantize(*a, **where, dtype=dtype), carried()[0], scale, learned)

        outputs = {
            "quantize": codes,
            "quantize_carried": lambda: carried()[0],
            "fake_quantize": lambda: fake()[0],
            "fake_quantize_integer_zero_point": lambda: jaxquant.fake_quantize(x, scale, zero_point, **grid),
            "dequantize": lambda: jaxquant.dequantize(codes(), scale, zero_point, **where, dtype=dtype),
            "dequantize_carried": lambda: back()[0],
            "quantize_backward": lambda: jaxquant.quantize_backward(dy, x, scale, zero_point, **grid),
            "fake_quantize_gradient": lambda: fake()[1](dy),
            "quantize_gradient": lambda: carried()[1](dy.astype(carried_in)),
            "dequantize_gradient": lambda: back()[1](dy),
        }
        return {name: outputs[name]() for name in names or outputs}

    return call


def expected(x, scale, zero_point, dy, keywords):
    where = {name: keywords.get(name) for name in ("axis", "block_shape")}
    carried_in = carrier(x.dtype, keywords.get("qtype", "int8"), keywords.get("qmin"), keywords.get("qmax"))
    codes = oracle.quantize(x, scale, zero_point, **keywords)
    carried = oracle.quantize(x, scale, zero_point, dtype=carried_in, **keywords)
    fq = oracle.fake_quantize(x, scale, zero_point, **keywords)
    back = oracle.dequantize(codes, scale, zero_point, dtype=x.dtype, **where)
    return {
        "quantize": codes,
        "quantize_carried": carried,
        "fake_quantize": fq,
        "fake_quantize_integer_zero_point": fq,
        "dequantize": back,
        "dequantize_carried": back,
        "quantize_backward": oracle.quantize_backward(dy, x, scale, zero_point, **keywords),
        "fake_quantize_gradient": oracle.fake_quantize_gradient(dy, x, scale, zero_point, **keywords),
        "quantize_gradient": oracle.quantize_gradient(dy.astype(carried_in), x, scale, zero_point, **keywords),
        "dequantize_gradient": oracle.dequantize_gradient(dy, carried, scale, zero_point, **where),
    }


def compare(actual, wanted, operands, keywords, implementation):
    """Fails with every entry that differs, not only the first."""
    scale_dtype = np.asarray(operands.scale).dtype
    zero_dtype = np.promote_types(scale_dtype, np.float32)
    context = {"x": operands.x, "dy": operands.dy}
    if operands.x.size:
        a = oracle.steps(operands.x, operands.scale, operands.zero_point, **keywords)
        context |= {"scale": a.s, "zero point": a.z, "v": a.v}
    failures = []
    for name in actual:
        value = wanted[name]
        try:
            if isinstance(value, oracle.Gradient):
                dx, dscale, dzero_point = actual[name]
                oracle.assert_same_bits(dx, value.dx, **context)
                exact = implementation != "xla"
                oracle.assert_same_sum(dscale, value.dscale, scale_dtype, exact=exact)
                oracle.assert_same_sum(dzero_point, value.dzero_point, zero_dtype, exact=exact)
            else:
                oracle.assert_same_bits(actual[name], value, **context)
        except AssertionError as failure:
            failures.append(f"{name}: {failure}")
    assert not failures, "\n".join(failures)


def check(operands, keywords, implementation, *, compiled=True, names=None):
    """Runs everything (or ``names``) on NumPy operands and compares it with the oracle; returns the results."""
    dtype = operands.x.dtype
    with precision(dtype):
        call = results(keywords, dtype, implementation, names)
        actual = (jax.jit(call) if compiled else call)(
            *map(jnp.asarray, (operands.x, operands.scale, operands.zero_point, operands.dy))
        )
        actual = jax.device_get(actual)
    wanted = expected(operands.x, operands.scale, operands.zero_point, operands.dy, keywords)
    compare(actual, wanted, operands, keywords, implementation)
    return actual
