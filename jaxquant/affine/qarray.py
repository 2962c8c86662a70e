"""Quantised arrays: codes, scale and zero point as one value."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxquant._core.errors import refuse
from jaxquant.affine import layout as layouts
from jaxquant.affine import qtypes
from jaxquant.affine.dequantize import dequantize
from jaxquant.affine.packing import pack, unpack

LAYOUTS = ("plain", "prepared")


@jax.tree_util.register_pytree_with_keys_class
class QArray:
    """An array as integer codes, ``(qvalue - zero_point) * scale``.

    A pytree of data, scale and zero point; code type, range, layout and the sizes that ``data`` does not show are
    static. Leading axes are data's own, so ``vmap`` and ``scan`` take a stack apart where the scale has the same
    leading axes. No gradient flows through codes: JAX gives integers none.

    Attributes:
      data: the codes as they lie in memory: int8, uint8, int16 or uint16; 4- and 2-bit codes packed along the last
        axis in uint8; prepared, in the order of bytes that products prefer.
      scale: of the array's rank, each axis 1, the array's, or a divisor of it (blocks).
      zero_point: None (0) or integers that broadcast to the scale.
      qtype: the code type, a dtype as ``jnp.int8`` or ``jnp.int4``.
      qmin, qmax: the code range.
      layout: "plain" or "prepared".
      tail: of the constructor: the logical sizes of the last axes, where those of ``data`` are others.

    Built by `dynamic_quantize`, `from_codes` and `from_qwix`; the constructor takes the attributes, and as ``tail`` the
    logical sizes of the last axes, where those of ``data`` are others.

    >>> w = QArray.from_codes(jnp.array([[1, -2, 7]], jnp.int8), jnp.array([[0.5]]), qtype=jnp.int4)
    >>> w.shape, w.nbytes, w.dequantize()
    ((1, 3), 6, Array([[ 0.5, -1. ,  3.5]], dtype=float32))
    """

    def __init__(
        self, data: Any, scale: Any, zero_point: Any, qtype: Any, qmin: int, qmax: int,
        tail: tuple[int, ...] = (), layout: str = "plain",
    ):  # fmt: skip
        """As the attributes. tail: the logical sizes of the last axes, where those of ``data`` are others."""
        self.data, self.scale, self.zero_point = data, scale, zero_point
        self._static = (qtypes.lookup("QArray", qtype), qmin, qmax, tuple(tail), layout)

    def tree_flatten_with_keys(self) -> Any:
        names = ("data", "scale", "zero_point")
        return [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names], self._static

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> QArray:
        # Leaves may be anything: transformations put specs, axes and shardings there.
        self = object.__new__(cls)
        self._static = static
        self.data, self.scale, self.zero_point = children
        return self

    @classmethod
    def from_codes(
        cls, qvalue: Any, scale: Any, zero_point: Any = None, *, qtype: Any = None, qmin: int | None = None,
        qmax: int | None = None,
    ) -> QArray:  # fmt: skip
        """From logical codes; those below 8 bits are packed.

        Args:
          qvalue: integer codes of any shape: int8, uint8, int16, uint16, or JAX's int4, uint4, int2, uint2.
          scale: floating; a scalar, or of qvalue's rank, each axis 1, qvalue's or a divisor of it (blocks).
          zero_point: None or integers that broadcast to the scale.
          qtype: the code type; None takes qvalue's.
          qmin, qmax: the code range, by default the type's.
        """
        name = "QArray.from_codes"
        qvalue, scale = jnp.asarray(qvalue), jnp.asarray(scale)
        code = qtypes.lookup(name, qvalue.dtype if qtype is None else qtype)
        low, high = qtypes.code_range(name, code, qmin, qmax)
        if not jnp.issubdtype(qvalue.dtype, jnp.integer):
            raise refuse(name, "qvalue", "integer codes", qvalue.dtype.name, "see dynamic_quantize", TypeError)
        if not jnp.issubdtype(scale.dtype, jnp.floating):
            raise refuse(name, "scale", "a floating array", scale.dtype.name, "convert it to float32", TypeError)
        if scale.ndim == 0:
            scale = scale.reshape((1,) * qvalue.ndim)
        fits = scale.ndim == qvalue.ndim and all(
            m == n or m == 1 or (m and n % m == 0) for n, m in zip(qvalue.shape, scale.shape, strict=True)
        )
        if not fits:
            expected = f"the rank of the codes' shape {qvalue.shape}, each axis 1, theirs or a divisor"
            raise refuse(name, "scale", expected, str(scale.shape), "reshape it")
        if zero_point is not None:
            zero_point = jnp.asarray(zero_point)
            if not jnp.issubdtype(zero_point.dtype, jnp.integer):
                raise refuse(name, "zero_point", "None or integers", zero_point.dtype.name, "round it", TypeError)
            zero_point = jnp.broadcast_to(zero_point.astype(jnp.int32), scale.shape)
        qvalue, tail = qvalue.astype(code.container), ()
        if code.bits < 8 and qvalue.ndim:
            qvalue, tail = pack(qvalue, code.name), qvalue.shape[-1:]
        return cls(qvalue, scale, zero_point, code.name, low, high, tail)

    @property
    def qtype(self) -> Any:
        return jnp.dtype(self._static[0].name)

    @property
    def qmin(self) -> int:
        return self._static[1]

    @property
    def qmax(self) -> int:
        return self._static[2]

    @property
    def layout(self) -> str:
        return self._static[4]

    @property
    def shape(self) -> tuple[int, ...]:
        tail = self._static[3]
        return (*self.data.shape[: self.ndim - len(tail)], *tail)

    @property
    def ndim(self) -> int:
        # Prepared data has one axis more.
        return len(self.data.shape) - (self.layout == "prepared")

    @property
    def size(self) -> int:
        """Codes."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of data, scale and zero point."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    @property
    def block_shape(self) -> tuple[int, ...]:
        """How many elements share a scale, axis by axis."""
        return tuple(1 if m == n != 1 else n // m for n, m in zip(self.shape, self.scale.shape, strict=True))

    @property
    def qvalue(self) -> jax.Array:
        """The logical codes, one to an element: int8 or uint8 for 8 bits and below, else int16 or uint16."""
        code, data = self._static[0], self.plain().data
        return unpack(data, code.name, self.shape[-1]) if code.bits < 8 and self.ndim else data

    def prepare(self, *, implementation: str | None = None) -> QArray:
        """The same weights ``[.., k, n]`` in the order of bytes that products prefer, scale and zero point as they are.

        For codes of 8 bits and below. Products read either layout and give the same bits; prepared weights save them
        the rearrangement, of which a product with few rows consists for the most part.

        >>> w = QArray.from_codes(jnp.ones((64, 32), jnp.int8), 0.5).prepare()
        >>> w, w.data.shape
        (QArray(int8, (64, 32), prepared), (2, 16, 64))
        """
        code, low, high, _, layout = self._static
        if layout == "prepared":
            return self
        if code.bits > 8 or self.ndim < 2:
            got = f"{code.name} of shape {self.shape}"
            raise refuse("QArray.prepare", "self", "a matrix of 8, 4 or 2 bits", got, "products take no other")
        k, n = self.shape[-2:]
        data = layouts.prepare(self.data, bits=code.bits, n=n, implementation=implementation)
        return QArray(data, self.scale, self.zero_point, code.name, low, high, (k, n), "prepared")

    def plain(self, *, implementation: str | None = None) -> QArray:
        """The same array in the plain layout: the inverse of `prepare`."""
        code, low, high, tail, layout = self._static
        if layout == "plain":
            return self
        k, n = tail
        dtype = code.container if code.bits == 8 else jnp.uint8
        data = layouts.plain(self.data, bits=code.bits, k=k, n=n, dtype=dtype, implementation=implementation)
        return QArray(data, self.scale, self.zero_point, code.name, low, high, (n,) if code.bits < 8 else ())

    def dequantize(self, dtype: Any = None, *, implementation: str | None = None) -> jax.Array:
        """``(qvalue - zero_point) * scale``, in the scale's dtype or rounded from there to ``dtype``.

        >>> QArray.from_codes(jnp.array([1, -2], jnp.int8), 0.5).dequantize()
        Array([ 0.5, -1. ], dtype=float32)
        """
        dtype = self.scale.dtype if dtype is None else dtype
        block = tuple(-1 if m == 1 else b for b, m in zip(self.block_shape, self.scale.shape, strict=True)) or None
        return dequantize(
            self.qvalue, self.scale, self.zero_point, block_shape=block, dtype=dtype, implementation=implementation
        )

    def shardings(self, sharding: NamedSharding) -> QArray:
        """Shardings of the leaves, in a QArray, from one of the logical array: for ``device_put`` and ``jit``.

        Scales and zero points follow the codes: along each axis they are split alike where every shard has whole
        blocks, and replicated where not.

        Args:
          sharding: a NamedSharding of the array's axes. Packed codes must be split into whole bytes.

        Raises:
          ValueError: a last axis whose packed codes do not divide into whole bytes; a prepared layout, whose last two
            axes are not the array's, with either of them split.

        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("model",))
        >>> w = dynamic_quantize(jnp.ones((4, 8)), qtype=jnp.int4)
        >>> split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model"))
        >>> jax.device_put(w, w.shardings(split)).scale.sharding.spec
        PartitionSpec('model', None)
        """
        spec = (*sharding.spec, *[None] * (self.ndim - len(sharding.spec)))
        shape, static = self.shape, self._static

        def parts(entry: Any) -> int:
            names = () if entry is None else (entry,) if isinstance(entry, str) else entry
            return math.prod(sharding.mesh.shape[name] for name in names)

        if self.layout == "prepared":
            if any(entry is not None for entry in spec[-2:]):
                remedy = "shard the array before prepare(), or its leading axes"
                raise refuse("QArray.shardings", "sharding", "whole matrices of a prepared array", str(spec), remedy)
            data_spec = (*spec[:-2], *[None] * (len(self.data.shape) - len(spec) + 2))
        else:
            data_spec = spec
            if static[3] and shape[-1] % (parts(spec[-1]) * (8 // static[0].bits)) and parts(spec[-1]) > 1:
                expected = f"shards of whole bytes of {static[0].bits}-bit codes on an axis of {shape[-1]}"
                raise refuse("QArray.shardings", "sharding", expected, str(sharding.spec), "split another axis")
        along = [
            entry if m != 1 and m % parts(entry) == 0 else None for entry, m in zip(spec, self.scale.shape, strict=True)
        ]
        own = [
            NamedSharding(sharding.mesh, PartitionSpec(*axes), memory_kind=sharding.memory_kind)
            for axes in (data_spec, along)
        ]
        return QArray.tree_unflatten(static, (own[0], own[1], None if self.zero_point is None else own[1]))

    def to_qwix(self) -> Any:
        """As a ``qwix.QArray``: one array element for each code, of the code type (qwix must be installed).

        >>> QArray.from_codes(jnp.array([[1, -2]]), 0.5, qtype=jnp.int4).to_qwix().qvalue  # doctest: +SKIP
        Array([[1, -2]], dtype=int4)
        """
        import qwix

        if self._static[0].bits > 8:
            raise refuse(
                "QArray.to_qwix", "qtype", "at most 8 bits", self._static[0].name, "qwix has no wider", TypeError
            )
        dtype = self.qtype
        zero_point = None
        if self.zero_point is not None:
            zero_point = jnp.broadcast_to(self.zero_point, self.scale.shape).astype(dtype)
        return qwix.QArray(qvalue=self.qvalue.astype(dtype), scale=self.scale, zero_point=zero_point, qtype=dtype)

    @classmethod
    def from_qwix(cls, array: Any) -> QArray:
        """From a ``qwix.QArray`` of an integer type, with the same values.

        Raises:
          TypeError: a type that has no integer codes here, such as float8 or nf4.
        """
        qtype = array.qvalue.dtype if array.qtype is None else array.qtype
        zero_point = None if array.zero_point is None else jnp.asarray(array.zero_point).astype(jnp.int32)
        return cls.from_codes(array.qvalue, array.scale, zero_point, qtype=qtype)

    def __repr__(self) -> str:
        shape = self.shape if hasattr(self.data, "shape") else self.data
        layout = "" if self.layout == "plain" else f", {self.layout}"
        return f"QArray({self._static[0].name}, {shape}{layout})"

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> QArray:
        """Integers and slices along leading axes that scales do not divide into blocks.

        >>> QArray.from_codes(jnp.ones((3, 4, 2), jnp.int8), jnp.ones((3, 1, 1)))[1, :2].shape
        (2, 2)
        """
        indices = index if isinstance(index, tuple) else (index,)
        whole = self.ndim - len(self._static[3])
        if len(indices) > whole:
            raise refuse("QArray", "index", f"at most {whole} axes of {self.shape}", str(len(indices)), "dequantise")
        of_scale: list[Any] = []
        for d, i in enumerate(indices):
            if not isinstance(i, (int, np.integer, slice)):
                remedy = "index qvalue and scale, or dequantise"
                raise refuse("QArray", "index", "integers and slices along leading axes", repr(i), remedy, TypeError)
            n, m = self.shape[d], self.scale.shape[d]
            if not isinstance(i, slice) and not -n <= i < n:
                raise IndexError(f"QArray: index {i} is out of range for axis {d} of shape {self.shape}")
            if m not in (1, n):
                remedy = "dequantise, or index an axis in front of it"
                raise refuse("QArray", "index", f"whole blocks of {n // m} on axis {d}", repr(i), remedy)
            if m == n:
                of_scale.append(i)
            else:
                of_scale.append(slice(None) if isinstance(i, slice) else 0)
        zero_point = self.zero_point
        if zero_point is not None:
            zero_point = jnp.broadcast_to(zero_point, self.scale.shape)[tuple(of_scale)]
        code, low, high, tail, layout = self._static
        return QArray(
            self.data[tuple(indices)], self.scale[tuple(of_scale)], zero_point, code.name, low, high, tail, layout
        )


def _serialize(static: Any) -> bytes:
    code, low, high, tail, layout = static
    return " ".join([code.name, str(low), str(high), layout, *map(str, tail)]).encode()


def _deserialize(text: bytes) -> Any:
    name, low, high, layout, *tail = text.decode().split()
    return qtypes.QTYPES[name], int(low), int(high), tuple(map(int, tail)), layout


# Exported functions may take and return quantised arrays.
jax.export.register_pytree_node_serialization(
    QArray, serialized_name="jaxquant.QArray", serialize_auxdata=_serialize, deserialize_auxdata=_deserialize
)
