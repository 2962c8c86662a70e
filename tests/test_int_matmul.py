"""Integer products: exact sums of codes, the prepared layout, and scaled products, against NumPy."""

import ctypes
import itertools
import mmap
import sys

import jax
import jax.numpy as jnp
import matmul_oracle as oracle
import numpy as np
import pytest
from oracle import assert_same_bits

import jaxquant
from jaxquant.affine.int_matmul import scaled_matmul
from jaxquant.testing import emulation_available

IMPLEMENTATIONS = ["ffi", "xla"] + ["cuda_emulation"] * emulation_available()
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
DTYPES = (np.int8, np.uint8)
PAIRS = list(itertools.product(DTYPES, DTYPES))
QTYPES = {"int8": (8, True), "uint8": (8, False), "int4": (4, True), "uint4": (4, False), "int2": (2, True),
          "uint2": (2, False)}  # fmt: skip


def codes(rng, dtype, *shape):
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max + 1, shape).astype(dtype)


def sub_codes(rng, qtype, *shape):
    bits, signed = QTYPES[qtype]
    low = -(1 << (bits - 1)) if signed else 0
    return rng.integers(low, low + (1 << bits), shape).astype(np.int8 if signed else np.uint8)


# ---------------------------------------------------------------------------------------------------------- int_matmul

SIZES = [(1, 1, 1), (1, 40, 33), (2, 16, 4), (3, 17, 5), (4, 70, 32), (5, 100, 130), (7, 48, 64), (8, 49, 63),
         (9, 15, 257), (17, 65, 8), (40, 33, 31)]  # fmt: skip


@every_implementation
@pytest.mark.parametrize("dtypes", PAIRS, ids=lambda pair: f"{pair[0].__name__}-{pair[1].__name__}")
def test_exact(dtypes, implementation):
    rng = np.random.default_rng(0)

    @jax.jit
    def products(pairs):
        return [jaxquant.int_matmul(a, b, implementation=implementation) for a, b in pairs]

    pairs = [(codes(rng, dtypes[0], m, k), codes(rng, dtypes[1], k, n)) for m, n, k in SIZES]
    for (a, b), actual in zip(pairs, products(pairs), strict=True):
        assert actual.dtype == jnp.int32
        np.testing.assert_array_equal(actual, oracle.int_matmul(a, b), err_msg=f"{a.shape} {b.shape}")


@pytest.mark.parametrize("dtypes", PAIRS, ids=lambda pair: f"{pair[0].__name__}-{pair[1].__name__}")
def test_exact_around_blocks(dtypes):
    """The edges of the blocks that kernels on the CPU work in: one more, one less, and in every combination."""
    rng = np.random.default_rng(4)
    rows, columns = (9, 16, 17, 31, 32, 33, 100), (1, 15, 16, 17, 33, 64, 100)
    sizes = [
        *itertools.product(rows, columns, (1, 3, 16, 17, 63, 64, 65, 127, 130, 1030)),
        (9, 20, 1024),
        (70, 40, 2112),
    ]
    products = jax.jit(lambda pairs: [jaxquant.int_matmul(a, b) for a, b in pairs])
    pairs = [(codes(rng, dtypes[0], m, k), codes(rng, dtypes[1], k, n)) for m, n, k in sizes]
    for (a, b), actual in zip(pairs, products(pairs), strict=True):
        np.testing.assert_array_equal(actual, oracle.int_matmul(a, b), err_msg=f"{a.shape} {b.shape}")


@every_implementation
@pytest.mark.parametrize("dtypes", PAIRS, ids=lambda pair: f"{pair[0].__name__}-{pair[1].__name__}")
def test_extremes(dtypes, implementation):
    """Where pairs of products saturate 16 bits: the ends of the ranges, whole rows and alternating."""
    ends = [[np.iinfo(d).min, np.iinfo(d).max] for d in dtypes]
    k = 70
    patterns = [[0], [1], [0, 1], [1, 1, 0, 0]]
    a, b = (
        np.stack([np.resize(np.take(e, p), k) for p in patterns]).astype(d) for e, d in zip(ends, dtypes, strict=True)
    )
    a, b = np.tile(a, (3, 1)), np.tile(b, (9, 1)).T
    for rows in (1, 2, 12):
        actual = jaxquant.int_matmul(a[:rows], b, implementation=implementation)
        np.testing.assert_array_equal(actual, oracle.int_matmul(a[:rows], b))


