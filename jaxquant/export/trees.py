"""save_safetensors() and load_safetensors(): trees of arrays and quantised arrays as safetensors files.

An array is stored under its path, "layers.0.bias"; of a quantised one each part, "layers.0.kernel.data",
"layers.0.kernel.scale". What has no bytes (paths, code types, ranges, sizes that data do not show) is JSON in the
file's metadata, under "jaxquant".
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant._core.errors import refuse
from jaxquant.export import safetensors_format
from jaxquant.export.leaf_kinds import KINDS, Wrong, is_quantised

SAVE, LOAD, KEY, VERSION = "save_safetensors", "load_safetensors", "jaxquant", 1


def save_safetensors(path: str | os.PathLike[str], tree: Any, metadata: Mapping[str, str] | None = None) -> None:
    """Writes a tree of arrays and quantised arrays as a safetensors file, or leaves what was there: the file is written
    beside ``path``, synced and renamed.

    Any safetensors reader sees plain arrays, named by their paths: ``a.b`` for an array, ``a.b.data``, ``a.b.scale``
    and ``a.b.zero_point`` for a `QArray` (codes below 8 bits packed in uint8, low bits first), ``a.b.data`` for a
    `ggml.QTensor`, ``a.b.scale`` and ``a.b.zero_point`` for a `QParams`. Their code types and sizes are JSON in the
    metadata, under "jaxquant".

    Args:
      path: the file to write or replace.
      tree: any pytree of JAX or NumPy arrays, `QArray`, `QParams`, `ggml.QTensor`, and Python numbers, strings and
        bools (kept in the JSON). Arrays of bool, 8 to 64 bits, float8_e4m3fn, float8_e5m2 or complex64.
      metadata: more strings by name; read them with `safetensors_metadata`.

    Raises:
      ValueError: two leaves of one name (keys with dots); an array spread over several hosts.
      TypeError: a leaf that the format cannot hold, such as JAX's int4 (see `pack`) or a random key.

    >>> w = dynamic_quantize(jnp.ones((4, 8)), PerAxis(1), qtype=jnp.int4)
    >>> jaxquant.export.save_safetensors("model.safetensors", {"layers": [{"kernel": w, "bias": jnp.zeros(8)}]})
    >>> jaxquant.export.load_safetensors("model.safetensors")["layers"][0]["kernel"]
    QArray(int4, (4, 8))
    """
    metadata = dict(metadata or {})
    if not all(isinstance(s, str) for item in metadata.items() for s in item) or KEY in metadata:
        remedy = "encode values as strings, under other names"
        raise refuse(SAVE, "metadata", f"strings by name, none of them {KEY!r}", repr(metadata)[:200], remedy)
    arrays: dict[str, Any] = {}
    entries = []
    for key_path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_quantised)[0]:
        keys = [_key(key) for key in key_path]
        name = ".".join(str(key) for key in keys)
        entry: dict[str, Any] = {"path": keys}
        kind = next((k for k in KINDS if type(leaf) is k.type), None)
        if kind is None and isinstance(leaf, (bool, int, float, str)):
            entry["value"] = leaf
        else:
            parts = {"": leaf} if kind is None else {part: getattr(leaf, part) for part in kind.parts}
            if kind is not None:
                entry |= {"kind": kind.type.__name__, **kind.describe(leaf)}
            stored = {part: _storable(name, part, value) for part, value in parts.items() if value is not None}
            entry["parts"] = {part: _join(name, part) for part in stored}
            for part, value in stored.items():
                if entry["parts"][part] in arrays:
                    remedy = "rename a key: dots join keys"
                    raise refuse(SAVE, "tree", "leaves of different names", f"{entry['parts'][part]!r} twice", remedy)
                arrays[entry["parts"][part]] = value
        entries.append(entry)
    text = json.dumps({"version": VERSION, "leaves": entries}, separators=(",", ":"))
    safetensors_format.write(path, arrays, {**metadata, KEY: text})


def load_safetensors(path: str | os.PathLike[str], like: Any = None) -> Any:
    """The tree of a file from `save_safetensors`, with the same leaves, bit for bit; or the arrays of any other.

    Args:
      path: the file.
      like: None gives nested dicts and lists: what was a tuple, a dataclass or another node comes back as one of these,
        and empty ones do not. A tree of the same paths, of arrays or ``jax.ShapeDtypeStruct`` (`jax.eval_shape` makes
        one), gives its structure back; shapes and dtypes must agree.

    Returns:
      A tree of JAX arrays in JAX's own memory (NumPy arrays of 64 bits unless ``jax_enable_x64`` is set), `QArray`,
      `QParams` and `ggml.QTensor`. Of a file that has no "jaxquant" metadata, a dict of its arrays by name.

    Raises:
      ValueError: a file that is damaged, incomplete or no safetensors file, from a later version, or unlike ``like``.
        Nothing is read beyond what the file's own sizes, once checked, say.

    >>> tree = {"step": 3, "kernel": dynamic_quantize(jnp.ones((2, 3)))}
    >>> jaxquant.export.save_safetensors("model.safetensors", tree)
    >>> jaxquant.export.load_safetensors("model.safetensors")
    {'kernel': QArray(int8, (2, 3)), 'step': 3}
    """
    path = os.fspath(path)
    arrays, metadata = safetensors_format.read(LOAD, path)
    if KEY not in metadata:
        leaves = [((name,), _in_jax(value)) for name, value in arrays.items()]
    else:
        leaves = _leaves(path, arrays, metadata[KEY])
    return _nested(path, leaves) if like is None else _as(path, leaves, like)


def safetensors_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The strings that `save_safetensors` was given as metadata, or those of any safetensors file at ``path``.

    >>> jaxquant.export.save_safetensors("model.safetensors", jnp.ones(2), {"licence": "Apache-2.0"})
    >>> jaxquant.export.safetensors_metadata("model.safetensors")
    {'licence': 'Apache-2.0'}
    """
    metadata = safetensors_format.read("safetensors_metadata", path)[1]
    return {key: value for key, value in metadata.items() if key != KEY}


