"""Every operation under every transformation: the battery of transforms.py, and pairs of transforms elsewhere."""

import granularities
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transforms
from operations import NAMED, OPERATIONS
from oracle import assert_same_bits
from transforms import BLOCKS, CHANNELS, Case

import jaxquant

CASES = [
    Case(o, g, i)
    for o in OPERATIONS
    for g in (CHANNELS, BLOCKS)
    for i in ("ffi", "xla")
    if not (o.name.startswith("stochastic") and i == "xla")  # which compiles for long: test_stochastic.py has its part
]
SMOKE = {"fake_quantize": {*transforms.EVERY, *transforms.DERIVATIVES, *transforms.MODELLED}}


def _smoke(case, check):
    if case.implementation == "xla" or case.granularity is BLOCKS:
        return False
    return check in SMOKE.get(case.operation.name, (transforms.vmap, transforms.vmap_grad))


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize(
    ("case", "check"),
    [
        pytest.param(case, check, id=f"{case}-{check.__name__}", marks=[pytest.mark.smoke] * _smoke(case, check))
        for case in CASES
        for check in transforms.checks(case)
    ],
)
def test_battery(case, check):
    check(case)


ELSEWHERE = (
    *granularities.FEW,
    granularities.PER_CHANNEL_MIDDLE,
    granularities.BLOCKS,
    granularities.ZERO_D,
    granularities.Granularity("long_sums", (3, 700), (3,), axis=0),
)


def check_pairs(case):
    """jit of vmap, vmap of grad, grad of jit, grad of vmap, scan of grad: against a loop, in one compilation."""
    gradient = jax.grad(case.loss, case.operation.differentiable)
    arguments = case.operation.differentiable
    examples = case.examples(3, 0)
    batch, rest = jnp.stack(examples), case.operands[1:]
    rest_axes = (None,) * len(rest)

    @jax.jit
    def every(batch, *rest):
        def summed(x, *r):
            return jax.vmap(lambda x: case.loss(x, *r))(x).sum()

        return (
            jax.vmap(case.call, (0, *rest_axes))(batch, *rest),
            jax.vmap(gradient, (0, *rest_axes))(batch, *rest),
            jax.grad(jax.jit(case.loss), arguments)(batch[0], *rest),
            jax.grad(summed)(batch, *rest),
            jax.lax.scan(lambda c, x: (c, gradient(x, *rest)), 0, batch)[1],
        )

    values, mapped, single, of_vmap, scanned = every(batch, *rest)
    case.same(values, transforms.looped(case, case.compiled, (0,), 3))
    expected = transforms.looped(case, case.gradient, (0,), 3)
    case.same_gradient(mapped, expected, arguments)
    case.same_gradient(scanned, expected, arguments)
    case.same_gradient(single, [g[0] for g in expected], arguments)
    assert_same_bits(of_vmap, expected[0])


@pytest.mark.parametrize("granularity", ELSEWHERE, ids=repr)
@pytest.mark.parametrize("name", ["fake_quantize", "quantize", "dequantize"])
def test_pairs_at_other_granularities(name, granularity):
    check_pairs(Case(NAMED[name], granularity))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("name", ["fake_quantize", "quantize", "dequantize"])
def test_pairs_in_other_dtypes(name, dtype, x64):
    for granularity in (granularities.PER_CHANNEL_MIDDLE, granularities.PER_GROUP):
        check_pairs(Case(NAMED[name], granularity, "ffi", dtype))


# -------------------------------------------------------------------------------------------------------------- details


@pytest.mark.smoke
def test_forward_mode_of_the_wrapped_function_is_refused():
    """JAX's own rule for a custom_vjp; the un-wrapped spelling is for that."""
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: jaxquant.fake_quantize(x, 0.5), (jnp.ones(3),), (jnp.ones(3),))


def count(jaxpr, name):
    """How many equations of a primitive there are, inner jaxprs included."""
    total = 0
    for equation in jaxpr.eqns:
        total += equation.primitive.name.removeprefix("jaxquant_") == name
        for value in jax.tree.leaves(equation.params, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            total += count(inner, name) if hasattr(inner, "eqns") else 0
    return total


def test_an_unmapped_scale_is_not_copied():
    """vmap over x alone is one call in which the scale keeps its size."""
    case = Case(NAMED["fake_quantize"], CHANNELS)
    x, scale, zero_point = case.operands
    jaxpr = jax.make_jaxpr(jax.vmap(jaxquant.forward_mode.fake_quantize, (0, None)))(
        jnp.stack([x] * 7), jnp.ones((1, 3, 1))
    )
    (equation,) = (e for e in jaxpr.eqns if "fake_quantize" in e.primitive.name)
    assert [v.aval.shape for v in equation.invars] == [(7, *x.shape), (1, 1, 3, 1), (1, 1, 1, 1)]
    del scale, zero_point


def test_residuals_are_the_operands():
    """Nothing of x's size is stored for the backward pass but x."""
    case = Case(NAMED["fake_quantize"], CHANNELS)
    _, backward = jax.vjp(case.call, *case.operands)
    saved = [leaf for leaf in jax.tree.leaves(backward) if np.size(leaf) >= case.operands[0].size]
    assert len(saved) <= 1, saved


def test_a_mapped_axis_of_no_size_is_jaxs_own_error_or_empty():
    out = jax.vmap(lambda x: jaxquant.fake_quantize(x, 0.5))(jnp.zeros((0, 3)))
    assert out.shape == (0, 3)


def test_tracers_do_not_leak():
    case = Case(NAMED["fake_quantize"], CHANNELS)
    with jax.checking_leaks():
        jax.jit(jax.grad(case.loss, (0, 1, 2)))(*case.operands)


def test_operands_of_one_call_may_be_constants_inside_jit():
    """A closed-over scale folds into the program without changing a bit."""
    case = Case(NAMED["fake_quantize"], CHANNELS)
    x, scale, zero_point = case.operands
    folded = jax.jit(lambda x: case.call(x, np.asarray(scale), np.asarray(zero_point)))(x)
    assert_same_bits(folded, case.compiled(x, scale, zero_point))


def test_qparams_through_transforms():
    """A QParams is a pytree: vmapped, differentiated and scanned like any other."""
    x = jnp.linspace(-3, 3, 12).reshape(4, 3)
    params = jaxquant.QParams(jnp.full((3,), 0.25), jnp.zeros((3,)), qtype=jnp.int4)

    def loss(p, x):
        return (jaxquant.fake_quantize(x, p, axis=-1) ** 2).sum()

    gradient = jax.jit(jax.grad(loss))(params, x)
    assert isinstance(gradient, jaxquant.QParams) and gradient.qtype == jnp.int4
    direct = jax.grad(lambda s: (jaxquant.fake_quantize(x, s, jnp.zeros(3), axis=-1, qtype=jnp.int4) ** 2).sum())(
        params.scale
    )
    assert_same_bits(gradient.scale, direct)
    mapped = jax.vmap(jax.grad(loss), (None, 0))(params, jnp.stack([x, 2 * x]))
    assert_same_bits(mapped.scale[0], gradient.scale)