@every_implementation
def test_wraps_beyond_int32(implementation):
    k = 33_100 if implementation == "cuda_emulation" else 140_000
    a, b = np.full((1, k), 255, np.uint8), np.full((k, 2), 255, np.uint8)
    expected = oracle.int_matmul(a, b)
    np.testing.assert_array_equal(jaxquant.int_matmul(a, b, implementation=implementation), expected)
    for rows in (3, 9):
        many = jaxquant.int_matmul(np.repeat(a, rows, 0), b, implementation=implementation)
        np.testing.assert_array_equal(many, np.repeat(expected, rows, 0))
    assert expected[0, 0] != k * 255 * 255


@every_implementation
@pytest.mark.parametrize("shapes", [((0, 3), (3, 4)), ((3, 0), (0, 4)), ((3, 4), (4, 0)), ((0, 2, 3), (3, 4)),
                                    ((0, 2, 3), (0, 3, 4)), ((2, 2, 0), (2, 0, 3))], ids=str)  # fmt: skip
def test_empty(shapes, implementation):
    a, b = np.ones(shapes[0], np.int8), np.ones(shapes[1], np.uint8)
    np.testing.assert_array_equal(jaxquant.int_matmul(a, b, implementation=implementation), oracle.int_matmul(a, b))


LEADING = [((5,), (5,)), ((5,), (5, 3)), ((2, 4, 5), (5,)), ((5,), (2, 5, 3)), ((2, 4, 5), (5, 3)),
           ((2, 4, 5), (2, 5, 3)), ((1, 4, 5), (2, 5, 3)), ((2, 4, 5), (1, 5, 3)), ((3, 1, 4, 5), (2, 5, 3)),
           ((4, 5), (2, 5, 3)), ((2, 3, 4, 5), (5, 3))]  # fmt: skip


@pytest.mark.parametrize("shapes", LEADING, ids=str)
def test_leading_axes(shapes):
    rng = np.random.default_rng(1)
    a, b = codes(rng, np.int8, *shapes[0]), codes(rng, np.uint8, *shapes[1])
    actual = jaxquant.int_matmul(a, b)
    expected = oracle.wrap(np.asarray(np.matmul(a.astype(np.int64), b.astype(np.int64))))
    assert actual.shape == expected.shape == jnp.matmul(a, b).shape
    np.testing.assert_array_equal(actual, expected)


def test_refuses():
    a = np.ones((2, 3), np.int8)
    with pytest.raises(TypeError, match="int_matmul: a: expected int8 or uint8, got float32"):
        jaxquant.int_matmul(np.ones((2, 3), np.float32), a.T)
    with pytest.raises(TypeError, match="int_matmul: b: expected int8 or uint8, got int32"):
        jaxquant.int_matmul(a, np.ones((3, 2), np.int32))
    with pytest.raises(ValueError, match="int_matmul: b: expected 3 rows for a of shape"):
        jaxquant.int_matmul(a, a)
    with pytest.raises(ValueError, match="int_matmul: b: expected leading axes that broadcast"):
        jaxquant.int_matmul(np.ones((2, 2, 3), np.int8), np.ones((3, 3, 2), np.int8))
    with pytest.raises(ValueError, match="int_matmul: a: expected at least one axis"):
        jaxquant.int_matmul(np.int8(3), a)


# -------------------------------------------------------------------------------------------------------------- layout


@every_implementation
@pytest.mark.parametrize("qtype", QTYPES)
def test_prepare(qtype, implementation):
    rng = np.random.default_rng(2)
    for k, n in [(5, 3), (16, 16), (33, 40), (64, 17), (0, 3), (3, 0)]:
        c = sub_codes(rng, qtype, 2, k, n)
        w = jaxquant.QArray.from_codes(c, 0.5, qtype=qtype)
        prepared = w.prepare(implementation=implementation)
        assert (prepared.shape, prepared.ndim, prepared.layout) == ((2, k, n), 3, "prepared")
        np.testing.assert_array_equal(prepared.data, oracle.prepare(c, QTYPES[qtype][0]))
        back = prepared.plain(implementation=implementation)
        np.testing.assert_array_equal(back.data, w.data)
        assert (back.data.dtype, back.shape, back.layout) == (w.data.dtype, w.shape, "plain")