# -------------------------------------------------------------------------------------------------------------- writing


def _key(key: Any) -> Any:
    """Of a path: a string, a place in a list, or as [n] a key of a dict that is an integer."""
    value = next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name))
    if isinstance(key, jax.tree_util.SequenceKey):
        return int(value)
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return _IntegerKey([int(value)])
    return str(value)


class _IntegerKey(list[int]):
    def __str__(self) -> str:
        return str(self[0])


def _join(name: str, part: str) -> str:
    return ".".join(filter(None, (name, part))) or "value"


def _storable(name: str, part: str, value: Any) -> Any:
    if isinstance(value, (bool, int, float)):
        value = np.asarray(value, np.float32 if isinstance(value, float) else None)
    dtype = getattr(value, "dtype", None)
    try:
        known = dtype is not None and np.dtype(dtype).name in safetensors_format.NAMES
    except TypeError:
        known = False
    if not known:
        got = f"{type(value).__name__}" if dtype is None else f"dtype {dtype}"
        expected = "an array of a type that safetensors files hold"
        raise refuse(
            SAVE, repr(_join(name, part)), expected, got, "convert it (pack() for codes below 8 bits)", TypeError
        )
    if not getattr(value, "is_fully_addressable", True):
        remedy = "gather it first, as with jax.experimental.multihost_utils.process_allgather"
        raise refuse(SAVE, repr(_join(name, part)), "an array of this host", "one of several hosts", remedy)
    return value


# -------------------------------------------------------------------------------------------------------------- reading


def _in_jax(value: np.ndarray) -> Any:
    if jax.dtypes.canonicalize_dtype(value.dtype) != value.dtype:
        return value.copy()
    return jnp.array(value, copy=True)


def _read_key(key: Any) -> Any:
    if isinstance(key, list) and len(key) == 1 and type(key[0]) is int:
        return _IntegerKey(key)
    if type(key) is int or isinstance(key, str):
        return key
    raise TypeError(key)


