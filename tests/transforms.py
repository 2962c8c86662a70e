"""The battery: what every operation must do under JAX's transformations, written once.

A `Case` is an operation on a granularity through an implementation. Each check takes a case and fails
unless the transformed operation equals a Python loop over the plain one: in every bit where the contract promises bits,
which is everywhere but in sums made by XLA. Derivatives beyond those of the table are compared with `models.py`: smooth
functions of JAX alone that hold mask and rounding residual constant.
"""

import dataclasses
import functools
import itertools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import oracle
from granularities import Granularity
from models import model_of
from operations import Operation
from oracle import assert_same_bits

import jaxquant

# Small, so that full Hessians are cheap; all sizes distinct, so that a confusion of axes cannot hide.
CHANNELS = Granularity("channels", (4, 3, 5), (3,), axis=1)
BLOCKS = Granularity("blocks", (6, 10), (2, 5), block_shape=(3, 2))
MAPPED, OUTER = 7, 2


@dataclasses.dataclass(frozen=True)
class Case:
    operation: Operation
    granularity: Granularity
    implementation: str | None = "ffi"
    dtype: str = "float32"

    def __repr__(self):
        return "-".join((self.operation.name, self.granularity.name, str(self.implementation), self.dtype))

    @functools.cached_property
    def call(self):
        return functools.partial(self.operation.call, **self.granularity.keywords, implementation=self.implementation)

    @functools.cached_property
    def forward_mode(self):
        return functools.partial(self.call, functions=jaxquant.forward_mode)

    @functools.cached_property
    def compiled(self):
        return jax.jit(self.call)

    @functools.cached_property
    def named_operands(self):
        o = self.granularity.operands(self.dtype, "int4", zero_point_dtype=np.float32)
        keywords = {"qtype": "int4", **self.granularity.keywords}
        codes = oracle.quantize(o.x, o.scale, o.zero_point, **keywords)
        zero_point = o.zero_point.astype(o.scale.dtype)
        named = {"x": o.x, "scale": o.scale, "zero_point": zero_point, "dy": o.dy, "codes": codes}
        return named | {
            "carried": codes.astype(o.x.dtype),
            "packed": oracle.pack(codes, "int4") if codes.ndim else None,
        }

    @functools.cached_property
    def operands(self):
        return tuple(map(jnp.asarray, (self.named_operands[name] for name in self.operation.operands)))

    def examples(self, size, index):
        """``size`` different values of one operand."""
        a = self.operands[index]
        if not jnp.issubdtype(a.dtype, jnp.floating):
            return [jnp.roll(a, i) for i in range(size)]
        return [(a * (1 + i / 8)).astype(a.dtype) for i in range(size)]

    @functools.cached_property
    def weights(self):
        """A cotangent for each result."""
        rng = np.random.default_rng(1)
        results = jax.tree.leaves(jax.eval_shape(self.call, *self.operands))
        return [rng.normal(size=r.shape).astype(r.dtype) for r in results]

    def loss(self, *operands, call=None):
        """Its gradient's cotangents are exactly the weights."""
        results = jax.tree.leaves((call or self.call)(*operands))
        return sum((r * w).sum() for r, w in zip(results, self.weights, strict=True))

    @functools.cached_property
    def gradient(self):
        return jax.jit(jax.grad(self.loss, self.operation.differentiable))

    def is_sum(self, argument):
        return self.operation.operands[argument] in ("scale", "zero_point")

    def same(self, actual, expected):
        """Bits, sums of XLA's excepted."""
        for a, b, summed in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), self.operation.sums, strict=True):
            self.same_or_close(a, b, summed)

    def same_gradient(self, actual, expected, arguments):
        """Bits for first derivatives; derivatives of a gradient are made by jax.numpy, in XLA's order."""
        name = self.operation.name
        for a, b, argument in zip(actual, expected, arguments, strict=True):
            if not name.endswith("_gradient") and (name != "quantize_backward" or argument == 0):
                self.same_or_close(a, b, self.is_sum(argument))
            else:
                close(a, b)

    def same_or_close(self, actual, expected, summed):
        if summed and self.implementation == "xla":
            close(actual, expected)
        else:
            assert_same_bits(actual, expected)


def close(actual, expected, tolerance=2e-5):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    size = np.abs(expected).max(initial=0)
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * size)


def close_trees(actual, expected):
    jax.tree.map(close, actual, expected)


# -------------------------------------------------------------------------------------------------------------- battery


def jit(case):
    expected = case.compiled(*case.operands)
    case.same(case.call(*case.operands), expected)
    with jax.disable_jit():
        case.same(case.call(*case.operands), expected)


