"""A conformance suite for kernels: every operation against NumPy, on the platform that JAX runs on.

    python -c "import jaxquant.testing; print(jaxquant.testing.conformance())"

Whoever adds a platform with `jaxquant.register_kernels` runs this there. It needs JAX and NumPy only. The NumPy below
spells the rule out once more, one IEEE operation at a time; it shares nothing with the kernels or the jax.numpy
references that it judges.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxquant
from jaxquant import optim
from jaxquant._core import ffi, primitive
from jaxquant.affine import histogram_conformance, matmul_conformance, weight_only_conformance
from jaxquant.ggml import conformance as ggml_conformance

__all__ = ["ConformanceError", "Report", "conformance", "emulation_available"]


class ConformanceError(AssertionError):
    """Results that the contract does not allow; the message lists them."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What `conformance` checked.

    platform: where it ran.
    cases: operation -> comparisons made, all of which held.
    kernels: the operations that ran a kernel; the others ran their jax.numpy reference.
    ordered_sums: whether the gradients of scales and zero points had the documented order of summation, to the bit. A
      kernel may sum in another order, within 2 eps log2(n) of the sum of the absolute terms.
    """

    platform: str
    cases: dict[str, int]
    kernels: tuple[str, ...]
    ordered_sums: bool

    def __str__(self) -> str:
        width = max(map(len, self.cases))
        lines = [f"jaxquant conformance on {self.platform}: passed"]
        for name, count in self.cases.items():
            how = "kernel" if name in self.kernels else "jax.numpy"
            lines.append(f"  {name:<{width}}  {count:3} cases  {how}")
        sums = "in the documented order" if self.ordered_sums else "in another order, within the bound"
        return "\n".join([*lines, f"  sums of scale and zero-point gradients: {sums}"])


def emulation_available() -> bool:
    """Whether the CUDA kernels compiled for the host are there (``implementation="cuda_emulation"``)."""
    return ffi.module("cuda_emulation") is not None


def conformance(implementation: str | None = None) -> Report:
    """Checks every operation on the default platform against NumPy.

    Values, codes and dx must agree in every bit (NaN with NaN); sums within the bound stated in `Report`. Among the
    cases are rounding ties, both ends of the range, infinities, NaN, sizes that are no multiple of a vector, every way
    to share scales, every float dtype (float64 where x64 is enabled), vmap and empty arrays; and every block format, by
    bits where the contract promises them and by normalised mean squared errors for products.

    Args:
      implementation: None, "ffi" or "xla", as for the operations. The "xla" reference is IEEE-exact on CPU only: on GPU
        and TPU, XLA's own division is not, and this raises.

    Returns:
      A `Report`; print it.

    Raises:
      ConformanceError: an AssertionError that lists what differs, with the operands at the first mismatch.
    """
    judge = _Judge(implementation)
    for case in _cases():
        judge.run(case)
    judge.packing()
    judge.dynamic()
    judge.empty()
    judge.optimiser()
    histogram_conformance.check(judge.bits, implementation)
    matmul_conformance.check(judge.bits, implementation)
    weight_only_conformance.check(judge.close, implementation)
    ggml_conformance.check(judge.bits, judge.close, implementation)
    if judge.failures:
        shown = "\n".join(f"  {failure}" for failure in judge.failures[:20])
        raise ConformanceError(f"conformance: {len(judge.failures)} comparisons failed on {judge.platform}:\n{shown}")
    platform = "cuda" if judge.platform == "gpu" else judge.platform
    kernels = tuple(
        name for name in primitive.OPERATIONS if implementation != "xla" and platform in ffi.platforms_with(name)
    )
    return Report(judge.platform, judge.cases, kernels, judge.ordered)


# ---------------------------------------------------------------------------------------------------------------- cases


@dataclasses.dataclass(frozen=True)
class _Case:
    name: str
    x: np.ndarray
    scale: np.ndarray  # of x's rank
    zero_point: np.ndarray
    dy: np.ndarray
    qtype: str
    qmin: int
    qmax: int
    block_shape: tuple[int, ...] | None

    @property
    def drawn(self) -> bool:
        """Whether stochastic rounding is checked too: where what it adds may go wrong, as XLA compiles it for long."""
        drawn = ("per tensor", "per channel, last", "blocks", "groups, float16, int8", "groups, bfloat16, uint4")
        return self.name.startswith(drawn) or self.x.dtype == np.float64


_LAYOUTS = {
    # x's shape, scale's shape, block_shape
    "per tensor": ((5, 77), (1, 1), None),
    "per channel, first axis": ((7, 45), (7, 1), None),
    "per channel, middle axis": ((4, 3, 35), (1, 3, 1), None),
    "per channel, last axis": ((67, 9), (1, 9), None),
    "per token": ((6, 5, 19), (6, 5, 1), None),
    "groups": ((6, 96), (6, 3), (1, 32)),
    "blocks": ((6, 35), (2, 5), (3, 7)),
    "per element": ((5, 13), (5, 13), None),
    "long sums": ((3, 1111), (3, 1), None),
}
_RANGES = {
    "int8": (-128, 127),
    "uint8": (0, 255),
    "int4": (-8, 7),
    "uint4": (0, 15),
    "int2": (-2, 1),
    "int16": (-32768, 32767),
}


def _cases() -> Iterator[_Case]:
    dtypes = ["float32", "float16", "bfloat16"] + ["float64"] * jax.config.jax_enable_x64
    for i, (name, (shape, scale_shape, block_shape)) in enumerate(_LAYOUTS.items()):
        yield _case(name, shape, scale_shape, block_shape, "float32", "int8", i)
    yield _ties()
    for i, dtype in enumerate(dtypes):
        for qtype in _RANGES if dtype == "float32" else ("int8", "uint4"):
            shape, scale_shape, block_shape = _LAYOUTS["groups"]
            yield _case("groups", shape, scale_shape, block_shape, dtype, qtype, 100 + i)


def _case(name: str, shape: Any, scale_shape: Any, block_shape: Any, dtype: str, qtype: str, seed: int) -> _Case:
    rng = np.random.default_rng(seed)
    real = _arithmetic(jnp.dtype(dtype))
    qmin, qmax = _RANGES[qtype]
    if seed % 2:
        qmin += 1
    # Scales of few bits make exact ties of x / scale possible in every dtype.
    scale = (rng.integers(3, 24, scale_shape) / 128).astype(real)
    zero_point = rng.integers(qmin, qmax, scale_shape, endpoint=True).astype(real)
    v = rng.uniform(qmin - 2, qmax + 2, shape) * rng.choice([1, 1.5], shape)
    v = np.where(rng.random(shape) < 0.3, np.floor(v) + 0.5, v)
    x = ((v - _spread(zero_point, shape)) * _spread(scale, shape)).astype(jnp.dtype(dtype))
    specials = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, jnp.finfo(dtype).max, jnp.finfo(dtype).min], x.dtype)
    x.flat[: len(specials)] = specials
    dy = rng.normal(size=shape).astype(x.dtype)
    # Selected away where x is out of range, not multiplied by zero.
    dy.flat[1] = np.nan
    return _Case(f"{name}, {dtype}, {qtype}", x, scale, zero_point, dy, qtype, qmin, qmax, block_shape)


def _ties() -> _Case:
    """Nothing but ties, over scales whose reciprocal rounds: x * (1 / scale) gets many of them wrong."""
    scale = np.arange(3, 50, 2, dtype=np.float32)[:, None]
    x = (np.arange(-40, 40, dtype=np.float32) + np.float32(0.5)) * scale
    zero_point = np.zeros_like(scale)
    return _Case("ties", x, scale, zero_point, np.ones_like(x), "int8", -128, 127, None)


def _arithmetic(dtype: Any) -> Any:
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def _spread(parameter: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    for d, (n, m) in enumerate(zip(shape, parameter.shape, strict=True)):
        parameter = np.repeat(parameter, n // m, axis=d)
    return parameter


# ------------------------------------------------------------------------------------------------------------ reference


@dataclasses.dataclass(frozen=True)
class _Sum:
    """Terms whose sum over the elements that share a scale is the gradient, and the scale's shape."""

    terms: np.ndarray
    shape: tuple[int, ...]

    def rows(self) -> np.ndarray:
        pairs = [(m, n // m) for n, m in zip(self.terms.shape, self.shape, strict=True)]
        rank = len(pairs)
        split = self.terms.reshape([size for pair in pairs for size in pair])
        order = [*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)]
        return split.transpose(order).reshape(math.prod(self.shape), -1)

    def ordered(self) -> np.ndarray:
        """32 lanes in chunks of 256 terms, a tree over the lanes, and again over the chunks."""
        rows = self.rows()
        while True:
            chunks = -(-rows.shape[1] // 256)
            padded = np.zeros((len(rows), chunks * 256), rows.dtype)
            padded[:, : rows.shape[1]] = rows
            lanes = np.zeros((len(rows), chunks, 32), rows.dtype)
            for step in range(8):
                lanes = lanes + padded.reshape(len(rows), chunks, 8, 32)[:, :, step]
            for d in (16, 8, 4, 2, 1):
                lanes = lanes[..., :d] + lanes[..., d : 2 * d]
            rows = lanes[..., 0]
            if chunks == 1:
                return rows.reshape(self.shape)

    def bound(self) -> np.ndarray:
        rows = np.abs(self.rows().astype(np.float64))
        n = max(rows.shape[1], 2)
        return (2 * np.finfo(self.terms.dtype).eps * math.log2(n) * rows.sum(1)).reshape(self.shape)


# The two words of the key of every stochastic rounding here.
_KEY = (0x243F6A88, 0x85A308D3)


@np.errstate(over="ignore")
def _drawn(shape: tuple[int, ...]) -> np.ndarray:
    """What stochastic rounding draws with _KEY: threefry2x32, 20 rounds, two elements a block."""
    index = np.arange(math.prod(shape), dtype=np.uint32).reshape(shape)
    schedule = tuple(map(np.uint32, (*_KEY, _KEY[0] ^ _KEY[1] ^ 0x1BD11BDA)))
    a, b = np.zeros_like(index) + schedule[0], (index >> np.uint32(1)) + schedule[1]
    for i in range(20):
        distance = (13, 15, 26, 6, 17, 29, 16, 24)[i % 8]
        a = a + b
        b = (b << np.uint32(distance) | b >> np.uint32(32 - distance)) ^ a
        if i % 4 == 3:
            turn = i // 4 + 1
            a, b = a + schedule[turn % 3], b + schedule[(turn + 1) % 3] + np.uint32(turn)
    return (np.where(index % 2 == 0, a, b) >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)


def _round_as_drawn(t: np.ndarray) -> np.ndarray:
    down = np.floor(t)
    return down + (_drawn(t.shape).astype(t.dtype) >= 1 - (t - down)).astype(t.dtype)


def _expected(case: _Case) -> dict[str, tuple[Any, ...]]:
    """Results by name: arrays, then sums."""
    nearest = _rounded(case, np.rint)
    if not case.drawn:
        return nearest
    drawn = {f"stochastic_{name}": value for name, value in _rounded(case, _round_as_drawn).items()}
    return nearest | {name: value for name, value in drawn.items() if "dequantize" not in name}


@np.errstate(all="ignore")
def _rounded(case: _Case, rounding: Callable[[np.ndarray], np.ndarray]) -> dict[str, tuple[Any, ...]]:
    x, dy, scale = case.x, case.dy, case.scale
    s, z = _spread(scale, x.shape), _spread(np.rint(case.zero_point) + scale.dtype.type(0), x.shape)
    real = s.dtype
    t = x.astype(real) / s
    rounded = rounding(t)
    v = rounded + z
    above, below = v > case.qmax, v < case.qmin
    inside = (v >= case.qmin) & (v <= case.qmax)
    clamped = np.where(above, real.type(case.qmax), np.where(below, real.type(case.qmin), v))
    codes = np.where(np.isnan(v), np.clip(z, case.qmin, case.qmax), clamped)
    carried = codes.astype(np.float32)
    g, zero = dy.astype(real), real.type(0)
    g32 = dy.astype(np.float32).astype(real)
    edge = np.where(above, real.type(case.qmax), real.type(case.qmin)) - z
    outside = above | below

    def sums(*terms):
        return tuple(_Sum(term, scale.shape) for term in terms)

    slope = g32 / s
    back = g * s
    return {
        "fake_quantize": (((clamped - z) * s).astype(x.dtype),),
        "quantize": (codes.astype(jnp.dtype(case.qtype.replace("int4", "int8").replace("int2", "int8"))), carried),
        "dequantize": (((codes - z) * s).astype(x.dtype),),
        "fake_quantize_gradient": (
            np.where(inside, g, zero).astype(x.dtype),
            *sums(
                np.where(inside, g * (rounded - t), np.where(outside, g * edge, zero)),
                np.where(outside, -s * g, zero),
            ),
        ),
        "quantize_gradient": (
            np.where(inside, slope, zero).astype(x.dtype),
            *sums(np.where(inside, -slope * t, zero), np.where(inside, g32, zero)),
        ),
        "dequantize_gradient": (back.astype(np.float32), *sums(g * (codes - z), -back)),
    }


def _actual(case: _Case, implementation: str | None) -> Callable[..., dict[str, Any]]:
    grid = {"qtype": case.qtype, "qmin": case.qmin, "qmax": case.qmax}
    common = {"block_shape": case.block_shape, "implementation": implementation}

    def rounded(x: Any, scale: Any, zero_point: Any, dy: Any, prefix: str, rounding: dict[str, Any]) -> dict[str, Any]:
        def fake(*a):
            return jaxquant.fake_quantize(*a, **grid, **rounding, **common)

        def carried(*a):
            return jaxquant.quantize(*a, dtype=jnp.float32, **grid, **rounding, **common)

        y, fake_backward = jax.vjp(fake, x, scale, zero_point)
        codes, codes_backward = jax.vjp(carried, x, scale, zero_point)
        return {
            f"{prefix}fake_quantize": (y,),
            f"{prefix}quantize": (jaxquant.quantize(x, scale, zero_point, **grid, **rounding, **common), codes),
            f"{prefix}fake_quantize_gradient": fake_backward(dy),
            f"{prefix}quantize_gradient": codes_backward(dy.astype(jnp.float32)),
        }

    def call(x: Any, scale: Any, zero_point: Any, dy: Any) -> dict[str, Any]:
        nearest = rounded(x, scale, zero_point, dy, "", {})
        drawn = {"rounding": "stochastic", "key": np.array(_KEY, np.uint32)}

        def back(*a):
            return jaxquant.dequantize(*a, dtype=x.dtype, **common)

        values, values_backward = jax.vjp(back, nearest["quantize"][1], scale, zero_point)
        return {
            **nearest,
            **(rounded(x, scale, zero_point, dy, "stochastic_", drawn) if case.drawn else {}),
            "dequantize": (values,),
            "dequantize_gradient": values_backward(dy),
        }

    return call


# ----------------------------------------------------------------------------------------------------------- comparison


class _Judge:
    def __init__(self, implementation: str | None) -> None:
        self.implementation = implementation
        self.platform = jax.default_backend()
        self.failures: list[str] = []
        self.cases: dict[str, int] = dict.fromkeys(primitive.OPERATIONS, 0)
        self.ordered = True

    def run(self, case: _Case) -> None:
        call = _actual(case, self.implementation)
        operands = tuple(map(jnp.asarray, (case.x, case.scale, case.zero_point, case.dy)))
        expected = _expected(case)
        self.compare(case.name, jax.jit(call)(*operands), expected)
        if case.name.startswith(("groups, float32, int8", "per channel, middle")):
            mapped = jax.jit(jax.vmap(call, (0, None, None, None)))(jnp.stack([operands[0]] * 2), *operands[1:])
            self.compare(f"{case.name}, vmap", jax.tree.map(lambda a: a[1], mapped), expected)

    def compare(self, name: str, actual: dict[str, Any], expected: dict[str, Any]) -> None:
        for operation, wanted in expected.items():
            for i, (a, b) in enumerate(zip(actual[operation], wanted, strict=True)):
                label = f"{operation}, result {i}, {name}"
                self.sums(operation, label, a, b) if isinstance(b, _Sum) else self.bits(operation, label, a, b)

    def bits(self, operation: str, name: str, actual: Any, expected: np.ndarray) -> None:
        self.cases[operation] += 1
        actual = np.asarray(actual)
        if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
            got, wanted = f"{actual.dtype}{actual.shape}", f"{expected.dtype}{expected.shape}"
            self.failures.append(f"{name}: expected {wanted}, got {got}")
            return
        same = actual == expected
        if jnp.issubdtype(expected.dtype, jnp.floating):
            same = (same & (np.signbit(actual) == np.signbit(expected))) | (np.isnan(actual) & np.isnan(expected))
        self.refuse(name, same, actual, expected)

    def close(self, operation: str, name: str, actual: Any, expected: np.ndarray, most: float) -> None:
        """By the normalised mean squared error."""
        self.cases[operation] += 1
        actual = np.asarray(actual, np.float64)
        if actual.shape != expected.shape:
            self.failures.append(f"{operation}, {name}: expected shape {expected.shape}, got {actual.shape}")
            return
        error = np.square(actual - expected).sum() / np.square(expected).sum()
        if not error <= most:
            self.failures.append(f"{operation}, {name}: expected an error of at most {most}, got {error}")

    def sums(self, operation: str, name: str, actual: Any, expected: _Sum) -> None:
        self.cases[operation] += 1
        actual, ordered = np.asarray(actual), expected.ordered()
        with np.errstate(invalid="ignore"):
            exact = (actual == ordered) | (np.isnan(actual) & np.isnan(ordered))
            close = np.abs(actual.astype(np.float64) - ordered) <= expected.bound()
        self.ordered &= bool(exact.all())
        self.refuse(name, close | exact, actual, ordered)

    def refuse(self, name: str, same: np.ndarray, actual: np.ndarray, expected: np.ndarray) -> None:
        wrong = np.argwhere(~same)
        if len(wrong):
            at = tuple(map(int, wrong[0]))
            shown = f"at {at}: expected {expected[at]}, got {actual[at]}"
            self.failures.append(f"{name}: {len(wrong)} of {same.size} differ, first {shown}")

    @np.errstate(all="ignore")
    def dynamic(self) -> None:
        """Scales chosen from the values of rows, groups and columns, and what quantisation with them gives."""
        for dtype in ("float32", "float16", "bfloat16"):
            x = np.random.default_rng(5).normal(size=(9, 96)).astype(jnp.dtype(dtype))
            x[0, :4], x[1] = [np.nan, np.inf, -np.inf, -0.0], 0
            real, how = x.astype(np.float32), self.implementation
            for block in ((1, 96), (1, 32), (9, 1), (9, 96)):
                name, counts = f"{dtype}, blocks of {block}", (9 // block[0], 96 // block[1])
                split = real.reshape(counts[0], block[0], counts[1], block[1])
                largest = np.where(np.isfinite(split), np.abs(split), 0).max((1, 3))
                scale = np.where(largest > 0, largest / np.float32(127), np.float32(1)).astype(np.float32)
                t = np.rint(real / _spread(scale, x.shape)) + np.float32(0)  # never -0
                codes = np.where(np.isnan(t), 0, np.clip(t, -127, 127))
                values = np.clip(t, -127, 127) * _spread(scale, x.shape)
                granularity = jaxquant.PerBlock(block)
                q = jaxquant.dynamic_quantize(x, granularity, implementation=how)
                fake = jaxquant.dynamic_fake_quantize(x, granularity, implementation=how)
                self.bits("dynamic_quantize", f"dynamic_quantize, scale, {name}", q.scale, scale)
                self.bits("dynamic_quantize", f"dynamic_quantize, {name}", q.qvalue, codes.astype(np.int8))
                self.bits("dynamic_fake_quantize", f"dynamic_fake_quantize, {name}", fake, values.astype(x.dtype))
                params = jaxquant.choose_qparams(x, granularity, implementation=how)
                self.bits("range", f"range, {name}", params.scale, scale)

    def packing(self) -> None:
        rng = np.random.default_rng(1)
        for qtype, bits in (("int4", 4), ("uint4", 4), ("int2", 2), ("uint2", 2)):
            for size in (1, 7, 64, 133):
                low = 0 if qtype.startswith("u") else -(1 << (bits - 1))
                q = rng.integers(low, low + (1 << bits), (3, size)).astype(np.uint8 if low == 0 else np.int8)
                per_byte = 8 // bits
                fields = np.zeros((3, -(-size // per_byte) * per_byte), np.uint8)
                fields[:, :size] = q.astype(np.uint8) & ((1 << bits) - 1)
                shifted = fields.reshape(3, -1, per_byte) << np.arange(0, 8, bits, dtype=np.uint8)
                expected = np.bitwise_or.reduce(shifted, axis=-1).astype(np.uint8)
                name = f"{qtype}, {size} codes"
                packed = jaxquant.pack(q, qtype, implementation=self.implementation)
                self.bits("pack", f"pack, {name}", packed, expected)
                unpacked = jaxquant.unpack(expected, qtype, size, implementation=self.implementation)
                self.bits("unpack", f"unpack, {name}", unpacked, q)
                fused = {"qtype": qtype, "packed": True, "implementation": self.implementation}
                direct = jaxquant.quantize(q.astype(np.float32), 1.0, **fused)
                self.bits("quantize", f"quantize, packed, {name}", direct, expected)

    def optimiser(self) -> None:
        """Against jax.numpy on the host, from states of any bytes."""
        rng, names = np.random.default_rng(2), ("update", "m", "exponents of m", "v", "exponents of v")
        bind = optim.adam8bit_p.bind
        for shape, length in (((3, 300), 256), ((2, 5, 512), 64), ((7, 1), 1)):
            few = (*shape[:-1], -(-shape[-1] // length))
            state = [rng.integers(0, 256, s, np.uint8) for s in (shape, few, shape, few)]
            factors = np.array([[0.9, 0.1, 0.999, 0.001, 2.0, 1e-8]], np.float32)
            operands = (rng.standard_normal(shape).astype(np.float32), *state, factors, np.array([7], np.uint32))
            with jax.default_device(jax.local_devices(backend="cpu")[0]):
                expected = bind(*operands, axis=-1, length=length, implementation="xla")
            actual = bind(*operands, axis=-1, length=length, implementation=self.implementation)
            for name, got, wanted in zip(names, actual, expected, strict=True):
                self.bits("adam8bit", f"adam8bit, {name}, {shape}", got, np.asarray(wanted))

    def empty(self) -> None:
        x, scale = jnp.zeros((0, 4), jnp.float32), jnp.ones((1, 4), jnp.float32)

        def call(x, s):
            return jaxquant.fake_quantize(x, s, implementation=self.implementation)

        y, backward = jax.vjp(call, x, scale)
        self.bits("fake_quantize", "fake_quantize, no elements", y, np.zeros((0, 4), np.float32))
        dscale = backward(y)[1]
        self.bits("fake_quantize_gradient", "dscale of no elements", dscale, np.zeros((1, 4), np.float32))
