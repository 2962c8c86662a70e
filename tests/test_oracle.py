"""The oracle itself: against the stored cases, and its sums and packing against plain Python loops."""

import numpy as np
import oracle
import pytest
from oracle import assert_same_bits

CASES = oracle.cases()


def without_tiny(a):
    """Counts numbers near the subnormals as +0: an input that is flushed changes terms of that size."""
    return np.where(np.abs(a) < 1e-36, np.zeros_like(a), a)


def test_all_cases_are_there():
    assert len(CASES) == 43


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_reference_cases(case):
    operands = case.x, case.scale, case.zero_point
    codes = oracle.quantize(*operands, **case.keywords)
    assert_same_bits(codes.astype(np.int32), case.spec["q"])
    assert_same_bits(oracle.fake_quantize(*operands, **case.keywords), case.spec["fq"])
    back = oracle.dequantize(codes, case.scale, case.zero_point, axis=case.axis, dtype=case.x.dtype)
    assert_same_bits(back, case.spec["dequant"])
    assert_same_bits(oracle.steps(*operands, **case.keywords).mask, case.spec["mask"])
    assert_same_bits(oracle.quantize_backward(case.dy, *operands, **case.keywords), case.spec["dx_quant"])
    gradient = oracle.fake_quantize_gradient(case.dy, *operands, **case.keywords)
    assert_same_bits(gradient.dx, case.spec["dx_fake"])
    assert_same_bits(without_tiny(gradient.dscale.terms), without_tiny(case.spec["dscale_elem"]))
    assert_same_bits(without_tiny(gradient.dzero_point.terms), without_tiny(case.spec["dzp_elem"]))


def sum_by_loops(terms):
    """The documented order, one addition at a time."""
    sums = []
    for start in range(0, max(len(terms), 1), 256):
        lanes = [np.float32(0)] * 32
        for j, term in enumerate(terms[start : start + 256]):
            lanes[j % 32] = lanes[j % 32] + term
        for distance in (16, 8, 4, 2, 1):
            for i in range(distance):
                lanes[i] = lanes[i] + lanes[i + distance]
        sums.append(lanes[0])
    return sums[0] if len(sums) == 1 else sum_by_loops(sums)


@pytest.mark.parametrize("size", [0, 1, 31, 33, 255, 256, 257, 511, 1025, 65536, 66000])
def test_ordered_sum(size):
    terms = np.random.default_rng(size).normal(size=size).astype(np.float32)
    assert_same_bits(oracle.ordered_sum(terms, (1,)), np.asarray(sum_by_loops(list(terms)), np.float32).reshape(1))


def test_ordered_sum_numbers_terms_in_row_major_order():
    terms = np.random.default_rng(0).normal(size=(6, 70, 9)).astype(np.float32)
    sums = oracle.ordered_sum(terms, (2, 1, 3))
    for i in range(2):
        for j in range(3):
            block = [
                terms[a, b, c] for a in range(3 * i, 3 * i + 3) for b in range(70) for c in range(3 * j, 3 * j + 3)
            ]
            assert sums[i, 0, j] == sum_by_loops(block)


def test_ordered_sum_starts_from_positive_zero():
    assert_same_bits(oracle.ordered_sum(np.full(5, -0.0, np.float32), (1,)), np.zeros(1, np.float32))


@pytest.mark.parametrize("qtype", oracle.BITS)
def test_packing_by_text(qtype):
    """The byte's binary digits, read from the right, are the codes."""
    bits, (low, high) = oracle.BITS[qtype], oracle.RANGES[qtype]
    q = np.random.default_rng(0).integers(low, high + 1, 8 // bits).astype(oracle.CONTAINERS[qtype])
    digits = f"{int(oracle.pack(q, qtype)[0]):08b}"
    fields = [int(digits[8 - bits * (place + 1) : 8 - bits * place], 2) for place in range(8 // bits)]
    assert [field - 2**bits if field > high else field for field in fields] == q.tolist()
    assert_same_bits(oracle.unpack(oracle.pack(q, qtype), qtype, len(q)), q)


def test_a_difference_is_seen():
    a = np.float32([1.0, 0.0, np.nan])
    assert_same_bits(a, a.copy())
    for other in ([1.0, -0.0, np.nan], [np.nextafter(np.float32(1), np.float32(2)), 0.0, np.nan], [1.0, 0.0, 0.0]):
        with pytest.raises(AssertionError, match="1 of 3 elements differ"):
            assert_same_bits(np.float32(other), a)
    with pytest.raises(AssertionError, match="dtype"):
        assert_same_bits(a.astype(np.float64), a)
    with pytest.raises(AssertionError, match="shape"):
        assert_same_bits(a[:2], a)