def shapes(case):
    results = jax.tree.leaves(case.compiled(*case.operands))
    for abstract, result in zip(jax.tree.leaves(jax.eval_shape(case.call, *case.operands)), results, strict=True):
        assert (abstract.shape, abstract.dtype, abstract.weak_type) == (result.shape, result.dtype, False)
    jaxpr = jax.make_jaxpr(case.call)(*case.operands)
    case.same(jax.extend.core.jaxpr_as_fun(jaxpr)(*case.operands), results)


def subsets(case):
    """All of them; through XLA, where each compiles for long, the single operands and all together."""
    indices = range(len(case.operands))
    sizes = (1, len(indices)) if case.implementation == "xla" else [size + 1 for size in indices]
    return [subset for size in dict.fromkeys(sizes) for subset in itertools.combinations(indices, size)]


def stacked(case, subset, size, axes):
    return [jnp.stack(case.examples(size, i), axes[i]) if i in subset else a for i, a in enumerate(case.operands)]


def looped(case, function, subset, size):
    each = [case.examples(size, i) if i in subset else [a] * size for i, a in enumerate(case.operands)]
    results = [function(*example) for example in zip(*each, strict=True)]
    return jax.tree.map(lambda *r: np.stack([np.asarray(a) for a in r]), *results)


def vmap(case):
    """Every non-empty subset of operands, mapped along different axes of each."""
    axes_of = {}
    for subset in subsets(case):
        axes = [(i + len(subset)) % (a.ndim + 1) if i in subset else None for i, a in enumerate(case.operands)]
        axes_of[subset] = axes, len(subset) % 2

    def every(batches):
        return [jax.vmap(case.call, a, out)(*b) for (a, out), b in zip(axes_of.values(), batches, strict=True)]

    batches = [stacked(case, subset, MAPPED, axes) for subset, (axes, _) in axes_of.items()]
    for actual, (subset, (_, out)) in zip(jax.jit(every)(batches), axes_of.items(), strict=True):
        expected = looped(case, case.compiled, subset, MAPPED)
        case.same(jax.tree.map(lambda r, out=out: np.moveaxis(r, out, 0), actual), expected)
    subset, (axes, out) = next(iter(axes_of.items()))
    eager = jax.vmap(case.call, axes, out)(*batches[0])
    case.same(jax.tree.map(lambda r: np.moveaxis(r, out, 0), eager), looped(case, case.compiled, subset, MAPPED))


def vmap_nested(case):
    """The outer map takes one operand, the inner one another, or the same."""
    first, last = 0, len(case.operands) - 1
    outer = [0 if i == last else None for i in range(last + 1)]
    inner = [(1 if i == first == last else 0) if i == first else None for i in range(last + 1)]
    if first == last:
        batch = [jnp.stack([jnp.stack(case.examples(MAPPED, 0), 1)] * OUTER)]
        expected = looped(case, case.compiled, (0,), MAPPED)
        expected = jax.tree.map(lambda r: np.stack([r] * OUTER), expected)
    else:
        batch = list(case.operands)
        batch[first] = jnp.stack(case.examples(MAPPED, first))
        batch[last] = jnp.stack(case.examples(OUTER, last))
        rows = []
        for value in case.examples(OUTER, last):

            def call(*a, value=value):
                return case.compiled(*a[:-1], value)

            rows.append(looped(case, call, (first,), MAPPED))
        expected = jax.tree.map(lambda *r: np.stack(r), *rows)
    case.same(jax.jit(jax.vmap(jax.vmap(case.call, inner), outer))(*batch), expected)


def control_flow(case):
    """scan, map, while_loop and cond, jitted together, against a loop."""
    results = looped(case, case.compiled, (0,), 3)

    def every(xs, *rest):
        def step(carry, x):
            return (carry, case.call(x, *rest))

        scanned = jax.lax.scan(step, 0, xs)[1]
        mapped = jax.lax.map(lambda x: case.call(x, *rest), xs)
        last = jax.lax.fori_loop(0, 3, lambda i, _: case.call(xs[i], *rest), case.call(xs[0], *rest))
        counted = jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, case.call(xs[c[0]], *rest)), (0, last))[1]
        branch = jax.lax.cond(xs.sum() == 0, lambda: last, lambda: case.call(xs[1], *rest))
        return scanned, mapped, last, counted, branch

    scanned, mapped, last, counted, branch = jax.jit(every)(jnp.stack(case.examples(3, 0)), *case.operands[1:])
    case.same(scanned, results)
    case.same(mapped, results)
    for actual, index in ((last, 2), (counted, 1), (branch, 1)):
        case.same(actual, jax.tree.map(lambda r, index=index: r[index], results))