def test_prepared_arrays_in_use():
    c = sub_codes(np.random.default_rng(3), "int4", 3, 20, 18)
    w = jaxquant.QArray.from_codes(c, np.full((3, 1, 1), 0.5, np.float32), qtype="int4").prepare()
    np.testing.assert_array_equal(w.qvalue, c)
    np.testing.assert_array_equal(w.dequantize(), c * np.float32(0.5))
    np.testing.assert_array_equal(w[1].qvalue, c[1])
    mapped = jax.vmap(lambda w: w.plain().qvalue)(w)
    np.testing.assert_array_equal(mapped, c)
    assert w.prepare() is w
    assert w.plain().plain().layout == "plain"
    np.testing.assert_array_equal(jax.vmap(lambda w: w.prepare())(w.plain()).data, w.data)
    with pytest.raises(ValueError, match=r"QArray.prepare: self: expected a matrix of 8, 4 or 2 bits, got int16"):
        jaxquant.QArray.from_codes(np.ones((2, 2), np.int16), 0.5).prepare()
    with pytest.raises(ValueError, match=r"QArray.prepare: self: expected a matrix"):
        jaxquant.QArray.from_codes(np.ones(2, np.int8), 0.5).prepare()


# ------------------------------------------------------------------------------------------------------- scaled_matmul


class Problem:
    """Operands of a scaled product; the zero points, the bias and what they share are chosen one by one."""

    def __init__(self, qtype="int8", b=1, m=5, k=64, n=37, groups=1, *, lhs=np.int8, zero_a=False, zero_w=False,
                 bias=False, per_token=True, per_channel=True, one_a=False, seed=0):  # fmt: skip
        rng = np.random.default_rng(seed)
        self.bits, self.signed = QTYPES[qtype]
        self.n = n
        self.a = codes(rng, lhs, 1 if one_a else b, m, k)
        rows = (self.a.shape[0], m if per_token else 1, 1)
        columns = (b, groups, n if per_channel else 1)
        self.a_scale = rng.uniform(0.5, 2, rows).astype(np.float32)
        self.w = sub_codes(rng, qtype, b, k, n)
        self.w_scale = rng.uniform(0.001, 0.01, columns).astype(np.float32)
        self.a_zero_point = rng.integers(-128, 128, rows).astype(np.float32) if zero_a else None
        self.w_zero_point = rng.integers(-8, 8, columns).astype(np.float32) if zero_w else None
        self.bias = rng.normal(size=n).astype(np.float32) if bias else None

    @property
    def logical(self):
        return (self.a, self.a_scale, self.a_zero_point, self.w, self.w_scale, self.w_zero_point, self.bias)

    def data(self, prepared):
        if prepared:
            return oracle.prepare(self.w, self.bits)
        return self.w if self.bits == 8 else oracle.pack(self.w, self.bits)

    def operands(self, prepared):
        return (*self.logical[:3], self.data(prepared), *self.logical[4:])

    def call(self, *operands, prepared=False, dtype="float32", implementation="ffi"):
        static = {"bits": self.bits, "signed": self.signed, "n": self.n, "prepared": prepared}
        return scaled_matmul(*operands, **static, dtype=dtype, implementation=implementation)

    def expected(self, dtype="float32"):
        return oracle.scaled_matmul(*self.logical, dtype=dtype)


PROBLEMS = {
    "plain": {},
    "bias": {"bias": True},
    "everything": {"bias": True, "zero_a": True, "zero_w": True, "lhs": np.uint8},
    "groups": {"k": 96, "groups": 3},
    "groups with zeros": {"k": 96, "groups": 3, "zero_a": True, "zero_w": True, "bias": True},
    "odd groups": {"k": 63, "groups": 3, "zero_w": True, "n": 50},
    "small groups": {"k": 64, "groups": 16, "zero_a": True},
    "tensor": {"per_token": False, "per_channel": False, "zero_a": True, "zero_w": True},
    "one row": {"m": 1, "k": 130, "n": 70, "zero_a": True, "bias": True},
    "one row in groups": {"m": 1, "k": 128, "groups": 4, "n": 33, "zero_w": True},
    "four rows": {"m": 4, "k": 32, "n": 70, "zero_a": True},
    "rows": {"m": 41, "k": 128, "groups": 2, "n": 66},
    "batch": {"b": 3, "m": 4, "k": 32, "groups": 2, "zero_a": True, "zero_w": True, "bias": True},
    "shared rows": {"b": 3, "m": 2, "k": 24, "one_a": True, "zero_a": True},
    "no rows": {"m": 0},
    "no columns": {"n": 0},
    "nothing to sum": {"k": 0, "bias": True},
}


