"""Adam whose moments take a byte each, as an optax transformation.

scale_by_adam8bit()  ->  adam8bit_p  ->  ffi/optim/{cpu.cc,cuda.cu}  ->  math.h

optax is imported where it is used: nothing else of jaxquant needs it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from jaxquant._core import ffi
from jaxquant._core.errors import refuse
from jaxquant._core.primitive import Axes, Operation, Result, bind, build
from jaxquant.affine.exact import seal

__all__ = ["Adam8bitState", "Moment", "adam8bit", "adamw8bit", "scale_by_adam8bit"]

FLOATS = ("float32", "float16", "bfloat16")
MOST_BLOCK = 2048


class Moment(NamedTuple):
    """A moment of one parameter in 8 bits.

    codes: uint8 of the parameter's shape. exponents: uint8, one for each block: the parameter's shape, but that the
    axis that blocks divide has one for each of them, and the axes after it, which blocks hold whole, are 1.
    """

    codes: jax.Array
    exponents: jax.Array


class Adam8bitState(NamedTuple):
    """count: int32, the steps so far. mu, nu: pytrees like the parameters, of `Moment` or, for small ones, arrays."""

    count: Any
    mu: Any
    nu: Any


def scale_by_adam8bit(
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    *,
    block_size: int = 256,
    min_size: int = 4096,
    implementation: str | None = None,
) -> Any:
    """`optax.scale_by_adam` with moments of 8 bits: 2 bytes of state a parameter instead of 8.

    Block-wise dynamic quantisation after Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2021), with a
    code in closed form. A block has an exponent of its own (a byte; 2.008 bytes a parameter in all with blocks of
    256). Relative to it the first moment has a sign, 15 binades and a linear part below, the second 31 binades and a
    linear part, both with steps of 1/8 to 1/16 of the value. Rounding is stochastic, so that an average that moves by
    0.1 % a step does move; its dither is a hash of moments, place and step, so that a run repeats bit for bit.
    The step itself is taken from the moments before they are rounded.

    No value is rounded to a second moment of zero, so no step divides by ``eps`` alone: nothing becomes NaN or huge
    that was not. Where a gradient is NaN or infinite the update is NaN, in that element only, and the moments take it
    for 0 (`optax.adam` would keep NaN in its state); a gradient beyond 2^60 counts as 2^60.

    Args:
      b1, b2, eps: as for `optax.scale_by_adam`.
      block_size: the most values that share an exponent, 1 to 2048. Blocks lie along the last axis, and over several
        where it is shorter; the largest divisor above a half of it is taken, so that blocks are whole where they can
        be. Parameters sharded in whole blocks (any axis before those that blocks hold whole) need no communication;
        where a shard would cut a block the gradient is gathered: choose a smaller block then.
      min_size: parameters of fewer elements keep float32 moments, as do those of types other than float32, float16 and
        bfloat16 (in their own type).
      implementation: as for `jaxquant.fake_quantize`.

    Returns:
      An `optax.GradientTransformation` with state `Adam8bitState`. Updates have the gradient's dtype. Under ``jit``
      with the state donated it is updated in place.

    Raises:
      ImportError: optax is not installed. ValueError, TypeError: what does not suit, when it is made or first used.

    Gradients: none; it cannot be differentiated through.

    >>> import optax
    >>> tx = optim.scale_by_adam8bit(min_size=0)
    >>> state = tx.init(jnp.ones(3))
    >>> tx.update(jnp.array([0.1, 0.0, -2.0]), state)[0].round(3)
    Array([ 1.,  0., -1.], dtype=float32)
    """
    name = "scale_by_adam8bit"
    optax = _optax(name)
    if not 1 <= block_size <= MOST_BLOCK:
        raise refuse(name, "block_size", f"1 to {MOST_BLOCK}", str(block_size), "256 suits most")
    for label, b in (("b1", b1), ("b2", b2)):
        if isinstance(b, (int, float)) and not 0 <= b < 1:
            raise refuse(name, label, "a number from 0 to below 1", str(b), "0.9 and 0.999 are usual")
    implementation = ffi.check_implementation(name, implementation)

    def init(params: Any) -> Adam8bitState:
        def zero(p: Any) -> Any:
            p = jnp.asarray(p)
            if not jnp.issubdtype(p.dtype, jnp.floating):
                remedy = "mask it with optax.masked"
                raise refuse(name, "params", "floating-point arrays", p.dtype.name, remedy, TypeError)
            if p.dtype.name not in FLOATS:
                return jnp.zeros_like(p)
            if p.size == 0 or p.size < min_size:
                return jnp.zeros_like(p, jnp.float32)
            return _zero_moment(p, block_size)

        return Adam8bitState(jnp.zeros((), jnp.int32), jax.tree.map(zero, params), jax.tree.map(zero, params))

    def update(updates: Any, state: Adam8bitState, params: Any = None) -> tuple[Any, Adam8bitState]:
        del params
        count = optax.safe_increment(state.count)
        seed = count.astype(jnp.uint32) * jnp.uint32(0x85EBCA6B)
        gradients, tree = jax.tree.flatten(updates)
        old = zip(gradients, tree.flatten_up_to(state.mu), tree.flatten_up_to(state.nu), strict=True)
        types = {jnp.dtype(jnp.float32), *(x.dtype for x in jax.tree.leaves(state.mu) if x.dtype != jnp.uint8)}
        factors = {dtype: _factors(b1, b2, eps, count, dtype) for dtype in types}
        new = [_step(jnp.asarray(g), m, v, factors, seed, block_size, implementation) for g, m, v in old]
        updates, mu, nu = (tree.unflatten([leaf[i] for leaf in new]) for i in range(3))
        return updates, Adam8bitState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def adam8bit(learning_rate: Any, b1: Any = 0.9, b2: Any = 0.999, eps: Any = 1e-8, **keywords: Any) -> Any:
    """`optax.adam` with moments of 8 bits.

    Args:
      learning_rate: a number or an optax schedule.
      b1, b2, eps, **keywords: as for `scale_by_adam8bit`.

    Returns:
      An `optax.GradientTransformation`.

    >>> import optax
    >>> params = {"w": jnp.ones((64, 64))}
    >>> tx = optim.adam8bit(1e-3)
    >>> state = tx.init(params)
    >>> updates, state = tx.update({"w": jnp.ones((64, 64))}, state, params)
    >>> optax.apply_updates(params, updates)["w"][0, :2]
    Array([0.999, 0.999], dtype=float32)
    """
    optax = _optax("adam8bit")
    return optax.chain(
        scale_by_adam8bit(b1, b2, eps, **keywords),
        optax.scale_by_learning_rate(learning_rate),
    )


def adamw8bit(
    learning_rate: Any,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 1e-4,
    mask: Any = None,
    **keywords: Any,
) -> Any:
    """`optax.adamw` with moments of 8 bits.

    Args:
      learning_rate, weight_decay, mask: as for `optax.adamw`.
      b1, b2, eps, **keywords: as for `scale_by_adam8bit`.

    Returns:
      An `optax.GradientTransformation`, whose ``update`` needs the parameters.

    >>> tx = optim.adamw8bit(1e-3, weight_decay=0.1)
    >>> state = tx.init(jnp.ones(2))
    >>> tx.update(jnp.zeros(2), state, jnp.ones(2))[0]
    Array([-0.0001, -0.0001], dtype=float32)
    """
    optax = _optax("adamw8bit")
    return optax.chain(
        scale_by_adam8bit(b1, b2, eps, **keywords),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def _optax(name: str) -> Any:
    try:
        import optax
    except ImportError:
        raise ImportError(f"{name}: optax is not installed; it is optional: pip install optax.") from None
    return optax


# -------------------------------------------------------------------------------------------------------------- blocks


def _blocks(shape: Sequence[int], block_size: int) -> tuple[int, int]:
    """(axis, length): a block holds `length` places along `axis` (negative) and the axes after it whole."""
    inner, axis = 1, len(shape) - 1
    while axis > 0 and inner * shape[axis] <= block_size:
        inner *= shape[axis]
        axis -= 1
    most = min(shape[axis], block_size // inner)
    whole = [n for n in range(most, most // 2, -1) if shape[axis] % n == 0]
    return axis - len(shape), whole[0] if whole else most


def _exponents_shape(shape: Sequence[int], axis: int, length: int) -> tuple[int, ...]:
    at = len(shape) + axis
    return (*shape[:at], -(-shape[at] // length), *(1 for _ in shape[at + 1 :]))


def _zero_moment(p: Any, block_size: int) -> Moment:
    """A moment of zeros, sharded as the parameter is."""
    shape = p.shape or (1,)
    exponents = _exponents_shape(shape, *_blocks(shape, block_size))
    exponents = exponents if p.shape else ()
    sharding = jax.typeof(p).sharding if isinstance(p, Tracer) else p.sharding
    if isinstance(sharding, NamedSharding) and any(sharding.spec):
        # Where the exponents of an axis do not divide as its elements do, all devices have all.
        spec = [*sharding.spec, *[None] * (len(exponents) - len(sharding.spec))]
        spec = [
            axes if axes is not None and n % math.prod(sharding.mesh.shape[a] for a in _names(axes)) == 0 else None
            for n, axes in zip(exponents, spec, strict=True)
        ]
        placed = NamedSharding(sharding.mesh, PartitionSpec(*spec))
        return Moment(jnp.zeros_like(p, jnp.uint8), jax.lax.full(exponents, 0, jnp.uint8, sharding=placed))
    return Moment(jnp.zeros_like(p, jnp.uint8), jnp.zeros(exponents, jnp.uint8))


def _names(axes: Any) -> tuple[Any, ...]:
    return axes if isinstance(axes, tuple) else (axes,)


# ---------------------------------------------------------------------------------------------------------------- step


def _factors(b1: Any, b2: Any, eps: Any, count: Any, dtype: Any) -> list[Any]:
    """As Factors of ffi/optim/math.h: decays, and the bias corrections folded into root and floor."""
    decays = (jnp.asarray(f, dtype) for f in (b1, 1 - b1, b2, 1 - b2, eps))
    return list(_corrected(*decays, count))


@jax.jit
def _corrected(b1: Any, rest1: Any, b2: Any, rest2: Any, eps: Any, count: Any) -> tuple[Any, ...]:
    correction1, correction2 = 1 - _power(b1, count), 1 - _power(b2, count)
    return b1, rest1, b2, rest2, correction1 / seal(jnp.sqrt(correction2)), correction1 * eps


def _power(base: Any, count: Any) -> Any:
    """base ** count by products alone: the bits of `**` depend on what XLA fuses it with."""
    power = jnp.ones((), base.dtype)
    for bit in range(31):
        power = jnp.where((count & (1 << bit)) != 0, power * base, power)
        base = base * base
    return seal(power)


def _step(
    g: Any, m: Any, v: Any, factors: dict[Any, list[Any]], seed: Any, block_size: int, implementation: str | None
) -> Any:
    if not isinstance(m, Moment):
        update, m, v = _advance(g.astype(m.dtype), m, v, *factors[m.dtype])
        return update.astype(g.dtype), m, v
    shape = g.shape or (1,)
    axis, length = _blocks(shape, block_size)
    expected = _exponents_shape(shape, axis, length) if g.shape else ()
    if (m.codes.shape, m.exponents.shape) != (g.shape, expected):
        got = f"{m.codes.shape} and {m.exponents.shape}"
        remedy = "the state was made for other parameters or another block_size"
        raise refuse("adam8bit", "state", f"codes {g.shape} and exponents {expected}", got, remedy)
    dtype = g.dtype
    g = g if dtype.name in FLOATS else g.astype(jnp.float32)
    few = expected or (1,)
    update, *new = bind(
        adam8bit_p,
        *(x.reshape(s) for x, s in zip((g, *m, *v), (shape, shape, few, shape, few), strict=True)),
        jnp.stack(factors[jnp.dtype(jnp.float32)])[None],
        seed[None],
        axis=axis,
        length=length,
        implementation=implementation,
    )
    codes_m, exponents_m, codes_v, exponents_v = (
        x.reshape(s) for x, s in zip(new, (g.shape, expected) * 2, strict=True)
    )
    return update.reshape(g.shape).astype(dtype), Moment(codes_m, exponents_m), Moment(codes_v, exponents_v)


def _advance(g: Any, m: Any, v: Any, b1: Any, rest1: Any, b2: Any, rest2: Any, root: Any, floor: Any) -> Any:
    """(update, m, v) of plain moments, as Advance and Update of ffi/optim/math.h. Products are sealed: XLA would
    contract them into the additions."""
    finite = jnp.isfinite(g)
    most = jnp.asarray(2.0**60 if jnp.finfo(g.dtype).max > 2.0**60 else jnp.finfo(g.dtype).max, g.dtype)
    bounded = jnp.clip(jnp.where(finite, g, 0), -most, most)
    m = seal(rest1 * bounded) + seal(b1 * m)
    v = seal(rest2 * seal(bounded * bounded)) + seal(b2 * v)
    denominator = seal(root * jnp.sqrt(v)) + floor
    update = jnp.where(denominator != 0, m / denominator, 0)
    return jnp.where(finite, update, jnp.nan), m, v


# ----------------------------------------------------------------------------------------------------------- primitive
# g; codes and exponents of m and v; factors [f, 6] and seed [f], each for an equal part of the leading axes

_DROPPED = 20


def _bits(x: Any) -> Any:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _float(x: Any) -> Any:
    return jax.lax.bitcast_convert_type(x, jnp.float32)


def _offset(exponents: Any, binades: int) -> Any:
    return (jnp.clip(exponents.astype(jnp.int32), 40, 250) - binades).astype(jnp.uint32) << 23


def _exponent(bits: Any) -> Any:
    most = bits.max(axis=-1, keepdims=True)
    return jnp.clip(((most + jnp.uint32(0x1FFFFF)) >> 23).astype(jnp.int32), 40, 250).astype(jnp.uint8)


def _encode(magnitude: Any, offset: Any, dither: Any) -> Any:
    return (_bits(magnitude + _float(offset)) - offset + dither) >> _DROPPED


def _reference(
    g: Any, m: Any, m_exponent: Any, v: Any, v_exponent: Any, factors: Any, seed: Any, *, axis: int, length: int
) -> Any:
    at = g.ndim + axis
    lead, row, inner = g.shape[:at], math.prod(g.shape[at:]), math.prod(g.shape[at + 1 :])
    blocks, block = m_exponent.shape[at], length * inner

    def to_blocks(x: Any) -> Any:
        x = jnp.pad(x.reshape(*lead, row), [(0, 0)] * at + [(0, blocks * block - row)])
        return x.reshape(*lead, blocks, block)

    def from_blocks(x: Any) -> Any:
        return x.reshape(*lead, blocks * block)[..., :row].reshape(g.shape)

    def per_row(x: Any) -> Any:
        return jnp.repeat(x, math.prod(lead) // x.shape[0]).reshape(*lead, 1, 1)

    few = (*lead, blocks, 1)
    real, codes_m, codes_v = (to_blocks(x) for x in (g.astype(jnp.float32), m, v))
    old_m, old_v = _offset(m_exponent.reshape(few), 15), _offset(v_exponent.reshape(few), 31)
    words_m, words_v = codes_m.astype(jnp.uint32), codes_v.astype(jnp.uint32)
    sign = (words_m & 0x80) << 24
    decoded_m = _float((((words_m & 0x7F) << _DROPPED) + old_m) | sign) - _float(old_m | sign)
    decoded_v = _float((words_v << _DROPPED) + old_v) - seal(_float(old_v) * (1 - 2.0**-5))

    update, new_m, new_v = _advance(real, decoded_m, decoded_v, *(per_row(factors[:, k]) for k in range(6)))
    # What pads a row is no gradient.
    inside = to_blocks(jnp.ones(g.shape, bool))
    bits_m, bits_v = _bits(new_m), _bits(new_v)
    magnitude = bits_m & 0x7FFFFFFF
    m_exponent_new = _exponent(jnp.where(inside, magnitude, 0))
    v_exponent_new = _exponent(jnp.where(inside, bits_v, 0))

    salt = jnp.arange(block, dtype=jnp.uint32) * jnp.uint32(0x9E3779B1) + per_row(seed)
    h = ((bits_m + bits_v) ^ salt) * jnp.uint32(0x7FEB352D)
    h = (h ^ h >> 15) * jnp.uint32(0x846CA68B)
    dither = h >> 6 & jnp.uint32((1 << _DROPPED) - 1)
    code_m = _encode(_float(magnitude), _offset(m_exponent_new, 15), dither) | (bits_m >> 24 & 0x80)
    code_v = _encode(new_v, _offset(v_exponent_new, 31), h >> 12)
    return [
        seal(from_blocks(update).astype(g.dtype)),
        from_blocks(code_m.astype(jnp.uint8)),
        m_exponent_new.reshape(m_exponent.shape),
        from_blocks(code_v.astype(jnp.uint8)),
        v_exponent_new.reshape(v_exponent.shape),
    ]


def _results(g: Any, m: Any, m_exponent: Any, v: Any, v_exponent: Any, *_: Any, **__: Any) -> list[Result]:
    state = [Result("packed", x.shape, jnp.uint8) for x in (m, m_exponent, v, v_exponent)]
    return [Result("full", g.shape, g.dtype), *state]


def _axes(
    g: Any, m: Any, m_exponent: Any, v: Any, v_exponent: Any, factors: Any, seed: Any, *, axis: int, length: int
) -> Axes:
    del m, v, v_exponent, seed
    at, parts = g.ndim + axis, factors.shape[0]
    names: list[str | None] = [*(f"a{d}" for d in range(at)), "k", *[None] * (g.ndim - at - 1)]
    units = {f"a{d}": g.shape[d] for d in range(at)}
    units["k"] = m_exponent.shape[at] if g.shape[at] % length == 0 else 1
    shared = None
    if parts != 1 and parts == g.shape[0]:
        shared = "a0"
    elif parts != 1:  # of several batches: none of these axes may be cut
        d = 0
        while parts > 1:
            parts //= g.shape[d]
            names[d] = None
            d += 1
    return Axes([tuple(names)] * 5 + [(shared, None), (shared,)], [tuple(names)] * 5, units)


def _batch(operands: Any, dims: Any, **params: Any) -> Any:
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    arrays = [_front(x, d, size) for x, d in zip(operands[:5], dims[:5], strict=True)]
    rest = list(operands[5:])
    if any(d is not None for d in dims[5:]) or rest[0].shape[0] != 1:
        rest = [_front(x, d, size) for x, d in zip(rest, dims[5:], strict=True)]
        rest = [x.reshape(-1, *x.shape[2:]) for x in rest]
    return bind(adam8bit_p, *arrays, *rest, **params)


def _front(x: Any, dim: int | None, size: int) -> Any:
    return jnp.broadcast_to(x[None], (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)


adam8bit_p = build(
    Operation(
        name="adam8bit",
        operands=("full", "packed", "packed", "packed", "packed", "scale", "scale"),
        results=_results,
        reference=_reference,
        attributes=lambda *, axis, length: {"axis": axis, "length": length},
        aliases={i: i for i in range(5)},
        dtypes=FLOATS,
        axes=_axes,
        batch=_batch,
    ),
    multiple_results=True,
)
