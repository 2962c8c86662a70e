"""What can be wrong with the bytes of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxquant._core.errors import refuse
from jaxquant.ggml.qtensor import QTensor


@dataclass(frozen=True)
class Finding:
    """Blocks of a tensor with an impossible field: how many, and where the first is (leading indices, then block)."""

    field: str
    problem: str
    count: int
    first: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.field}: {self.problem} in {self.count} blocks, the first at {self.first}"


# Offsets of the half-precision scales (and minimums) in a block.
_HALVES: dict[str, dict[str, int]] = {
    "F16": {"value": 0},
    **{name: {"d": 0} for name in ("Q1_0", "Q2_0", "Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS")},
    **{name: {"d": 0} for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S")},
    **{name: {"d": 0, "m": 2} for name in ("Q4_1", "Q5_1")},
    "Q8_1": {"d": 0, "s": 2},
    **{name: {"d": 0, "dmin": 2} for name in ("Q4_K", "Q5_K")},
    "Q2_K": {"d": 80, "dmin": 82}, "Q3_K": {"d": 108}, "Q6_K": {"d": 208}, "TQ1_0": {"d": 52}, "TQ2_0": {"d": 64},
}  # fmt: skip


def _floats(blocks: np.ndarray, at: int, dtype: str) -> np.ndarray:
    return np.ascontiguousarray(blocks[..., at : at + np.dtype(dtype).itemsize]).view(dtype)[..., 0]


def _iq1_m_scale(blocks: np.ndarray) -> np.ndarray:
    words = np.ascontiguousarray(blocks[..., 48:56]).view("<u2") >> 12
    bits = words[..., 0] | words[..., 1] << 4 | words[..., 2] << 8 | words[..., 3] << 12
    return bits.astype("<u2").view("<f2")


def _twos(blocks: np.ndarray, first: int, last: int) -> np.ndarray:
    """Whether a byte holds the 2-bit code 3."""
    bytes_ = blocks[..., first:last]
    return ((bytes_ & bytes_ >> 1 & 0x55) != 0).any(-1)


def _base_3(blocks: np.ndarray) -> np.ndarray:
    """Whether a byte is none that five (the last four bytes: four) digits of base 3 give."""
    five = {(int(n) * 256 + 242) // 243 for n in range(243)}
    four = {(int(n) * 3 * 256 + 242) // 243 for n in range(81)}
    wrong5, wrong4 = (~np.isin(np.arange(256), sorted(known)) for known in (five, four))
    return wrong5[blocks[..., :48]].any(-1) | wrong4[blocks[..., 48:52]].any(-1)


_IMPOSSIBLE: dict[str, tuple[str, str, Callable[[np.ndarray], np.ndarray]]] = {
    "MXFP4": ("e", "not a number", lambda b: b[..., 0] == 255),
    "NVFP4": ("d", "not a number", lambda b: ((b[..., :4] & 127) == 127).any(-1)),
    "TQ1_0": ("qs", "a byte that is no digits of base 3", _base_3),
    "TQ2_0": ("qs", "a code of 3, which no ternary value has", lambda b: _twos(b, 0, 64)),
    "F32": ("value", "non-finite", lambda b: ~np.isfinite(_floats(b, 0, "<f4"))),
    "BF16": ("value", "non-finite", lambda b: (b[..., 1] & 127 == 127) & (b[..., 0] >> 7 == 1)),
    "Q8_K": ("d", "non-finite", lambda b: ~np.isfinite(_floats(b, 0, "<f4"))),
    "IQ1_M": ("d", "non-finite", lambda b: ~np.isfinite(_iq1_m_scale(b))),
}


def validate(tensor: QTensor) -> list[Finding]:
    """What is wrong with a tensor's bytes: non-finite scales, and fields that no quantiser writes.

    Finite values whose scale overflows half precision quantise to an infinite scale, in ggml as here; files may be
    damaged. Looks at every block, on the host.

    Returns:
      A `Finding` for each field with a problem; an empty list for a sound tensor.

    >>> [str(finding) for finding in ggml.validate(ggml.quantize(jnp.full((2, 32), 1e9), "Q8_0"))]
    ['d: non-finite in 2 blocks, the first at (0, 0)']
    """
    if not isinstance(tensor, QTensor):
        raise refuse("validate", "tensor", "a QTensor", type(tensor).__name__, "see jaxquant.ggml.quantize", TypeError)
    kind, data = tensor.format, np.asarray(tensor.plain().data)
    blocks = data.reshape(*data.shape[:-1], -1, kind.type_size) if data.size else data.reshape(0, kind.type_size)
    found = []

    def report(field: str, problem: str, wrong: np.ndarray) -> None:
        if wrong.any():
            first = tuple(int(i) for i in np.argwhere(wrong)[0])
            found.append(Finding(field, problem, int(wrong.sum()), first))

    for field, at in _HALVES.get(kind.name, {}).items():
        report(field, "non-finite", ~np.isfinite(_floats(blocks, at, "<f2")))
    if kind.name in _IMPOSSIBLE:
        field, problem, test = _IMPOSSIBLE[kind.name]
        report(field, problem, test(blocks))
    return found