@every_implementation
@pytest.mark.parametrize("qtype", QTYPES)
def test_scaled(qtype, implementation):
    problems = {name: Problem(qtype, **options) for name, options in PROBLEMS.items()}
    # Without kernels prepared data is put back in order before the product, whatever its type.
    layouts = (False,) if implementation == "xla" and qtype not in ("int4", "uint8") else (False, True)

    @jax.jit
    def products(operands):
        return {
            name: [problems[name].call(*o, prepared=prepared, implementation=implementation)
                   for prepared, o in zip(layouts, each, strict=True)]
            for name, each in operands.items()
        }  # fmt: skip

    actual = products({name: [p.operands(prepared) for prepared in layouts] for name, p in problems.items()})
    for name, p in problems.items():
        for y in actual[name]:
            assert_same_bits(y, p.expected())


@pytest.mark.parametrize("qtype", QTYPES)
def test_scaled_around_blocks(qtype):
    """As test_exact_around_blocks: groups beside the steps of kernels on the CPU, zero points of both sides or one."""
    zeros = {"zero_a": True, "zero_w": True}
    options = [
        {"m": m, "n": n, "k": size * groups, "groups": groups, **(zeros if (m + size) % 2 else {})}
        for m, n in ((9, 33), (16, 64), (17, 15), (33, 100), (100, 17))
        for size, groups in (
            (16, 3),
            (18, 2),
            (31, 3),
            (32, 40),
            (63, 1),
            (64, 2),
            (66, 20),
            (127, 3),
            (130, 1),
            (600, 3),
        )
    ]
    options += [
        {"m": m, "n": 50, "k": k, "groups": groups, "lhs": np.uint8, "bias": True, **each}
        for m in (12, 40)
        for k, groups in ((1100, 1), (2200, 2), (17_408, 17))
        for each in (zeros, {"zero_a": True}, {"zero_w": True}, {})
    ]
    # Enough matrices that none is divided among threads.
    options += [{"b": 17, "m": 40, "k": k, "n": 4, "groups": 2, **zeros} for k in (16_500, 33_000)]
    options += [{"b": 3, "m": 40, "k": 80, "n": 35, **zeros}, {"b": 3, "m": 33, "k": 70, "one_a": True, **zeros}]
    problems = [Problem(qtype, **each) for each in options]
    operands = [(p.operands(False), p.operands(True)) for p in problems]
    products = jax.jit(
        lambda operands: [
            [p.call(*o, prepared=bool(i)) for i, o in enumerate(each)]
            for p, each in zip(problems, operands, strict=True)
        ]
    )
    for p, results in zip(problems, products(operands), strict=True):
        expected = p.expected()
        for y in results:
            assert_same_bits(y, expected)


def before_a_guard(array):
    """A copy that ends where no memory may be read; None where JAX would not use it as it lies."""
    libc = ctypes.CDLL(None)
    size = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, size + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    assert libc.mprotect(ctypes.c_void_p(address + size), mmap.PAGESIZE, 0) == 0
    copy = np.frombuffer(pages, array.dtype, array.size, size - array.nbytes).reshape(array.shape)
    copy[...] = array
    return jax.dlpack.from_dlpack(copy) if copy.ctypes.data % 64 == 0 else None


@pytest.mark.skipif(sys.platform != "linux", reason="memory is protected as on Linux")
@pytest.mark.parametrize("qtype", ["int8", "uint4", "int2"])
def test_reads_no_further(qtype):
    checked = 0
    for m, n, k, prepared in itertools.product((1, 16, 64), (64, 17), (20, 64, 132, 192, 1088), (False, True)):
        p = Problem(qtype, m=m, n=n, k=k, zero_a=True, zero_w=True)
        operands = [*p.operands(prepared)]
        for i in (0, 3):
            guarded = before_a_guard(np.asarray(operands[i]))
            operands[i] = operands[i] if guarded is None else guarded
            checked += guarded is not None
        assert_same_bits(p.call(*operands, prepared=prepared), p.expected())
    assert checked > 40


