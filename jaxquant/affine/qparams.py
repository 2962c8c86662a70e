"""Scale, zero point and code range as one value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QParams:
    """Everything that says how a tensor is quantised, accepted wherever a function takes ``scale``.

    A pytree: ``scale`` and ``zero_point`` are its leaves, so that it can be trained, mapped, sharded and checkpointed;
    the rest is static.

    Args:
      scale: scalar, ``[C]`` (with the function's ``axis``) or an array of x's rank.
      zero_point: None, an integer or a float (learned) array that broadcasts to the scale's shape.
      qtype: the code type.
      qmin, qmax: the code range; None means the code type's own limit.
      block_shape: block sizes for block-wise scales, else None.

    >>> p = QParams(jnp.float32(0.1), qtype=jnp.int4)
    >>> fake_quantize(jnp.array([0.26, 9.0]), p)
    Array([0.3, 0.7], dtype=float32)
    """

    scale: Any
    zero_point: Any = None
    qtype: Any = field(default=jnp.int8, metadata={"static": True})
    qmin: int | None = field(default=None, metadata={"static": True})
    qmax: int | None = field(default=None, metadata={"static": True})
    block_shape: tuple[int, ...] | None = field(default=None, metadata={"static": True})

    def __post_init__(self) -> None:
        if self.block_shape is not None and not isinstance(self.block_shape, tuple):
            object.__setattr__(self, "block_shape", tuple(self.block_shape))
