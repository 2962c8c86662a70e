"""The prepared layout in jax.numpy: bytes of the blocks of eight rows, permuted (ffi/ggml/linear/layout.h)."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxquant._core import ffi
from jaxquant.ggml.formats import formats

# Rows of a prepared matrix that lie interleaved: no shard may cut them.
PREPARED_ROWS = 8


@functools.cache
def _places(format: str) -> np.ndarray | None:
    """Byte i of eight prepared blocks is byte places[i] of the plain ones; None: the layouts are the same."""
    module = ffi.module("cpu")
    assert module is not None
    places = np.asarray(module.ggml_arrangement(formats[format].type_id), np.int32)
    return None if (places == np.arange(places.size)).all() else places


def arrange(data: Any, format: str, prepare: bool) -> Any:
    """data [..., n, row_bytes] from one layout to the other."""
    places, size = _places(format), formats[format].type_size
    *lead, n, row_bytes = data.shape
    eights, blocks = n // PREPARED_ROWS, row_bytes // size
    if places is None or not eights or not blocks:
        return data
    whole = data[..., : eights * PREPARED_ROWS, :]
    if prepare:
        tiles = whole.reshape(*lead, eights, PREPARED_ROWS, blocks, size).swapaxes(-2, -3)
        moved = tiles.reshape(*lead, eights, blocks, PREPARED_ROWS * size)[..., places]
    else:
        tiles = whole.reshape(*lead, eights, blocks, PREPARED_ROWS * size)[..., np.argsort(places)]
        moved = tiles.reshape(*lead, eights, blocks, PREPARED_ROWS, size).swapaxes(-2, -3)
    moved = moved.reshape(*lead, eights * PREPARED_ROWS, row_bytes)
    return jnp.concatenate([moved, data[..., eights * PREPARED_ROWS :, :]], axis=-2)