@every_implementation
@pytest.mark.parametrize("m", [3, 20])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scaled_result_types(dtype, m, implementation):
    p = Problem("int8", m=m, k=40, n=35, bias=True)
    actual = p.call(*p.operands(True), prepared=True, dtype=dtype, implementation=implementation)
    assert_same_bits(actual, p.expected(dtype))


@every_implementation
def test_scaled_with_odd_values(implementation):
    """Zero points that are no integers, beyond every range or not numbers; scales that are 0, negative, infinite."""
    p = Problem("uint4", m=6, k=32, n=20, groups=2, zero_a=True, zero_w=True)
    assert p.a_zero_point is not None
    assert p.w_zero_point is not None
    p.a_zero_point[0, :, 0] = [0.5, 1.5, -2.5, np.nan, np.inf, -1e30]
    p.w_zero_point[0, 1, :3] = [np.nan, 7.5, 1e9]
    p.w_scale[0, 0, :4] = [0, -0.5, np.inf, np.nan]
    p.a_scale[0, 1] = -1
    with np.errstate(all="ignore"):
        expected = p.expected()
    assert_same_bits(p.call(*p.operands(False), implementation=implementation), expected)


# ------------------------------------------------------------------------------------------------------------ handlers

I8, U8, F32, I32 = np.int8, np.uint8, np.float32, np.int32
SCALED = [((2, 3, 8), I8), ((2, 3, 1), F32), ((0,), F32), ((2, 8, 5), I8), ((2, 2, 5), F32), ((0,), F32), ((5,), F32)]
WRONG = [  # target, operands, result, attributes, what it says
    ("int_matmul", [((1, 3, 4), I8), ((1, 5, 2), I8)], ((1, 3, 2), I32), {}, "b: expected"),
    ("int_matmul", [((1, 3, 4), F32), ((1, 4, 2), I8)], ((1, 3, 2), I32), {}, "a: expected int8 or uint8"),
    ("int_matmul", [((1, 3, 4), I8), ((1, 4, 2), I8)], ((1, 3, 2), F32), {}, "result: expected"),
    ("int_matmul", [((2, 3, 4), I8), ((3, 4, 2), I8)], ((2, 3, 2), I32), {}, "b: expected 1 or 2 matrices"),
    ("int_matmul", [((2, 3, 4), I8), ((2, 4, 2), I8)], ((2, 4, 2), I32), {}, "a: expected"),
    ("prepare", [((1, 4, 4), U8)], ((1, 1, 1, 64), U8), {"bits": 3, "n": 4}, "bits: expected 8, 4 or 2, got 3"),
    ("prepare", [((1, 4, 4), U8)], ((1, 2, 1, 64), U8), {"bits": 8, "n": 4}, "w: expected"),
    ("plain", [((1, 1, 1, 64), U8)], ((1, 5, 4), U8), {"bits": 8, "n": 4}, "w: expected"),
]
for i, bad, says in [
    (0, ((3, 3, 8), I8), "a: expected"),
    (1, ((2, 2, 1), F32), "a_scale: expected"),
    (2, ((2, 1, 1), F32), "a_zero_point: expected"),
    (3, ((2, 7, 5), I8), "w: expected"),
    (3, ((2, 8, 5), F32), "w: expected uint8"),
    (4, ((2, 3, 5), F32), "w_scale: expected"),
    (4, ((2, 0, 5), F32), "w_scale: expected"),
    (5, ((2, 1, 5), F32), "w_zero_point: expected"),
    (6, ((4,), F32), "bias: expected"),
]:
    changed = [bad if j == i else operand for j, operand in enumerate(SCALED)]
    attributes = {"bits": 8, "is_signed": 1, "prepared": 0}
    WRONG.append(("scaled_matmul", changed, ((2, 3, 5), F32), attributes, says))


@pytest.mark.parametrize("case", WRONG, ids=lambda case: f"{case[0]} {case[4]}")
def test_handlers_refuse(case):
    """What Python would not have let through."""
    name, operands, (shape, dtype), attributes, says = case
    call = jax.ffi.ffi_call(f"jaxquant_{name}", jax.ShapeDtypeStruct(shape, dtype))
    with pytest.raises(Exception, match=says):
        jax.block_until_ready(
            call(*(jnp.zeros(s, t) for s, t in operands), **{k: np.int64(v) for k, v in attributes.items()})
        )
