"""Block-quantised tensors: quantize(), QTensor and validate()."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxquant._core import ffi
from jaxquant._core.errors import refuse
from jaxquant._core.primitive import bind
from jaxquant.ggml import codec
from jaxquant.ggml.formats import BlockFormat, find
from jaxquant.ggml.layout import Layout, has_prepared_form, prepared_layout

LAYOUTS = ("plain", "prepared")


@jax.tree_util.register_pytree_with_keys_class
class QTensor:
    """Rows of blocks, and what they mean.

    A pytree with one leaf, ``data``: uint8 of shape ``[..., row_bytes]``, or ``[..., ceil(n / 8), 8 * row_bytes]`` in
    the layout "prepared". The format and the layout are static, and the leading axes are data's own, so ``vmap``,
    ``scan``, tree maps, shardings and checkpoints treat it like any array.

    Attributes:
      data: the bytes.
      format: a `BlockFormat`.
      layout: "plain", the bytes of GGUF files, or "prepared", the order that products prefer (see `prepare`).
      padding: rows of zeros that fill up the last eight of a prepared matrix, 0 to 7.

    Prepared data whose last eight is not full is made a tensor with its row count: ``QTensor(data, format, "prepared",
    rows)``.
    """

    def __init__(self, data: Any, format: str | BlockFormat, layout: str = "plain", rows: int | None = None):
        self.data = data
        self.format = find("QTensor", format)
        if layout not in LAYOUTS:
            raise refuse("QTensor", "layout", " or ".join(map(repr, LAYOUTS)), repr(layout), "see QTensor.prepare")
        prepared = layout == "prepared"
        if prepared and not has_prepared_form(self.format.name):
            remedy = f"{self.format.name} has no other layout"
            raise refuse("QTensor", "layout", "'plain'", repr(layout), remedy)
        if rows is not None and (not prepared or data.ndim < 2 or rows < 0):
            expected = "None in the plain layout, or a prepared matrix's row count"
            raise refuse("QTensor", "rows", expected, str(rows), "see QTensor.prepare")
        self._layout = Layout(prepared) if rows is None else prepared_layout(rows)
        if rows is not None and rows != self._layout.rows(data):
            raise refuse("QTensor", "rows", f"{self._layout.rows(data)} as in data", str(rows), "see QTensor.prepare")
        if getattr(data, "dtype", np.uint8) != np.uint8:
            remedy = "see jaxquant.ggml.quantize, or view the bytes as uint8"
            raise refuse("QTensor", "data", "uint8", str(data.dtype), remedy, TypeError)

    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.GetAttrKey("data"), self.data)], (self.format, self._layout)

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> QTensor:
        # Leaves may be anything: transformations put specs, axes and shardings there.
        self = object.__new__(cls)
        self.format, self._layout = static
        (self.data,) = children
        return self

    @property
    def layout(self) -> str:
        return LAYOUTS[self._layout.prepared]

    @property
    def padding(self) -> int:
        return self._layout.padding(self.data) if self.ndim > 1 else 0

    @classmethod
    def from_bytes(cls, data: Any, format: str | BlockFormat, shape: tuple[int, ...]) -> QTensor:
        """The tensor of a shape (of values, row-major) from its bytes: ``bytes`` or uint8 of any shape.

        Raises:
          ValueError: another number of bytes than the shape needs, or rows that are no whole blocks.

        >>> ggml.QTensor.from_bytes(bytes(34), "Q8_0", (1, 32)).dequantize().sum()
        Array(0., dtype=float32)
        """
        kind, shape = find("QTensor.from_bytes", format), tuple(map(int, shape))
        if not shape:
            raise refuse("QTensor.from_bytes", "shape", "at least one axis", "()", "give the shape of the values")
        byte_shape = (*shape[:-1], kind.row_bytes(shape[-1]))
        data = np.frombuffer(data, np.uint8) if isinstance(data, (bytes, bytearray, memoryview)) else data
        if getattr(data, "dtype", None) != np.uint8:
            got = str(data.dtype) if hasattr(data, "dtype") else type(data).__name__
            raise refuse("QTensor.from_bytes", "data", "bytes or uint8", got, "view it as uint8", TypeError)
        wanted = math.prod(byte_shape)
        if data.size != wanted or min(shape) < 0:
            expected = f"{wanted} bytes for {kind.name} of shape {shape}"
            raise refuse("QTensor.from_bytes", "data", expected, str(data.size), "check shape and format")
        return cls(jnp.asarray(data.reshape(byte_shape)), kind)

    @classmethod
    def zeros(cls, shape: tuple[int, ...], format: str | BlockFormat) -> QTensor:
        """A tensor whose bytes are all zero; its values are zeros (of either sign).

        >>> ggml.QTensor.zeros((2, 256), "Q4_K").nbytes
        288
        """
        kind, shape = find("QTensor.zeros", format), tuple(shape)
        if not shape:
            raise refuse("QTensor.zeros", "shape", "at least one axis", "()", "give the shape of the values")
        return cls(jnp.zeros((*shape[:-1], kind.row_bytes(shape[-1])), jnp.uint8), kind)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values."""
        layout, shape = self._layout, self.data.shape
        rows = (layout.rows(self.data),) if len(shape) > 1 else ()
        return (*shape[:-2], *rows, layout.columns(self.data, self.format.name))

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def size(self) -> int:
        """Values."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def block_size(self) -> int:
        return self.format.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return int(np.prod(self.data.shape, dtype=np.int64))

    def __repr__(self) -> str:
        layout = "" if self.layout == "plain" else f", {self.layout}"
        shape = self.shape if hasattr(self.data, "shape") else self.data
        return f"QTensor({self.format.name}, {shape}{layout})"

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> QTensor:
        """Along leading axes; the rows themselves stay whole (dequantise to index values).

        >>> ggml.QTensor.zeros((3, 4, 32), "Q8_0")[1, :2].shape
        (2, 32)
        """
        indices = index if isinstance(index, tuple) else (index,)
        whole = self.ndim - (1 if self.layout == "plain" else 2)
        used = 0
        for i in indices:
            if i is Ellipsis:
                raise refuse("QTensor", "index", "leading axes only", "...", "write the leading indices out")
            size = self.data.shape[used] if used < whole else None
            if isinstance(i, (int, np.integer)) and isinstance(size, int) and not -size <= i < size:
                # An array of JAX would take the last one instead, and a loop over the rows would never end.
                raise IndexError(f"QTensor: index {i} is out of range for axis {used} of shape {self.shape}")
            boolean = isinstance(i, (np.ndarray, jax.Array)) and i.dtype.kind == "b"
            used += np.ndim(i) if boolean else 0 if i is None else 1
        if used > whole:
            remedy = "dequantise to reach into rows" if self.layout == "plain" else "use .plain() to reach single rows"
            raise refuse("QTensor", "index", f"at most {whole} axes of {self.shape}", str(used), remedy)
        return self.tree_unflatten((self.format, self._layout), [self.data[index]])

    def dequantize(self, dtype: Any = jnp.float32, *, implementation: str | None = None) -> jax.Array:
        """The values, in float32 (ggml's, bit for bit), or rounded from that to float16 or bfloat16. No gradient.

        >>> ggml.quantize(jnp.ones((1, 32)), "Q4_0").dequantize().mean()
        Array(1., dtype=float32)
        """
        dtype = _check_dtype("dequantize", dtype)
        implementation = ffi.check_implementation("dequantize", implementation)
        return codec.dequantize(
            self.data, format=self.format.name, layout=self._layout, dtype=dtype, implementation=implementation
        )

    def take(self, ids: Any, dtype: Any = jnp.float32, *, implementation: str | None = None) -> jax.Array:
        """Values of the rows ``ids`` (an integer array) of a matrix ``[n, k]``, as for embeddings: ``[*ids.shape, k]``.

        An id outside [0, n) gives a row of zeros. In either layout only the rows that are asked for are looked at.

        >>> ggml.quantize(jnp.eye(2, 32), "Q8_0").take(jnp.array([1, 5]))[:, :2].round(2)
        Array([[0., 1.],
               [0., 0.]], dtype=float32)
        """
        dtype, ids = _check_dtype("take", dtype), jnp.asarray(ids)
        if self.ndim != 2:
            raise refuse("take", "tensor", "a matrix [n, k]", str(self.shape), "use jax.vmap for stacked ones")
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise refuse("take", "ids", "integers", ids.dtype.name, "convert them", TypeError)
        ids = ids.astype(jnp.int32) if ids.dtype.itemsize < 4 else ids
        ids = jnp.where((ids >= 0) & (ids < self.shape[0]), ids, -1)
        implementation = ffi.check_implementation("take", implementation)
        rows = codec.take(
            self.data, ids.reshape(-1).astype(jnp.int32), format=self.format.name, layout=self._layout,
            dtype=dtype, implementation=implementation,
        )  # fmt: skip
        return rows.reshape(*ids.shape, self.shape[1])

    def to_bytes(self) -> bytes:
        """The bytes as GGUF files hold them, whatever the layout."""
        return np.asarray(self.plain().data).tobytes()

    def prepare(self) -> QTensor:
        """The same tensor in the order of bytes that products prefer; every operation takes both, with equal results.

        Worth it for weights that are multiplied more than once. Rows lie together by eights, those missing in the last
        one filled up with zeros (`padding`): data is ``[..., ceil(n / 8), 8 * row_bytes]``. Leading axes are indexed
        and sharded as before, rows in eights (in ``shard_map`` where their count is a multiple of eight), the last axis
        in whole blocks. Formats whose decoding would gain nothing stay plain.

        >>> ggml.QTensor.zeros((8, 256), "Q4_K").prepare().layout
        'prepared'
        """
        if self.layout == "prepared":
            return self
        if self.ndim < 2:
            raise refuse("prepare", "tensor", "a matrix, or several", f"shape {self.shape}", "it has one row")
        if not has_prepared_form(self.format.name):
            return self
        data = codec.prepare(self.data, self.format.name, ffi.DEFAULT_IMPLEMENTATION)
        return QTensor(data, self.format, "prepared", self.shape[-2])

    def plain(self) -> QTensor:
        """The same tensor in the order of bytes of GGUF files."""
        if self.layout == "plain":
            return self
        data = codec.plain(self.data, self.format.name, self._layout, ffi.DEFAULT_IMPLEMENTATION)
        return QTensor(data, self.format)


def _serialized(static: tuple[BlockFormat, Layout]) -> bytes:
    format, layout = static
    return f"{format.name} {LAYOUTS[layout.prepared]} {layout.ragged_rows}".encode()


def _deserialized(static: bytes) -> tuple[BlockFormat, Layout]:
    name, layout, ragged_rows = static.decode().split()
    return find("QTensor", name), Layout(layout == "prepared", int(ragged_rows))


# Exported functions may take and return tensors.
jax.export.register_pytree_node_serialization(
    QTensor,
    serialized_name="jaxquant.ggml.QTensor",
    serialize_auxdata=_serialized,
    deserialize_auxdata=_deserialized,
)


def _check_dtype(name: str, dtype: Any) -> Any:
    dtype = jnp.dtype(dtype)
    if dtype.name not in codec.FLOATS:
        raise refuse(name, "dtype", f"one of {', '.join(codec.FLOATS)}", dtype.name, "convert the result", TypeError)
    return dtype


def quantize(x: Any, format: str | BlockFormat, *, imatrix: Any = None, implementation: str | None = None) -> QTensor:
    """x in a GGML format: the bytes that ggml's own quantiser writes.

    Args:
      x: ``[..., k]``, float32, or float16 or bfloat16 (converted exactly); k a multiple of the format's block. The last
        axis is the row that blocks divide; leading axes are free.
      format: a name, as in `formats`.
      imatrix: importance of the columns for the error that is minimised, non-negative: ``[k]`` for all rows, or
        ``[E, k]`` for x of shape ``[E, ..., k]``. `formats` says which formats need one; some ignore it.
      implementation: None, "ffi" or "xla". Where a platform has no kernel the host quantises.

    Returns:
      A `QTensor` of x's shape. No gradient: derivatives end here, as at a cast to integers.

    Raises:
      ValueError: a row that is no multiple of the block (the message suggests a format that takes it), a missing
        imatrix, or one with negative, non-finite or only zero values. Non-finite x, and an imatrix under jit, are
        refused when the kernel runs.
      TypeError: another dtype.

    Finite values beyond the range of a format's half-precision scale give non-finite scales, as in ggml; `validate`
    finds them.

    >>> ggml.quantize(jnp.ones((2, 256)), "Q4_K")
    QTensor(Q4_K, (2, 256))
    """
    name = "quantize"
    kind, x = find(name, format), jnp.asarray(x)
    if x.dtype.name not in (*codec.FLOATS, "float64"):
        raise refuse(name, "x", f"one of {', '.join(codec.FLOATS)}", x.dtype.name, "convert it", TypeError)
    if x.ndim == 0:
        raise refuse(name, "x", "at least one axis", "a scalar", "give rows of values")
    if x.shape[-1] % kind.block_size:
        fallback = f', or "{kind.fallback}"' if kind.fallback and x.shape[-1] % 32 == 0 else ', or "F16"'
        raise refuse(
            name, "x", f"a multiple of {kind.name}'s block of {kind.block_size} along axis {x.ndim - 1}",
            f"shape {x.shape}", f"pad that axis{fallback}",
        )  # fmt: skip
    weights = _check_imatrix(name, imatrix, x.shape, kind)
    data = bind(
        codec.ggml_quantize_p, x.astype(jnp.float32), weights, format=kind.name,
        implementation=ffi.check_implementation(name, implementation),
    )  # fmt: skip
    return QTensor(data, kind)


def _check_imatrix(name: str, imatrix: Any, shape: tuple[int, ...], kind: BlockFormat) -> jax.Array:
    if imatrix is None:
        if kind.requires_imatrix:
            raise refuse(
                name, "imatrix", f"importances of the columns, which {kind.name} needs", "None",
                "load one with load_imatrix, or pass the mean squares of the columns",
            )  # fmt: skip
        return jnp.zeros((0,), jnp.float32)
    weights = jnp.asarray(imatrix)
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        raise refuse(name, "imatrix", "floating point", weights.dtype.name, "convert it", TypeError)
    k = shape[-1]
    per_expert = weights.ndim == 2 and len(shape) >= 3 and weights.shape[0] in (1, shape[0])
    if weights.shape != (k,) and not (per_expert and weights.shape[1] == k):
        raise refuse(
            name, "imatrix", f"shape ({k},)" + (f" or ({shape[0]}, {k})" if len(shape) >= 3 else ""),
            str(weights.shape), "one importance for each column",
        )  # fmt: skip
    if not isinstance(imatrix, Tracer):  # under jit too, where weights is one
        known = np.asarray(imatrix, np.float32).reshape(-1, k)
        for wrong, what in (
            (~np.isfinite(known).all(), "a non-finite value"),
            ((known < 0).any(), "a negative value"),
            (k > 0 and known.size and ~(known != 0).any(axis=1).all(), "zeros only"),
        ):
            if wrong:
                raise refuse(
                    name, "imatrix", "finite importances, none negative and not all zero", what,
                    "use ones where nothing is known",
                )  # fmt: skip
    lead = weights.shape[:-1] + (1,) * (len(shape) - weights.ndim)
    return weights.astype(jnp.float32).reshape(*lead, k)
