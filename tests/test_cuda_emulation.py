"""The CUDA kernels, run on the host, have the bits of the oracle and so of the CPU kernels.

Needs the module `_cuda_emulation` (built with JAXQUANT_EMULATION=ON). Most tests call it without XLA, whose buffers are
always well aligned and whose compilations take most of the time: here each operand begins anywhere in memory.
"""

import json
import os
import subprocess
import sys

import calls
import granularities
import jax
import ml_dtypes
import numpy as np
import oracle
import pytest

from jaxquant._core import ffi

kernels = ffi.module("cuda_emulation")
pytestmark = pytest.mark.skipif(kernels is None, reason="the emulated CUDA kernels are not compiled in")

DTYPES = ("float32", "float64", "float16", "bfloat16")
NAMED = {name: np.dtype(name) for name in DTYPES if name != "bfloat16"} | {"bfloat16": np.dtype(ml_dtypes.bfloat16)}
# Beginnings of dy, x and the results, in elements: aligned, alike, and each for itself.
OFFSETS = ((0, 0, 0), (1, 1, 1), (3, 3, 3), (0, 1, 0), (1, 0, 0), (0, 0, 1))
GUARD = 64  # bytes on either side of a result, which nobody may write


class Output:
    """An array that begins ``offset`` elements after a 64-byte boundary, amid bytes that must stay as they are."""

    def __init__(self, shape, dtype, offset=0):
        dtype = np.dtype(dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        self.memory = np.full(size + 4 * GUARD + offset * dtype.itemsize, 0xA5, np.uint8)
        self.start = -self.memory.ctypes.data % GUARD + GUARD + offset * dtype.itemsize
        self.stop = self.start + size
        self.array = self.memory[self.start : self.stop].view(dtype).reshape(shape)

    def checked(self):
        assert (self.memory[: self.start] == 0xA5).all(), "written before the result"
        assert (self.memory[self.stop :] == 0xA5).all(), "written after the result"
        return self.array


def placed(values, offset=0):
    """A copy that begins ``offset`` elements after a boundary."""
    output = Output(values.shape, values.dtype, offset)
    output.array[...] = values
    return output.array


class Call:
    """The operands of one granularity as a kernel sees them: scale and zero point of x's rank, arithmetic type."""

    def __init__(self, operands, keywords):
        self.x, self.dy = operands.x, operands.dy
        self.keywords = keywords
        self.scale_shape = np.shape(operands.scale)
        self.operands = operands
        self.qtype = keywords.get("qtype", "int8")
        self.range = oracle.code_range(self.qtype, keywords.get("qmin"), keywords.get("qmax"))

    def parameters(self, real, zero_point=None):
        axis = self.keywords.get("axis")
        zero = self.operands.zero_point if zero_point is None else zero_point
        shape = np.shape(zero)
        if np.shape(self.operands.scale) and len(shape) < len(self.scale_shape):
            shape = (1,) * (len(self.scale_shape) - len(shape)) + shape
        scale = oracle.to_grid(self.operands.scale, self.scale_shape, self.x.shape, axis).astype(real)
        grid = oracle._grid_shape(shape, self.scale_shape, self.x.ndim, axis)
        return placed(scale, 1), placed(np.asarray(zero, real).reshape(grid), 1)

    def map(self, name, x, dtype, offsets, dy=None, packed_bits=0, shape=None):
        real = oracle.arithmetic_type(dtype if name == "dequantize" else x.dtype)
        scale, zero = self.parameters(real)
        out = Output(self.x.shape if shape is None else shape, dtype, offsets[2])
        kernels.map(
            name, None if dy is None else placed(dy, offsets[0]), placed(x, offsets[1]), scale, zero, out.array,
            *map(float, self.range), packed_bits,
        )  # fmt: skip
        return out.checked()

    def gradient(self, name, dy, x, offsets, want=(True, True, True)):
        real = oracle.arithmetic_type(x.dtype)
        scale, zero = self.parameters(real)
        zero = placed(np.broadcast_to(zero, scale.shape))
        outputs = [
            Output(x.shape, x.dtype, offsets[2]) if want[0] else None,
            Output(scale.shape, real, 1) if want[1] else None,
            Output(scale.shape, real, 1) if want[2] else None,
        ]
        kernels.gradient(
            name, placed(dy, offsets[0]), placed(x, offsets[1]), scale, zero,
            *(o and o.array for o in outputs), *map(float, self.range),
        )  # fmt: skip
        return [o and o.checked() for o in outputs]


def check_values(call, offsets):
    """Every element-wise operation, into every type."""
    x, operands, keywords = call.x, call.operands, call.keywords
    where = {name: keywords.get(name) for name in ("axis", "block_shape")}
    wanted = oracle.fake_quantize(x, operands.scale, operands.zero_point, **keywords)
    oracle.assert_same_bits(call.map("fake_quantize", x, x.dtype, offsets), wanted, x=x)

    container = oracle.CONTAINERS[call.qtype]
    carriers = {np.dtype(container), x.dtype, np.dtype(np.float32)}
    for dtype in carriers:
        codes = oracle.quantize(x, operands.scale, operands.zero_point, dtype=dtype, **keywords)
        oracle.assert_same_bits(call.map("quantize", x, dtype, offsets), codes, x=x)
        for out in NAMED.values():
            if dtype == np.float64 and out != np.float64:
                continue
            wanted = oracle.dequantize(codes, operands.scale, operands.zero_point, dtype=out, **where)
            oracle.assert_same_bits(call.map("dequantize", codes, out, offsets), wanted, q=codes)


def check_gradients(call, offsets, wants=((True, True, True),)):
    x, dy, operands, keywords = call.x, call.dy, call.operands, call.keywords
    for name in ("fake_quantize", "quantize", "dequantize"):
        if name == "dequantize":
            where = {key: keywords.get(key) for key in ("axis", "block_shape")}
            wanted = oracle.dequantize_gradient(dy, x, operands.scale, operands.zero_point, **where)
        else:
            function = getattr(oracle, f"{name}_gradient")
            wanted = function(dy, x, operands.scale, operands.zero_point, **keywords)
        dx = call.map(name, x, x.dtype, offsets, dy=dy)
        oracle.assert_same_bits(dx, wanted.dx, x=x, dy=dy)
        for want in wants:
            dx, dscale, dzero = call.gradient(name, dy, x, offsets, want)
            if want[0]:
                oracle.assert_same_bits(dx, wanted.dx, x=x, dy=dy)
            # In the scale's grid, whatever shape the user's zero point has.
            if want[1]:
                oracle.assert_same_bits(dscale, oracle.ordered_sum(wanted.dscale.terms, dscale.shape))
            if want[2]:
                oracle.assert_same_bits(dzero, oracle.ordered_sum(wanted.dzero_point.terms, dzero.shape))


def grid(granularity, qtype="int8", **keywords):
    return {**granularity.keywords, "qtype": qtype, **keywords}


FULL = tuple(g for g in granularities.ALL if np.prod(g.x_shape) > 0)
QTYPES = {"float32": "int8", "float64": "int16", "float16": "uint8", "bfloat16": "uint4"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("granularity", FULL, ids=repr)
def test_every_granularity_anywhere_in_memory(granularity, dtype):
    qtype = QTYPES[dtype]
    call = Call(granularity.operands(dtype, qtype), grid(granularity, qtype))
    # Large ones only show once more what small ones do.
    for offsets in OFFSETS if call.x.size < 10000 else OFFSETS[:2]:
        check_values(call, offsets)
        check_gradients(call, offsets)


G = granularities.Granularity
# Whole vectors of every type, so that all ways through a tensor are taken; several strides of the grid.
LARGE = (
    G("flat", (300, 1001), ()),
    G("rows", (96, 3072), (96, 1)),
    G("rows_and_a_tail", (67, 2051), (67, 1)),
    G("short_runs", (700, 49), (700, 1)),
    G("groups", (64, 2048), (64, 64), block_shape=(1, 32)),
    G("columns", (700, 304), (1, 304)),
    G("few_columns", (4099, 16), (1, 16)),
    G("batches_of_columns", (3, 300, 80), (3, 1, 80)),
    G("middle", (5, 48, 16, 16), (1, 48, 1, 1)),
    G("blocks", (96, 640), (3, 5), block_shape=(32, 128)),
    G("zero_point_per_row", (48, 320), (48, 320), zero_point_shape=(48, 1)),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("granularity", LARGE, ids=repr)
def test_large_tensors(granularity, dtype):
    call = Call(granularity.operands(dtype), grid(granularity))
    offsets = (0, 0, 0) if granularity.name != "flat" else (1, 1, 1)
    check_values(call, offsets)
    check_gradients(call, offsets)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("want", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1) if b or c], ids=str)
def test_only_what_is_wanted(want, dtype):
    for granularity in (LARGE[1], LARGE[5], granularities.BLOCKS):
        call = Call(granularity.operands(dtype), grid(granularity))
        check_gradients(call, (0, 0, 0), (tuple(map(bool, want)),))


SPECIAL = np.array(
    [0.0, -0.0, np.nan, np.inf, -np.inf, 1.0, -1.0, 0.5, -0.5, 2.5, 1e-45, 1e-38, 3e-38, 1e-30, 1e-25, 1e20, 1e25, 3e38,
     -3e38, 2.0**54, 2.0**55, 2.0**80, 2.0**81, 2.0**-100, 2.0**-101, 0.1, 100.7, -129.5],
    np.float32,
)  # fmt: skip
SCALES = np.array(
    [1.0, 0.1, 7.0, -0.1, 0.0, -0.0, np.nan, np.inf, 2.0**-46, 2.0**-47, 2.0**24, 2.0**25, 3e-38, 1e-45, 1e38,
     2 - 2.0**-23],
    np.float32,
)  # fmt: skip


@pytest.mark.parametrize("layout", ("rows", "columns", "crossing"))
@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
def test_special_values_and_scales(dtype, layout):
    """Scales outside the range of the fast quotient take the slow way, beside others that do not."""
    rng = np.random.default_rng(5)
    size = 299 if layout == "crossing" else 304
    with np.errstate(all="ignore"):
        x = rng.choice(SPECIAL, (len(SCALES), size)).astype(NAMED[dtype])
        dy = rng.choice(SPECIAL, x.shape).astype(NAMED[dtype])
    scale, shape = SCALES, (len(SCALES), 1)
    if layout == "columns":
        x, dy = np.ascontiguousarray(x.T), np.ascontiguousarray(dy.T)
        shape = (1, len(SCALES))
    for zero in (np.float32(0), np.float32(-0.3), np.float32(3e8), np.float32(np.nan)):
        operands = granularities.Operands(x, scale.reshape(shape), np.full(shape, zero), dy)
        call = Call(operands, {"axis": None, "block_shape": None, "qtype": "uint8"})
        wanted = oracle.fake_quantize(x, operands.scale, operands.zero_point, qtype="uint8")
        oracle.assert_same_bits(call.map("fake_quantize", x, x.dtype, (0, 0, 0)), wanted, x=x, scale=operands.scale)
        if zero == zero:
            for out in (np.uint8, np.float32):
                codes = oracle.quantize(x, operands.scale, operands.zero_point, qtype="uint8", dtype=out)
                oracle.assert_same_bits(call.map("quantize", x, out, (0, 0, 0)), codes, x=x, scale=operands.scale)
            check_gradients(call, (0, 0, 0))


@pytest.mark.parametrize("bits", (4, 2))
@pytest.mark.parametrize("signed", (True, False))
@pytest.mark.parametrize(
    "shape", ((1,), (5,), (16,), (4099,), (3, 7), (6, 64), (16, 1030), (2, 3, 9), (300, 512)), ids=str
)
def test_packing(shape, signed, bits):
    qtype = f"{'' if signed else 'u'}int{bits}"
    rng = np.random.default_rng(bits)
    codes = rng.integers(*oracle.code_range(qtype, None, None), shape, endpoint=True).astype(oracle.CONTAINERS[qtype])
    wanted = oracle.pack(codes, qtype)
    for a, b in ((0, 0), (1, 0), (0, 1), (3, 3)):
        packed = Output(wanted.shape, np.uint8, b)
        kernels.pack(placed(codes, a), packed.array, bits)
        oracle.assert_same_bits(packed.checked(), wanted)
        back = Output(shape, codes.dtype, a)
        kernels.unpack(placed(wanted, b), back.array, bits)
        oracle.assert_same_bits(back.checked(), codes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", (4, 2))
def test_quantize_to_packed_codes(bits, dtype):
    qtype = f"int{bits}"
    shapes = (*FULL, LARGE[0], LARGE[1], LARGE[4], LARGE[5])
    for granularity in shapes:
        if not granularity.x_shape:
            continue
        operands = granularity.operands(dtype, qtype)
        keywords = grid(granularity, qtype)
        call = Call(operands, keywords)
        codes = oracle.quantize(operands.x, operands.scale, operands.zero_point, **keywords)
        wanted = oracle.pack(codes, qtype)
        for offsets in ((0, 0, 0), (0, 1, 1), (0, 4, 1), (0, 0, 1)):
            got = call.map("quantize", operands.x, np.uint8, offsets, packed_bits=bits, shape=wanted.shape)
            oracle.assert_same_bits(got, wanted)


def test_results_may_take_the_place_of_x():
    """XLA hands a donated operand in as the result."""
    for granularity in (LARGE[0], LARGE[2], LARGE[5], granularities.BLOCKS):
        operands = granularity.operands("bfloat16")
        keywords = grid(granularity)
        scale, zero = Call(operands, keywords).parameters(np.float32)
        low, high = map(float, oracle.code_range("int8", None, None))
        for offset in (0, 1):
            x = placed(operands.x, offset)
            kernels.map("fake_quantize", None, x, scale, zero, x, low, high)
            oracle.assert_same_bits(
                x, oracle.fake_quantize(operands.x, operands.scale, operands.zero_point, **keywords)
            )
            dy = placed(operands.dy, offset)
            kernels.map("fake_quantize", dy, placed(operands.x, offset), scale, zero, dy, low, high)
            wanted = oracle.fake_quantize_gradient(
                operands.dy, operands.x, operands.scale, operands.zero_point, **keywords
            )
            oracle.assert_same_bits(dy, wanted.dx)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("granularity", (*granularities.FEW, granularities.EMPTY), ids=repr)
def test_through_jax(granularity, dtype):
    calls.check(granularity.operands(dtype), grid(granularity), "cuda_emulation")


@pytest.mark.parametrize("case", oracle.cases(), ids=repr)
def test_stored_cases(case):
    call = Call(case, case.keywords)
    if case.x.size:
        check_values(call, (0, 0, 0))
        check_gradients(call, (0, 0, 0))


# What a launch order could change: everything that waits for other threads.
SEEDED = """
import sys, json, zlib
sys.path.insert(0, sys.argv[1])
import numpy as np
import granularities, test_cuda_emulation as t
hashes = []
for granularity in (t.LARGE[4], t.LARGE[5], t.LARGE[8], granularities.BLOCKS):
    for dtype in ("float32", "bfloat16"):
        call = t.Call(granularity.operands(dtype), t.grid(granularity))
        for name in ("fake_quantize", "quantize"):
            for result in call.gradient(name, call.dy, call.x, (0, 0, 0)):
                hashes.append(zlib.crc32(result.tobytes()))
        hashes.append(zlib.crc32(call.map("quantize", call.x, np.int8, (0, 0, 0)).tobytes()))
print(json.dumps(hashes))
"""


def test_the_order_of_threads_does_not_matter():
    running = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", SEEDED, os.path.dirname(__file__)],
            env={**os.environ, "JAXQUANT_EMULATION_SEED": seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2", "0xdeadbeef")
    ]
    results = []
    for process in running:
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        results.append(json.loads(output))
    assert results[0] == results[1] == results[2]


def test_errors_name_the_operation():
    target = f"{ffi.PREFIX}emulated_fake_quantize"
    x, one = np.zeros((4, 6), np.float32), np.ones((1, 1), np.float32)
    attributes = {"qmin": -8, "qmax": 7, "packed_bits": 0}

    def run(out, *operands, **changes):
        return jax.ffi.ffi_call(target, out)(*operands, **{k: np.int64(v) for k, v in (attributes | changes).items()})

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    with pytest.raises(jax.errors.JaxRuntimeError, match="fake_quantize: scale: expected 1, x's size or a divisor"):
        run(out, x, np.ones((1, 4), np.float32), one)
    with pytest.raises(jax.errors.JaxRuntimeError, match="fake_quantize: no CUDA kernel for these element types"):
        run(jax.ShapeDtypeStruct(x.shape, np.int8), x.astype(np.int8), one, one)


def test_errors_of_launches_come_back():
    name = f"{ffi.PREFIX}emulated_failing"
    jax.ffi.register_ffi_target(name, kernels.failing_handler(), platform="cpu")
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((1,), np.float32), has_side_effect=True)
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"failing: emulated CUDA: .*__syncthreads"):
            jax.block_until_ready(call())
    # And are over with: the next launch is fine.
    check_values(Call(granularities.PER_TENSOR.operands("float32"), grid(granularities.PER_TENSOR)), (0, 0, 0))