def _leaves(path: str, arrays: dict[str, np.ndarray], text: str) -> list[tuple[tuple[Any, ...], Any]]:
    remedy = "the file is damaged"
    try:
        described = json.loads(text)
        version, entries = described["version"], described["leaves"]
        keyed = [(entry, tuple(map(_read_key, entry["path"]))) for entry in entries]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise refuse(LOAD, path, "leaves in JSON, as save_safetensors writes them", text[:100], remedy) from None
    if version != VERSION:
        raise refuse(LOAD, path, f"version {VERSION}", repr(version)[:50], "use a later jaxquant")
    leaves, used = [], set()
    for entry, keys in keyed:
        what = f"{path}: {'.'.join(map(str, keys))!r}"
        if "value" in entry:
            leaves.append((keys, entry["value"]))
            continue
        names = entry.get("parts")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise refuse(LOAD, what, "parts by name", repr(names)[:100], remedy)
        missing = [name for name in names.values() if name not in arrays]
        if missing:
            raise refuse(LOAD, what, f"an array {missing[0]!r} in the file", "none", remedy)
        used.update(names.values())
        kind = next((k for k in KINDS if k.type.__name__ == entry.get("kind")), None)
        wanted = {""} if kind is None else set(kind.parts)
        first = "" if kind is None else kind.parts[0]
        if ("kind" in entry and kind is None) or first not in names or not set(names) <= wanted:
            got = f"{entry.get('kind')!r} with {sorted(names)}"[:200]
            known = ", ".join(k.type.__name__ for k in KINDS)
            raise refuse(LOAD, what, f"an array or the parts of {known}", got, remedy)
        parts = {part: _in_jax(arrays[name]) for part, name in names.items()}
        try:
            leaves.append((keys, parts[""] if kind is None else kind.build(parts, entry)))
        except Wrong as wrong:
            raise refuse(LOAD, what, wrong.args[0], wrong.args[1], remedy) from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"{LOAD}: {what}: {error}") from None
    if len(used) != len(arrays):
        raise refuse(LOAD, path, "leaves for all arrays", f"none for {sorted(set(arrays) - used)[0]!r}", remedy)
    return leaves


class _Node(dict[Any, Any]):
    """Children by key, or by `_Place` in a list."""


class _Place(NamedTuple):
    at: int


def _nested(path: str, leaves: list[tuple[tuple[Any, ...], Any]]) -> Any:
    """Dicts and lists by their paths."""
    if len(leaves) == 1 and not leaves[0][0]:
        return leaves[0][1]
    root = _Node()
    for keys, leaf in leaves:
        places = [key[0] if isinstance(key, list) else _Place(key) if isinstance(key, int) else key for key in keys]
        node: Any = root
        for place in places[:-1]:
            node = node.setdefault(place, _Node()) if isinstance(node, _Node) else None
        if not places or not isinstance(node, _Node) or places[-1] in node:
            raise refuse(LOAD, path, "paths of a tree", f"{keys!r}"[:100], "the file is damaged")
        node[places[-1]] = leaf
    return _lists(root)


def _lists(node: Any) -> Any:
    if not isinstance(node, _Node):
        return node
    children = {key: _lists(child) for key, child in node.items()}
    if children and all(isinstance(key, _Place) for key in children):
        return [children[key] for key in sorted(children)]
    return {key.at if isinstance(key, _Place) else key: child for key, child in children.items()}


def _as(path: str, leaves: list[tuple[tuple[Any, ...], Any]], like: Any) -> Any:
    wanted, structure = jax.tree_util.tree_flatten_with_path(like, is_leaf=is_quantised)
    found = {tuple(map(str, keys)): leaf for keys, leaf in leaves}
    remedy = "give a tree like the one that was saved"
    result = []
    for key_path, template in wanted:
        keys = tuple(str(_key(key)) for key in key_path)
        if keys not in found:
            raise refuse(LOAD, "like", f"paths that are in {path}", ".".join(keys), remedy)
        leaf = found.pop(keys)
        got, expected = _signature(leaf), _signature(template)
        if got != expected:
            raise refuse(LOAD, f"{path}: {'.'.join(keys)!r}", str(expected), str(got), remedy)
        result.append(leaf)
    if found:
        raise refuse(LOAD, "like", f"all that is in {path}", f"no {'.'.join(next(iter(found)))!r}", remedy)
    return jax.tree.unflatten(structure, result)


def _signature(leaf: Any) -> Any:
    """What must agree: types and static parts, shapes and dtypes."""
    if is_quantised(leaf):
        children, structure = jax.tree.flatten(leaf)
        return str(structure), tuple(map(_signature, children))
    if hasattr(leaf, "dtype"):
        return np.dtype(leaf.dtype).name, tuple(leaf.shape)
    return type(leaf).__name__