def pmap(case):
    batch = stacked(case, (0,), 2, [0] * len(case.operands))
    mapped = jax.pmap(case.call, in_axes=(0, *[None] * (len(batch) - 1)))(*batch)
    case.same(mapped, looped(case, case.compiled, (0,), 2))


def donation(case):
    """A donated operand may be overwritten; one that lives on may not."""
    expected = jax.device_get(case.compiled(*case.operands))
    donated = jnp.array(case.operands[0], copy=True)
    kept = jax.device_get(case.operands)
    reuse = jax.jit(lambda *a: case.call(*a), donate_argnums=0)
    case.same(reuse(donated, *case.operands[1:]), expected)
    result = jax.tree.leaves(expected)[0]
    if (result.shape, result.dtype) == (donated.shape, donated.dtype):
        assert donated.is_deleted()
    alive = jnp.array(case.operands[0], copy=True)
    out, same = jax.jit(lambda a, *rest: (case.call(a, *rest), a))(alive, *case.operands[1:])
    case.same(out, expected)
    assert_same_bits(same, kept[0])
    jax.tree.map(assert_same_bits, jax.device_get(case.operands), kept)


def empty(case):
    """No elements: values, vmap and gradients exist; sums of nothing are +0."""
    index = next(i for i, name in enumerate(case.operation.operands) if name not in ("scale", "zero_point"))
    operands = list(case.operands)

    def zero_size(a):
        return a[:0]

    for i, name in enumerate(case.operation.operands):
        if name not in ("scale", "zero_point") or case.granularity.block_shape:
            operands[i] = zero_size(operands[i])
    for result, like in zip(
        jax.tree.leaves(case.call(*operands)), jax.tree.leaves(case.compiled(*case.operands)), strict=True
    ):
        assert result.dtype == like.dtype
        assert result.size == 0 or not np.asarray(result).any()
    batch = [jnp.stack([a] * 2) if i == index else a for i, a in enumerate(operands)]
    axes = [0 if i == index else None for i in range(len(operands))]
    for result in jax.tree.leaves(jax.jit(jax.vmap(case.call, axes))(*batch)):
        assert result.size == 0 or not np.asarray(result).any()
    if case.operation.differentiable:

        def loss(*a):
            return sum(r.sum() for r in jax.tree.leaves(case.call(*a)))

        gradients = jax.grad(loss, case.operation.differentiable)(*operands)
        for gradient, i in zip(gradients, case.operation.differentiable, strict=True):
            assert gradient.shape == operands[i].shape
            assert_same_bits(gradient, np.zeros_like(gradient))


# ---------------------------------------------------------------------------------------------------------- derivatives


def grad(case):
    """By each argument alone and by all together: the same bits, and those of the model up to rounding."""
    arguments = case.operation.differentiable
    together = case.gradient(*case.operands)
    alone = jax.jit(lambda *a: [jax.grad(case.loss, i)(*a) for i in arguments])(*case.operands)
    case.same_gradient(alone, together, arguments)
    case.same_gradient(jax.grad(case.loss, arguments)(*case.operands), together, arguments)
    if case.operation.model:
        close_trees(together, jax.grad(functools.partial(case.loss, call=model_of(case)), arguments)(*case.operands))


def vmap_grad(case):
    """Examples of every subset of operands: each has its own sums, in the same order as alone."""
    arguments = case.operation.differentiable
    chosen = [s for s in subsets(case) if len(s) in (1, len(case.operands))]
    gradient = jax.grad(case.loss, arguments)
    axes_of = {s: [(i + 1) % (a.ndim + 1) if i in s else None for i, a in enumerate(case.operands)] for s in chosen}
    batches = [stacked(case, s, MAPPED, axes) for s, axes in axes_of.items()]
    every = jax.jit(lambda bs: [jax.vmap(gradient, a)(*b) for a, b in zip(axes_of.values(), bs, strict=True)])
    for actual, subset in zip(every(batches), chosen, strict=True):
        case.same_gradient(actual, looped(case, case.gradient, subset, MAPPED), arguments)


