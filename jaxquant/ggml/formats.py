"""The one table of block formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class BlockFormat:
    """How a row of values is stored: blocks of `block_size` values in `type_size` bytes each.

    type_id: the number that GGUF files use. requires_imatrix: quantising needs an importance matrix. fallback: the
    format for rows that are no multiple of the block, as llama.cpp chooses it. activation: a format of intermediate
    values, which no file stores.
    """

    name: str
    type_id: int
    block_size: int
    type_size: int
    requires_imatrix: bool = False
    fallback: str | None = None
    activation: bool = False

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.type_size / self.block_size

    @property
    def is_float(self) -> bool:
        """F32, F16 and BF16: values without blocks."""
        return self.block_size == 1

    def row_bytes(self, row_size: int) -> int:
        """Bytes of a row of values. ValueError where the row is no multiple of the block.

        >>> formats["Q4_K"].row_bytes(4096)
        2304
        """
        if row_size % self.block_size:
            advice = f'; "{self.fallback}" takes it' if self.fallback and row_size % 32 == 0 else ""
            raise ValueError(
                f"{self.name}: row: expected a multiple of the block of {self.block_size} values, got {row_size}; pad "
                f"the last axis, or choose another format{advice}."
            )
        return row_size // self.block_size * self.type_size

    def row_size(self, row_bytes: int) -> int:
        """Values in a row of bytes. ValueError where the bytes are no whole blocks.

        >>> formats["Q8_0"].row_size(34)
        32
        """
        if row_bytes % self.type_size:
            raise ValueError(
                f"{self.name}: data: expected whole blocks of {self.type_size} bytes along the last axis, got "
                f"{row_bytes} bytes; check the format."
            )
        return row_bytes // self.type_size * self.block_size


_TABLE = [
    BlockFormat("F32", 0, 1, 4),
    BlockFormat("F16", 1, 1, 2),
    BlockFormat("BF16", 30, 1, 2),
    BlockFormat("Q1_0", 41, 128, 18),
    BlockFormat("Q2_0", 42, 64, 18, fallback="Q4_0"),
    BlockFormat("Q4_0", 2, 32, 18),
    BlockFormat("Q4_1", 3, 32, 20),
    BlockFormat("Q5_0", 6, 32, 22),
    BlockFormat("Q5_1", 7, 32, 24),
    BlockFormat("Q8_0", 8, 32, 34),
    BlockFormat("Q8_1", 9, 32, 36, activation=True),
    BlockFormat("Q2_K", 10, 256, 84, fallback="Q4_0"),
    BlockFormat("Q3_K", 11, 256, 110, fallback="Q4_0"),
    BlockFormat("Q4_K", 12, 256, 144, fallback="Q5_0"),
    BlockFormat("Q5_K", 13, 256, 176, fallback="Q5_1"),
    BlockFormat("Q6_K", 14, 256, 210, fallback="Q8_0"),
    BlockFormat("Q8_K", 15, 256, 292, fallback="Q8_0", activation=True),
    BlockFormat("IQ2_XXS", 16, 256, 66, requires_imatrix=True, fallback="IQ4_NL"),
    BlockFormat("IQ2_XS", 17, 256, 74, requires_imatrix=True, fallback="IQ4_NL"),
    BlockFormat("IQ2_S", 22, 256, 82, fallback="IQ4_NL"),
    BlockFormat("IQ3_XXS", 18, 256, 98, fallback="IQ4_NL"),
    BlockFormat("IQ3_S", 21, 256, 110, fallback="IQ4_NL"),
    BlockFormat("IQ1_S", 19, 256, 50, requires_imatrix=True, fallback="IQ4_NL"),
    BlockFormat("IQ1_M", 29, 256, 56, fallback="IQ4_NL"),
    BlockFormat("IQ4_NL", 20, 32, 18),
    BlockFormat("IQ4_XS", 23, 256, 136, fallback="IQ4_NL"),
    BlockFormat("TQ1_0", 34, 256, 54, fallback="Q4_0"),
    BlockFormat("TQ2_0", 35, 256, 66, fallback="Q4_0"),
    BlockFormat("MXFP4", 39, 32, 17),
    BlockFormat("NVFP4", 40, 64, 36),
]

formats: Mapping[str, BlockFormat] = MappingProxyType({f.name: f for f in _TABLE})
by_type_id: Mapping[int, BlockFormat] = MappingProxyType({f.type_id: f for f in _TABLE})

# Type ids that files have used and ggml has taken out again, and what to do about them.
REMOVED = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}  # fmt: skip


def find(operation: str, format: str | BlockFormat) -> BlockFormat:
    """The format of a name, in any case, or a ValueError that lists the names."""
    found = formats.get(format.name if isinstance(format, BlockFormat) else str(format).upper())
    if found is None or (isinstance(format, BlockFormat) and format != found):
        raise ValueError(
            f"{operation}: format: expected one of {', '.join(formats)}, got {format!r}; see jaxquant.ggml.formats."
        )
    return found
