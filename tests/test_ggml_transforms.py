"""The block formats under JAX's transformations: the bits of a Python loop over the plain operation."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from ggml_cases import (
    EXPERTS,
    LINEAR,
    MAPPED,
    NAMED,
    OUTER,
    ROWS,
    TOKENS,
    K,
    assert_same_bits,
    decoded,
    every_case,
    every_product,
    examples,
    looped,
    normal,
    q8_0,
    rank,
    same,
    stack,
    subsets,
)

from jaxquant import ggml


@every_case
def test_evaluation(case):
    """jit, disable_jit, abstract evaluation and the jaxpr; donated operands."""
    expected = case.compiled(*case.operands)
    same(case.call(*case.operands), expected)
    with jax.disable_jit():
        same(case.call(*case.operands), expected)
    abstract = jax.eval_shape(case.call, *case.operands)
    jax.tree.map(lambda a, r: (a.shape, a.dtype) == (r.shape, r.dtype) or pytest.fail(f"{a} {r}"), abstract, expected)
    flat, tree = jax.tree.flatten(case.operands)
    jaxpr = jax.make_jaxpr(lambda *leaves: case.call(*jax.tree.unflatten(tree, leaves)))(*flat)
    same(jax.extend.core.jaxpr_as_fun(jaxpr)(*flat), jax.tree.leaves(expected))


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@every_case
def test_donation(case):
    """A donated operand may be overwritten; one that lives on may not."""
    expected = case.compiled(*case.operands)
    kept = jax.device_get(case.operands)
    for i in range(len(case.operands)):
        copies = jax.tree.map(lambda a: jnp.array(a, copy=True), case.operands)
        same(jax.jit(lambda *a: case.call(*a), donate_argnums=i)(*copies), expected)
    first = jax.tree.map(lambda a: jnp.array(a, copy=True), case.operands[0])
    out, alive = jax.jit(lambda a, *rest: (case.call(a, *rest), a))(first, *case.operands[1:])
    same(out, expected)
    same(jax.device_get(alive), kept[0])
    same(jax.device_get(case.operands), kept)


# ------------------------------------------------------------------------------------------------------------- batching


def batches(case, axes_offset):
    """For each non-empty subset of operands: axes in and out, the stacked operands, and the examples one by one."""
    for subset in subsets(case):
        axes = [
            (i + len(subset) + axes_offset) % (rank(a) + 1) if i in subset else None
            for i, a in enumerate(case.operands)
        ]
        each = [examples(MAPPED, a) if i in subset else [a] * MAPPED for i, a in enumerate(case.operands)]
        stacked = [stack(e, d) if d is not None else a for e, d, a in zip(each, axes, case.operands, strict=True)]
        yield axes, stacked, list(zip(*each, strict=True))


@pytest.mark.parametrize("offset", [0, 1])
@every_case
def test_vmap(case, offset):
    """Every non-empty subset of operands, along different axes of each."""
    problems = list(batches(case, offset))
    out = [(len(p[2]) + i + offset) % 2 for i, p in enumerate(problems)]
    every = jax.jit(lambda bs: [jax.vmap(case.call, p[0], o)(*b) for p, o, b in zip(problems, out, bs, strict=True)])
    results = every([p[1] for p in problems])
    for actual, (_, _, each), o in zip(results, problems, out, strict=True):
        moved = jax.tree.map(lambda r, o=o: np.moveaxis(r, o, 0), actual)
        same(moved, looped(case.compiled, each))
    axes, stacked, each = problems[offset] if len(problems) > 1 else problems[0]
    same(jax.vmap(case.call, axes)(*stacked), looped(case.compiled, each))


@every_case
def test_nested_vmap(case):
    """The outer map takes the last operand, the inner one the first; then both take all."""
    last = len(case.operands) - 1
    if last:
        outer, inner = [None] * last + [0], [1] + [None] * last
        firsts, lasts = examples(MAPPED, case.operands[0]), examples(OUTER, case.operands[-1])
        batch = [stack(firsts, 1), *case.operands[1:-1], stack(lasts, 0)]
        actual = jax.jit(jax.vmap(jax.vmap(case.call, inner), outer))(*batch)
        rows = [looped(case.compiled, [(f, *case.operands[1:-1], value) for f in firsts]) for value in lasts]
        same(actual, stack(rows, 0))
    each = list(zip(*[examples(MAPPED, a) for a in case.operands], strict=True))
    batch = [stack([stack(examples(MAPPED, a), 0)] * OUTER, 1) for a in case.operands]
    actual = jax.jit(jax.vmap(jax.vmap(case.call), 1))(*batch)
    same(actual, stack([looped(case.compiled, each)] * OUTER, 0))


@every_product
def test_vmap_of_gradients(case):
    """Each example's gradient has the bits it has alone, whatever is mapped; the cotangent may not be."""
    gradient = jax.grad(case.loss)
    problems = list(batches(case, 0))
    every = jax.jit(lambda bs: [jax.vmap(gradient, p[0])(*b) for p, b in zip(problems, bs, strict=True)])
    for actual, (_, _, each) in zip(every([p[1] for p in problems]), problems, strict=True):
        same(np.asarray(actual), looped(case.gradient, each))
    axes, stacked, each = problems[-1]
    total = jax.jit(jax.grad(lambda *a: jax.vmap(case.loss, axes)(*a).sum()))(*stacked)
    assert_same_bits(np.moveaxis(total, axes[0], 0), looped(case.gradient, each))


