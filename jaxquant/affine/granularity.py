"""Which elements of an array share a scale.

Every granularity is a block shape: the sizes, axis by axis, of the boxes that share one scale. The scale has the
array's rank and counts the boxes along each axis.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from jaxquant._core.errors import refuse


@dataclass(frozen=True)
class PerTensor:
    """One scale for the whole array.

    >>> PerTensor().block_shape((4, 6))
    (4, 6)
    """

    def block_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(shape)


@dataclass(frozen=True)
class PerAxis:
    """A scale for each index of the axes: per channel, ``PerAxis(1)`` or ``PerAxis((0, 1))``. Negative axes count from
    the end.

    >>> PerAxis(-1).block_shape((4, 6))
    (4, 1)
    """

    axes: int | tuple[int, ...]

    def __post_init__(self) -> None:
        axes = self.axes if isinstance(self.axes, (tuple, list)) else (self.axes,)
        object.__setattr__(self, "axes", tuple(operator.index(axis) for axis in axes))

    def block_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        assert isinstance(self.axes, tuple)
        own = {_axis("PerAxis", "axes", axis, shape) for axis in self.axes}
        return tuple(1 if d in own else n for d, n in enumerate(shape))


@dataclass(frozen=True)
class PerToken:
    """A scale for each row along the last axis.

    >>> PerToken().block_shape((2, 4, 6))
    (1, 1, 6)
    """

    def block_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*(1 for _ in shape[:-1]), *shape[-1:])


@dataclass(frozen=True)
class PerGroup:
    """A scale for each ``size`` consecutive elements along ``axis``, for each index of the other axes.

    >>> PerGroup(128, axis=0).block_shape((256, 6))
    (128, 1)
    """

    size: int
    axis: int = -1

    def block_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        d = _axis("PerGroup", "axis", self.axis, shape)
        _check_divides("PerGroup", "size", self.size, shape, d)
        return tuple(self.size if i == d else 1 for i in range(len(shape)))


@dataclass(frozen=True)
class PerBlock:
    """A scale for each box of ``shape``, one size per axis, -1 for a whole axis.

    >>> PerBlock((2, -1)).block_shape((4, 6))
    (2, 6)
    """

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(operator.index(size) for size in self.shape))

    def block_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(self.shape) != len(shape):
            expected = f"one size per axis of an array of shape {tuple(shape)}"
            raise refuse("PerBlock", "shape", expected, str(self.shape), "use -1 for a whole axis")
        for d, size in enumerate(self.shape):
            if size != -1:
                _check_divides("PerBlock", "shape", size, shape, d)
        return tuple(n if size == -1 else size for size, n in zip(self.shape, shape, strict=True))


Granularity = PerTensor | PerAxis | PerToken | PerGroup | PerBlock


def resolve(operation: str, granularity: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The block shape of an array; raises where it is no granularity or does not fit."""
    if not isinstance(granularity, Granularity):
        raise refuse(
            operation, "granularity", "PerTensor(), PerAxis(axes), PerToken(), PerGroup(size) or PerBlock(shape)",
            repr(granularity), "construct one of them", TypeError,
        )  # fmt: skip
    return granularity.block_shape(tuple(shape))


def scale_shape(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    """How many blocks there are along each axis. A whole axis is one block, an empty one too."""
    return tuple(1 if b == n else n // b for n, b in zip(shape, block, strict=True))


def _axis(granularity: str, name: str, axis: int, shape: tuple[int, ...]) -> int:
    if not -len(shape) <= axis < len(shape):
        expected = f"an axis of an array of shape {tuple(shape)}"
        raise refuse(granularity, name, expected, str(axis), "choose one of its axes")
    return axis % len(shape)


def _check_divides(granularity: str, name: str, size: int, shape: tuple[int, ...], d: int) -> None:
    if size < 1 or shape[d] % size:
        expected = f"a divisor of {shape[d]} on axis {d} of an array of shape {tuple(shape)}"
        raise refuse(granularity, name, expected, str(size), "pad the array or choose a size that divides it")
