"""Where the rows of a tensor lie in its data, and the prepared layout in jax.numpy (ffi/ggml/linear/layout.h).

Plain data is [..., n, row_bytes]. In prepared data [..., ceil(n / 8), 8 * row_bytes] eight rows are one: their blocks
at one place of the row lie together, bytes interleaved, so that whole blocks along k are whole pieces of the last axis
in either layout. Rows of zero bytes fill up the last eight.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxquant._core import ffi
from jaxquant._core.errors import refuse
from jaxquant.ggml.formats import formats

EIGHT = 8


class Layout(NamedTuple):
    """ragged_rows: how many rows prepared data has where they do not fill their last eight, else 0.

    The count itself and not what is missing: a shard that ``shard_map`` cut from such data is then told from a whole.
    """

    prepared: bool = False
    ragged_rows: int = 0

    @property
    def together(self) -> int:
        """Rows that lie together, and that no shard may cut."""
        return EIGHT if self.prepared else 1

    def rows(self, data: Any) -> int:
        if not self.ragged_rows:
            return data.shape[-2] * self.together
        eights = -(-self.ragged_rows // EIGHT)
        if data.shape[-2] != eights:
            raise refuse(
                "QTensor", "data", f"{eights} eights of rows for {self.ragged_rows} rows", str(data.shape[-2]),
                "a shard of prepared rows has whole eights: shard the plain tensor, or another axis",
            )  # fmt: skip
        return self.ragged_rows

    def padding(self, data: Any) -> int:
        """Rows of zeros that fill up the last eight."""
        return data.shape[-2] * self.together - self.rows(data)

    def columns(self, data: Any, format: str) -> int:
        return formats[format].row_size(data.shape[-1] // self.together)

    def units(self, data: Any, format: str) -> dict[str, Any]:
        """Into how many parts rows and columns may be cut: a shard has whole blocks and whole eights."""
        size = formats[format].type_size * self.together
        return {"k": data.shape[-1] // size, "n": 1 if self.ragged_rows else data.shape[-2]}


def prepared_layout(n: int) -> Layout:
    """Of n rows."""
    return Layout(True, n if n % EIGHT else 0)


@functools.cache
def _places(format: str) -> np.ndarray | None:
    """Byte i of eight prepared blocks is byte places[i] of the plain ones; None: there is no prepared form."""
    module = ffi.module("cpu")
    assert module is not None
    places = np.asarray(module.ggml_arrangement(formats[format].type_id), np.int32)
    return places if places.size else None


def has_prepared_form(format: str) -> bool:
    """Whether a format's decoding gains from it; the others stay plain."""
    return _places(format) is not None


def prepare(data: Any, format: str) -> Any:
    """Plain data to prepared data."""
    places, size = _places(format), formats[format].type_size
    assert places is not None
    *lead, n, row_bytes = data.shape
    eights, blocks = -(-n // EIGHT), row_bytes // size
    whole = jnp.pad(data, [(0, 0)] * len(lead) + [(0, eights * EIGHT - n), (0, 0)])
    tiles = whole.reshape(*lead, eights, EIGHT, blocks, size).swapaxes(-2, -3)
    return tiles.reshape(*lead, eights, blocks, EIGHT * size)[..., places].reshape(*lead, eights, EIGHT * row_bytes)


def plain(data: Any, format: str, layout: Layout) -> Any:
    """Data of either layout to plain data."""
    if not layout.prepared:
        return data
    places, size = _places(format), formats[format].type_size
    assert places is not None
    *lead, eights, all_bytes = data.shape
    blocks = all_bytes // (EIGHT * size)
    tiles = data.reshape(*lead, eights, blocks, EIGHT * size)[..., np.argsort(places)]
    rows = tiles.reshape(*lead, eights, blocks, EIGHT, size).swapaxes(-2, -3)
    rows = rows.reshape(*lead, eights * EIGHT, all_bytes // EIGHT)
    return rows[..., : layout.rows(data), :]


def plain_rows(data: Any, ids: Any, format: str) -> Any:
    """Rows of prepared data [eights, bytes] by number, in plain form; nothing but their eights is looked at."""
    places, size = _places(format), formats[format].type_size
    assert places is not None
    found = jnp.take(data, ids // EIGHT, axis=0, mode="clip")
    found = found.reshape(*ids.shape, data.shape[-1] // (EIGHT * size), EIGHT * size)
    of_row = jnp.asarray(np.argsort(places).reshape(EIGHT, size))[ids % EIGHT]
    rows = jnp.take_along_axis(found, of_row[..., None, :], axis=-1, mode="clip")
    return rows.reshape(*ids.shape, data.shape[-1] // EIGHT)