# --------------------------------------------------------------------------------------------------------- control flow


@every_case
def test_control_flow(case):
    """scan, map, fori_loop, while_loop and cond, over the first operand and over all of them."""
    each = list(zip(*[examples(3, a) for a in case.operands], strict=True))
    expected = looped(case.compiled, each)
    stacked = [stack(examples(3, a), 0) for a in case.operands]

    def every(stacked):
        def at(i):
            return case.call(*jax.tree.map(lambda a: a[i], stacked))

        scanned = jax.lax.scan(lambda c, operands: (c, case.call(*operands)), 0, tuple(stacked))[1]
        mapped = jax.lax.map(lambda operands: case.call(*operands), tuple(stacked))
        last = jax.lax.fori_loop(0, 3, lambda i, _: at(i), at(0))
        counted = jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, at(c[0])), (0, last))[1]
        branch = jax.lax.cond(jax.tree.leaves(stacked)[0].sum() == 0, lambda: last, lambda: at(1))
        return scanned, mapped, last, counted, branch

    scanned, mapped, last, counted, branch = jax.device_get(jax.jit(every)(stacked))
    same(scanned, expected)
    same(mapped, expected)
    for actual, index in ((last, 2), (counted, 1), (branch, 1)):
        same(actual, jax.tree.map(lambda r, index=index: r[index], expected))


@pytest.mark.smoke
@pytest.mark.parametrize("layout", ["plain", "prepared"])
def test_scan_over_stacked_layers(layout):
    """One scan over the weights of all layers, forward and backward, is the loop over layers."""
    w = q8_0(4, K, K)
    layers = w.prepare() if layout == "prepared" else w
    x = normal(TOKENS, K)

    def step(x, layer):
        return x + jnp.tanh(ggml.linear(x, layer, lhs_qtype=None)), None

    def scanned(x):
        return (jax.lax.scan(step, x, layers)[0] ** 2).sum()

    def rematerialised(x):
        return (jax.lax.scan(jax.checkpoint(step), x, layers)[0] ** 2).sum()

    def unrolled(x):
        for layer in layers:
            x = step(x, layer)[0]
        return (x**2).sum()

    values = decoded(w)
    y = np.asarray(x, np.float64)
    for matrix in values:
        y = y + np.tanh(y @ matrix.T)
    results = jax.jit(lambda x: [jax.value_and_grad(f)(x) for f in (scanned, rematerialised, unrolled)])(x)
    for value, gradient in results:
        np.testing.assert_allclose(value, (y**2).sum(), rtol=1e-5)
        np.testing.assert_allclose(gradient, results[2][1], rtol=1e-4, atol=1e-4 * float(abs(results[2][1]).max()))


# ------------------------------------------------------------------------------------------------------- nothing at all


