"""GGUF files: tensors loaded when they are asked for, and files written all or not at all."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxquant._core.errors import refuse
from jaxquant._core.files import replacement
from jaxquant.ggml import gguf_header
from jaxquant.ggml.formats import REMOVED, BlockFormat, find
from jaxquant.ggml.gguf_header import Metadata, TensorInfo

_FLOATS = {"F32": "<f4", "F16": "<f2", "BF16": "bfloat16"}
_TYPE_OF_DTYPE = {"float32": 0, "float16": 1, "bfloat16": 30}
_TYPE_OF_DTYPE |= {np.dtype(code).name: type_id for type_id, (_, code) in gguf_header.PLAIN.items()}


class GGUFTensor:
    """A tensor in a file, not yet read: what it is, and ways to get it.

    name, shape (NumPy's order, the fastest last), type_name, format (None for I8, I16, I32, I64 and F64), nbytes.
    """

    __slots__ = ("_data", "_info", "_operation", "_path")

    def __init__(self, operation: str, path: str, info: TensorInfo, data: np.ndarray):
        self._operation, self._path, self._info, self._data = operation, path, info, data

    name = property(lambda self: self._info.name)
    shape = property(lambda self: self._info.shape)
    type_id = property(lambda self: self._info.type_id)
    type_name = property(lambda self: self._info.type_name)

    @property
    def format(self) -> BlockFormat | None:
        return self._info.format

    @property
    def nbytes(self) -> int:
        """Bytes in the file. ValueError where the type is unknown."""
        if self._info.nbytes is None:
            removed = REMOVED.get(self.type_id)
            got = f"{removed} (id {self.type_id}), which ggml has removed" if removed else f"id {self.type_id}"
            raise self._refuse(
                "a type of jaxquant.ggml.formats, I8 to I64, or F64", got,
                "quantise the model again with a current release; the other tensors load",
            )  # fmt: skip
        return self._info.nbytes

    @property
    def raw(self) -> np.ndarray:
        """The bytes, uint8 [..., row bytes]: a read-only view of the mapped file."""
        return self._data[self._info.start : self._info.start + self.nbytes].reshape(*self.shape[:-1], -1)

    def numpy(self) -> np.ndarray:
        """The values of a tensor that is not quantised: a read-only view of the mapped file."""
        raw = self.raw
        code = _FLOATS.get(self.type_name) or gguf_header.PLAIN.get(self.type_id, (None, None))[1]
        if code is None:
            raise self._refuse(
                "F32, F16, BF16, F64 or an integer type", self.type_name,
                "load() gives a QTensor, raw the bytes",
            )  # fmt: skip
        if code == "bfloat16":
            import ml_dtypes

            code = ml_dtypes.bfloat16
        return raw.view(code).reshape(self.shape)

    def load(self) -> Any:
        """The tensor in JAX's memory: a QTensor if quantised, else an array of its dtype."""
        import jax
        import jax.numpy as jnp

        if self.format is not None and not self.format.is_float:
            from jaxquant.ggml.qtensor import QTensor

            return QTensor.from_bytes(jnp.array(self.raw, copy=True), self.format, self.shape)
        values = self.numpy()
        if jax.dtypes.canonicalize_dtype(values.dtype) != values.dtype:
            raise self._refuse(
                "a type of 32 bits or less", self.type_name,
                "set jax_enable_x64, or take .numpy() and narrow it",
            )  # fmt: skip
        return jnp.array(values, copy=True)

    def _refuse(self, expected: str, got: str, remedy: str) -> Exception:
        return refuse(self._operation, f"{self._path}: tensor {self.name!r}", expected, got, remedy)

    def __repr__(self) -> str:
        return f"GGUFTensor({self.name!r}, {self.shape}, {self.type_name})"


class GGUFFile(Mapping[str, GGUFTensor]):
    """The tensors of a file by name, and its ``metadata``. See `load_gguf`."""

    def __init__(self, path: str, version: int, metadata: Metadata, tensors: dict[str, GGUFTensor], data: Any = b""):
        self.path, self.version, self.metadata, self._tensors, self._map = path, version, metadata, tensors, data

    def __getitem__(self, name: str) -> GGUFTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def load(self) -> dict[str, Any]:
        """Every tensor in JAX's memory."""
        return {name: tensor.load() for name, tensor in self.items()}

    def release(self) -> None:
        """Takes the parts of the file that were read out of this process's memory; what is used again is read again.

        Worth it between tensors that are copied or quantised: a mapped file counts as memory once it is read.
        """
        if hasattr(self._map, "madvise") and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def __repr__(self) -> str:
        return f"GGUFFile({self.path!r}, version {self.version}, {len(self)} tensors)"


def load_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Maps a GGUF file (version 2 or 3) and reads its header; tensors are read when they are used.

    Args:
      path: the file. Replacing it is safe while it is in use, shortening it is not (it is mapped, as llama.cpp does).
    Returns:
      A mapping from name to `GGUFTensor`, in the file's order, with ``.metadata`` (`Metadata`: values and their types).
      An entry's ``.load()`` gives a QTensor, or an array where the tensor is not quantised, in JAX's own memory;
      ``.raw`` the bytes without a copy. ``load()`` of the whole gives a dict of everything.

    Types come from each tensor's description, never from the file's name. A tensor of unknown or removed type raises
    when it is loaded; the others load. Anything else that is wrong in the header is a ValueError.

    >>> ggml.save_gguf("model.gguf", {"w": jnp.ones((2, 32))}, {"general.architecture": "llama"})
    >>> file = ggml.load_gguf("model.gguf")
    >>> file["w"], file.metadata["general.architecture"]
    (GGUFTensor('w', (2, 32), F32), 'llama')
    """
    return open_gguf("load_gguf", path)


def open_gguf(operation: str, path: str | os.PathLike[str]) -> GGUFFile:
    """`load_gguf` in the name of another operation."""
    path = os.fspath(path)
    if os.path.exists(path) and not os.path.isfile(path):
        raise refuse(operation, path, "a file", "something else", "give the path of a GGUF file")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    header = gguf_header.read(operation, path, data, len(data))
    view = np.frombuffer(data, np.uint8)
    tensors = {t.name: GGUFTensor(operation, path, t, view) for t in header.tensors}
    return GGUFFile(path, header.version, header.metadata, tensors, data)


def save_gguf(
    path: str | os.PathLike[str], tensors: Mapping[str, Any], metadata: Mapping[str, Any] | None = None
) -> None:
    """Writes a GGUF file (version 3), or leaves what was there: it is written beside `path`, synced and renamed.

    Args:
      path: the file to write or replace.
      tensors: name to QTensor, JAX or NumPy array (float16, bfloat16, float32, float64, int8 to int64), or entry of
        `load_gguf`; written in this order, one at a time.
      metadata: key to bool, int, float, string, list of these, or 1-D NumPy array. `Metadata` from `load_gguf` keeps
        its types; NumPy values keep theirs; other ints become uint32 (int32 in lists), floats float32, where they fit.
        "general.alignment" is honoured.

    >>> ggml.save_gguf("model.gguf", {"w": jnp.ones((2, 32))}, {"general.architecture": "llama"})
    """
    path = os.path.realpath(path)
    described = {name: _describe(f"{path}: tensor {name!r}", tensor) for name, tensor in tensors.items()}
    header, offsets, size = gguf_header.build(path, {} if metadata is None else metadata, described)
    with replacement(path) as file:
        file.write(header)
        for tensor, offset in zip(tensors.values(), offsets, strict=True):
            file.seek(offset)
            file.write(_bytes(tensor))
        file.truncate(size)


def _describe(what: str, tensor: Any) -> tuple[int, tuple[int, ...]]:
    """Type id and shape. An entry, or what resembles one, has type_id, nbytes and raw; a QTensor to_bytes()."""
    if hasattr(tensor, "type_id"):
        _ = tensor.nbytes  # refuses unknown types
        return tensor.type_id, tuple(tensor.shape)
    if hasattr(tensor, "to_bytes"):
        return find("save_gguf", tensor.format).type_id, tuple(tensor.shape)
    dtype = getattr(tensor, "dtype", None)
    if dtype is None or np.dtype(dtype).name not in _TYPE_OF_DTYPE:
        got = f"dtype {dtype}" if dtype is not None else type(tensor).__name__
        expected = f"a QTensor, an entry, or an array of {', '.join(_TYPE_OF_DTYPE)}"
        raise refuse("save_gguf", what, expected, got, "convert it")
    return _TYPE_OF_DTYPE[np.dtype(dtype).name], tuple(tensor.shape)


def _bytes(tensor: Any) -> memoryview:
    if hasattr(tensor, "type_id"):
        data = tensor.raw
    elif hasattr(tensor, "to_bytes"):
        data = np.frombuffer(tensor.to_bytes(), np.uint8)
    else:
        data = np.asarray(tensor)
        data = data.astype(data.dtype.newbyteorder("<"), copy=False)
    return memoryview(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
