"""The shapes that scales and zero points come in, with operands for each: shared by the tests of every operation.

Shapes are small, odd and of distinct sizes, so that a confusion of axes cannot hide and no loop is a whole number of
vectors. `Granularity.operands` makes data that fills the code range, clips at both ends, and holds exact ties.
"""

import dataclasses
import math
import zlib

import numpy as np
import oracle


@dataclasses.dataclass(frozen=True)
class Operands:
    """NumPy operands of one call, and the gradient of its result."""

    x: np.ndarray
    scale: np.ndarray
    zero_point: np.ndarray
    dy: np.ndarray


@dataclasses.dataclass(frozen=True)
class Granularity:
    """One way to share scales: shapes of the operands and the keywords that go with them."""

    name: str
    x_shape: tuple
    scale_shape: tuple
    axis: int | None = None
    block_shape: tuple | None = None
    zero_point_shape: tuple | None = None  # None: the scale's

    def __repr__(self):
        return self.name

    @property
    def keywords(self):
        return {"axis": self.axis, "block_shape": self.block_shape}

    def operands(self, dtype="float32", qtype="int8", *, qmin=None, qmax=None, zero_point_dtype=np.int32):
        """The same values at every call: they depend on the names alone."""
        rng = np.random.default_rng(zlib.crc32(f"{self.name} {dtype} {qtype}".encode()))
        low, high = oracle.code_range(qtype, qmin, qmax)
        real = oracle.arithmetic_type(oracle.DTYPES[dtype])
        # A scale of few mantissa bits makes exact ties of x / scale possible in every dtype.
        scale = (rng.integers(3, 24, self.scale_shape) / 128).astype(real)
        zero_shape = self.scale_shape if self.zero_point_shape is None else self.zero_point_shape
        # Near the middle of the range, so that both ends clip.
        middle, width = (low + high) // 2, (high - low) // 4
        zero_point = rng.integers(middle - width, middle + width + 1, zero_shape)
        v = rng.uniform(low - 0.3 * (high - low) - 1, high + 0.3 * (high - low) + 1, self.x_shape)
        ties = rng.random(self.x_shape) < 0.2
        v = np.where(ties, np.floor(v) + 0.5, v)
        grid_scale = oracle.to_grid(scale, self.scale_shape, self.x_shape, self.axis)
        grid_zero = oracle.to_grid(zero_point, self.scale_shape, self.x_shape, self.axis)
        t = v - oracle.spread(grid_zero, self.x_shape)
        x = (t * oracle.spread(grid_scale, self.x_shape)).astype(oracle.DTYPES[dtype])
        dy = rng.normal(size=self.x_shape).astype(oracle.DTYPES[dtype])
        return Operands(x, scale, zero_point.astype(zero_point_dtype), dy)

    @property
    def shared_by(self):
        """How many elements of x share one scale."""
        return math.prod(self.x_shape) // max(math.prod(self.scale_shape), 1)


PER_TENSOR = Granularity("per_tensor", (5, 77), ())
PER_CHANNEL_FIRST = Granularity("per_channel_first", (7, 45), (7,), axis=0)
PER_CHANNEL_LAST = Granularity("per_channel_last", (45, 7), (7,), axis=-1)
PER_CHANNEL_MIDDLE = Granularity("per_channel_middle", (4, 3, 5, 6), (3,), axis=1)
PER_TOKEN = Granularity("per_token", (6, 5, 19), (6, 5, 1))
PER_GROUP = Granularity("per_group", (6, 96), (6, 3), block_shape=(1, 32))
BLOCKS = Granularity("blocks_2d", (6, 35), (2, 5), block_shape=(3, 7))
EMPTY = Granularity("empty", (0, 4), (4,), axis=1)
ZERO_D = Granularity("zero_d", (), ())

# One granularity of each kind the kernels tell apart, for tests that are too slow to run them all.
FEW = (PER_TENSOR, PER_CHANNEL_FIRST, PER_CHANNEL_LAST, PER_TOKEN, PER_GROUP)

ALL = (
    *FEW,
    PER_CHANNEL_MIDDLE,
    BLOCKS,
    EMPTY,
    ZERO_D,
    Granularity("one_element", (1,), ()),
    Granularity("line", (67,), ()),
    Granularity("line_per_element", (67,), (67,), axis=0),
    Granularity("negative_axis", (3, 5, 11), (5,), axis=-2),
    Granularity("mixed_axes", (4, 3, 9), (4, 1, 9)),
    Granularity("middle_by_shape", (4, 3, 9), (1, 3, 1)),
    Granularity("per_element", (5, 13), (5, 13)),
    Granularity("rank_5", (2, 3, 2, 5, 3), (1, 3, 1, 5, 1)),
    Granularity("ones_in_shape", (1, 6, 1, 8), (1, 6, 1, 1)),
    Granularity("blocks_whole_axis", (6, 4, 10), (6, 1, 5), block_shape=(1, -1, 2)),
    Granularity("blocks_first_axis", (12, 5), (4, 5), block_shape=(3, 1)),
    Granularity("blocks_rank_3", (4, 6, 10), (2, 3, 2), block_shape=(2, 2, 5)),
    Granularity("one_group", (6, 19), (6, 1), block_shape=(1, 19)),
    Granularity("empty_inner", (3, 0), (3,), axis=0),
    Granularity("empty_channels", (3, 0), (0,), axis=1),
    Granularity("empty_per_tensor", (0,), ()),
    Granularity("scalar_zero_point", (7, 45), (7,), axis=0, zero_point_shape=()),
    Granularity("one_zero_point", (7, 45), (7,), axis=0, zero_point_shape=(1,)),
    Granularity("zero_point_per_row", (6, 9), (6, 9), zero_point_shape=(6, 1)),
    Granularity("zero_point_per_column", (6, 96), (6, 3), block_shape=(1, 32), zero_point_shape=(3,)),
    # Chunks of 256 terms and more than one level of the sums.
    Granularity("sum_of_256", (3, 256), (3,), axis=0),
    Granularity("sum_of_257", (257, 3), (3,), axis=1),
    Granularity("sum_of_two_levels", (3, 401, 5), (1, 1, 1)),
    Granularity("sum_of_three_levels", (67, 1001), ()),
    Granularity("sum_of_long_columns", (1030, 5), (1, 5)),
)