NOTHING = {
    "quantize": [((0, K),), ((ROWS, 0),), ((2, 0, K),)],
    "dequantize": [((0, K),), ((ROWS, 0),), ((2, 0, K),)],
    "prepare": [((0, K),), ((ROWS, 0),), ((2, 0, K),), ((0, ROWS, K),)],
    "linear": [((0, K), (ROWS, K)), ((TOKENS, K), (0, K)), ((TOKENS, 0), (ROWS, 0)), ((2, 0, K), (ROWS, K))],
    "moe_linear": [
        ((0, 1, K), (EXPERTS, ROWS, K), (0, 2)),
        ((TOKENS, 1, K), (EXPERTS, 0, K), (TOKENS, 2)),
        ((TOKENS, 1, K), (EXPERTS, ROWS, K), (TOKENS, 0)),
        ((TOKENS, 1, K), (0, ROWS, K), (TOKENS, 2)),
        ((TOKENS, 2, 0), (EXPERTS, ROWS, 0), (TOKENS, 2)),
    ],
    "take": [((0, K), (3,)), ((ROWS, K), (0,)), ((ROWS, 0), (3,))],
    "ragged_linear": [((0, K), (EXPERTS, ROWS, K), (EXPERTS,)), ((TOKENS, K), (0, ROWS, K), (0,))],
}


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
@pytest.mark.parametrize(
    ("name", "shapes"), [(name, shapes) for name, every in NOTHING.items() for shapes in every], ids=str
)
def test_nothing(name, shapes, implementation):
    """Arrays without elements: results of the right shape that are empty or zero, mapped and differentiated too."""
    if implementation == "xla" and name == "quantize":
        pytest.skip("the host does the work")
    case = NAMED[name]
    operands = []
    for like, shape in zip(case.operands, shapes, strict=True):
        if isinstance(like, ggml.QTensor):
            operands.append(ggml.QTensor.zeros(shape, "Q8_0"))
        elif jnp.issubdtype(like.dtype, jnp.integer):
            operands.append(jnp.full(shape, 0 if name == "ragged_linear" else -1, like.dtype))
        else:
            operands.append(jnp.ones(shape, like.dtype))
    keywords = case.keywords if name == "prepare" else {**case.keywords, "implementation": implementation}
    call = functools.partial(case.function, **keywords)
    (result,) = jax.tree.leaves(call(*operands))
    expected = jax.tree.leaves(jax.eval_shape(call, *operands))[0]
    assert result.shape == expected.shape and not np.asarray(result).any()
    batch = jax.tree.map(lambda a: jnp.stack([a, a]), operands)
    (mapped,) = jax.tree.leaves(jax.jit(jax.vmap(call))(*batch))
    assert mapped.shape == (2, *result.shape) and not np.asarray(mapped).any()
    if case.differentiable:
        gradient = jax.grad(lambda *a: call(*a).sum())(*operands)
        assert gradient.shape == operands[0].shape and not np.asarray(gradient).any()


# -------------------------------------------------------------------------------------------------------------- details


def equations(jaxpr, name):
    total = 0
    for equation in jaxpr.eqns:
        total += equation.primitive.name == f"jaxquant_{name}"
        for value in jax.tree.leaves(equation.params, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            total += equations(inner, name) if hasattr(inner, "eqns") else 0
    return total


def test_mapped_activations_are_one_call_with_more_tokens():
    x, w = LINEAR
    jaxpr = jax.make_jaxpr(jax.vmap(lambda x: ggml.linear(x, w)))(jnp.stack([x] * MAPPED))
    (equation,) = (e for e in jaxpr.eqns if e.primitive.name == "jaxquant_ggml_linear")
    assert [v.aval.shape for v in equation.invars] == [(1, MAPPED * TOKENS, K), (1, ROWS, 68)]
    jaxpr = jax.make_jaxpr(jax.vmap(lambda w: ggml.linear(x, w)))(stack([w] * MAPPED, 0))
    (equation,) = (e for e in jaxpr.eqns if e.primitive.name == "jaxquant_ggml_linear")
    assert [v.aval.shape for v in equation.invars] == [(1, TOKENS, K), (MAPPED, ROWS, 68)]


def test_the_gradient_needs_no_values_of_the_weights():
    x, w = LINEAR
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: (ggml.linear(x, w) ** 2).sum()))(x).jaxpr
    assert equations(jaxpr, "ggml_linear_gradient") == 1 and equations(jaxpr, "ggml_dequantize") == 0


@pytest.mark.filterwarnings("ignore")
def test_pmap():
    x, w = LINEAR
    mapped = jax.pmap(ggml.linear, in_axes=(0, None))(np.stack([x, 2 * x]), w)
    same(mapped, np.stack([ggml.linear(x, w), ggml.linear(2 * x, w)]))


def test_tracers_do_not_leak():
    case = NAMED["moe_linear"]
    with jax.checking_leaks():
        jax.jit(jax.grad(case.loss))(*case.operands)


def test_tree_maps():
    w = q8_0(EXPERTS, ROWS, K)
    doubled = jax.tree.map(lambda a: jnp.concatenate([a, a]), w)
    assert isinstance(doubled, ggml.QTensor) and doubled.shape == (2 * EXPERTS, ROWS, K)
    leaves, tree = jax.tree.flatten({"w": w, "p": w.prepare()})
    assert [leaf.dtype for leaf in leaves] == [jnp.uint8] * 2
    restored = jax.tree.unflatten(tree, leaves)
    assert restored["p"].layout == "prepared" and restored["w"].format is ggml.formats["Q8_0"]
    assert jax.tree.structure(w) != jax.tree.structure(w.prepare())
    assert jax.tree_util.keystr(jax.tree_util.tree_flatten_with_path({"w": w})[0][0][0]) == "['w'].data"
    assert jax.tree.map(lambda a: a.shape, w).data == (EXPERTS, ROWS, 68)  # leaves that are no arrays