def grad_of_transformed(case):
    """The gradient of a scan, a cond, a nested jit and a vmap of the operation is the gradient."""
    arguments, expected = case.operation.differentiable, case.gradient(*case.operands)

    def branch(*operands):
        return jax.lax.cond(operands[0].size > 0, lambda: case.loss(*operands), lambda: 0.0 * case.loss(*operands))

    def one_step(*operands):
        return jax.lax.scan(lambda c, _: (c + case.loss(*operands), None), jnp.zeros((), expected[0].dtype), None, 1)[0]

    def mapped(*operands):
        return jax.vmap(case.loss)(*(a[None] for a in operands)).sum()

    losses = [branch, one_step, mapped, jax.jit(case.loss)]
    results = jax.jit(lambda *a: [jax.grad(loss, arguments)(*a) for loss in losses])(*case.operands)
    for actual in results:
        case.same_gradient(actual, expected, arguments)


def remat(case):
    policies = jax.checkpoint_policies
    arguments = case.operation.differentiable
    every = [None, *(getattr(policies, name) for name in POLICIES)]

    def gradients(*a):
        return [jax.grad(jax.checkpoint(case.loss, policy=p), arguments)(*a) for p in every]

    for actual in jax.jit(gradients)(*case.operands):
        case.same_gradient(actual, case.gradient(*case.operands), arguments)


POLICIES = ("nothing_saveable", "everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable")


def higher_orders(case):
    """Hessians, products with them and third derivatives, of a loss whose second derivatives hold the first."""
    arguments = case.operation.differentiable

    def loss(call):
        return lambda *a: (call(*a) ** 3 * case.weights[0]).sum()

    def every(call, *operands):
        first = jax.grad(loss(call), arguments)
        primals = tuple(operands[i] for i in arguments)

        def at(*chosen):
            filled = list(operands)
            for i, a in zip(arguments, chosen, strict=True):
                filled[i] = a
            return first(*filled)

        directions = tuple(jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape) for a in primals)

        def along(*a):
            return sum((g * d).sum() for g, d in zip(at(*a), directions, strict=True))

        results = [jax.hessian(loss(call), arguments)(*operands), jax.jvp(at, primals, directions)[1]]
        if case.granularity is CHANNELS:
            results += [
                jax.jacrev(jax.jacrev(loss(call), arguments), arguments)(*operands),
                jax.grad(along, range(len(primals)))(*primals),
                jax.linearize(at, *primals)[1](*directions),
                jax.jvp(jax.grad(along), primals, directions)[1],
            ]
        return results

    actual = jax.jit(functools.partial(every, case.call))(*case.operands)
    close_trees(actual, jax.jit(functools.partial(every, model_of(case)))(*case.operands))


def jacobians(case):
    """Reverse and, through the un-wrapped spelling, forward."""
    arguments = case.operation.differentiable
    expected = jax.jit(jax.jacrev(model_of(case), arguments))(*case.operands)
    close_trees(jax.jit(jax.jacrev(case.call, arguments))(*case.operands), expected)
    if not case.operation.forward_mode:
        return
    tangents = tuple(jnp.sin(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape) for a in case.operands)

    def every(*operands):
        value, linear = jax.linearize(case.forward_mode, *operands)
        transposed = jax.linear_transpose(linear, *operands)(case.weights[0])
        reverse = jax.vjp(case.forward_mode, *operands)[1](case.weights[0])
        return (
            value, linear(*tangents), jax.jvp(case.forward_mode, operands, tangents)[1],
            jax.vmap(lambda t: jax.jvp(case.forward_mode, operands, (t, *tangents[1:]))[1])(tangents[0][None])[0],
            transposed, reverse, jax.jacfwd(case.forward_mode, arguments)(*operands),
        )  # fmt: skip

    value, *pushed, transposed, reverse, forward = jax.jit(every)(*case.operands)
    case.same(value, case.compiled(*case.operands))
    expected_push = jax.jvp(model_of(case), case.operands, tangents)[1]
    for actual in pushed:
        close(actual, expected_push)
    gradient = case.gradient(*case.operands)
    for actual in (transposed, reverse):
        assert_same_bits(actual[0], gradient[0])
        close_trees(actual, gradient)
    close_trees(forward, expected)


EVERY = (jit, shapes, vmap, vmap_nested, control_flow, pmap, donation, empty)
DERIVATIVES = (grad, vmap_grad, grad_of_transformed, remat)
MODELLED = (higher_orders, jacobians)
# Through XLA the rules are the same code; only what reaches the lowering differs.
THROUGH_XLA = (jit, vmap, grad, vmap_grad, remat)


def checks(case):
    """The part of the battery that applies to a case."""
    chosen = [*EVERY]
    if case.operation.differentiable:
        chosen += DERIVATIVES
        if case.operation.model:
            chosen += MODELLED
    return [check for check in chosen if case.implementation != "xla" or check in THROUGH_XLA]
