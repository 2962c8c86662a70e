"""A Llama-family decoder on block-quantised weights, straight from a GGUF file.

The weights of a layer are QTensors stacked over the layers; `lax.scan` walks over the layer's number, and the products
pick their matrix from the stack in place. Nothing is dequantised as a whole. RMSNorm, rotary embeddings, grouped-query
attention, SwiGLU; with experts, the Mixtral layout.

    params, config = load("model.gguf")
    hidden, cache = decode(params, config, tokens, 0, new_cache(config, 1024))
    next_token = logits(params, config, hidden[-1]).argmax()
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from safetensors import SafetensorError
from safetensors.numpy import load_file

from jaxquant import ggml

# Products of a layer: matrices of one input whose rows are multiplied together where their formats agree.
PRODUCTS = {
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "o": ("attn_output",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
}
EXPERTS = {"gate_up": ("ffn_gate_exps", "ffn_up_exps"), "down": ("ffn_down_exps",)}


@dataclass(frozen=True)
class Config:
    """Hyper-parameters, from the file's metadata."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    rotary_size: int
    context: int
    epsilon: float
    rotary_base: float
    experts: int
    experts_used: int


def read_config(file: Any) -> Config:
    meta = file.metadata
    family = meta.get("general.architecture")
    if family != "llama":
        raise ValueError(
            f"{file.path}: general.architecture: expected llama, got {family}; other families differ in their layers"
        )

    def value(key: str, default: Any = None) -> Any:
        found = meta.get(f"llama.{key}", default)
        if found is None:
            raise ValueError(f"{file.path}: metadata lacks llama.{key}: is this a language model?")
        return found

    def number(key: str, default: Any = None) -> int:
        found = np.asarray(value(key, default))
        if found.size != 1:
            raise ValueError(f"{file.path}: llama.{key} differs between layers, which is not implemented here")
        return int(found.item())

    width, heads = number("embedding_length"), number("attention.head_count")
    head_size = number("attention.key_length", width // max(heads, 1))
    if value("rope.scaling.type", "none") != "none" or "rope_freqs.weight" in file:
        raise ValueError(f"{file.path}: scaled rotary embeddings are not implemented here")
    return Config(
        layers=number("block_count"), width=width, heads=heads, kv_heads=number("attention.head_count_kv", heads),
        head_size=head_size, rotary_size=number("rope.dimension_count", head_size), context=number("context_length"),
        epsilon=float(value("attention.layer_norm_rms_epsilon")), rotary_base=float(value("rope.freq_base", 10000.0)),
        experts=number("expert_count", 0), experts_used=number("expert_used_count", 0),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- parameters


def load(model: Any, *, prepare: bool = True, fuse: bool = True) -> tuple[dict[str, Any], Config]:
    """Parameters and hyper-parameters of a file: its path, or what ggml.load_gguf gave.

    prepare: in the products' favourite layout. fuse: matrices of one input as one (not for sharding by heads).
    One layer's tensor at a time is read, prepared and put in its place: the memory at the peak is that of the result.
    """
    file = model if isinstance(model, Mapping) else ggml.load_gguf(model)
    config, left = read_config(file), set(file)

    def tensor(name: str) -> Any:
        if name not in file:
            raise ValueError(f"{file.path}: no tensor {name!r}; {len(file)} tensors, {config.layers} layers expected")
        left.discard(name)
        return file[name]

    def arranged(w: ggml.QTensor) -> ggml.QTensor:
        return w.prepare() if prepare else w

    def matrices(names: list[list[str]]) -> ggml.QTensor:
        """names[layer]: tensors of one format, row below row; stacked over the layers."""
        stack = None
        for i, layer in enumerate(names):
            entries = [tensor(name) for name in layer]
            raw = np.concatenate([entry.raw for entry in entries], axis=-2)
            one = arranged(ggml.QTensor(jnp.asarray(raw), entries[0].type_name))
            if stack is None:
                stack = jax.tree.map(lambda a: jnp.zeros((len(names), *a.shape), a.dtype), one)
            stack = jax.block_until_ready(_put(stack, one, i))
            file.release()
        assert stack is not None
        return stack

    # The largest matrix comes first, while there is room. One matrix may serve both ends; it is kept once.
    head = tensor("output.weight" if "output.weight" in file else "token_embd.weight").load()
    params = {"head": arranged(head) if isinstance(head, ggml.QTensor) else head}
    if "output.weight" in file:
        params["embedding"] = tensor("token_embd.weight").load()
    params["norm"] = tensor("output_norm.weight").load()
    del head
    file.release()

    products = PRODUCTS | EXPERTS if config.experts else PRODUCTS
    if not fuse:
        products = {part: (part,) for parts in products.values() for part in parts}

    def formats(layer: int) -> tuple[str, ...]:
        return tuple(tensor(f"blk.{layer}.{part}.weight").type_name for parts in products.values() for part in parts)

    segments, first = [], 0
    while first < config.layers:  # layers of equal formats are one stack
        last = first + 1
        while last < config.layers and formats(last) == formats(first):
            last += 1
        here, segment = range(first, last), {}
        for name, parts in products.items():
            kinds = {tensor(f"blk.{first}.{part}.weight").type_name for part in parts}
            groups = [parts] if len(kinds) == 1 else [(part,) for part in parts]
            segment[name] = [matrices([[f"blk.{i}.{part}.weight" for part in group] for i in here]) for group in groups]
        for norm in ("attn_norm", "ffn_norm"):
            segment[norm] = jnp.stack([tensor(f"blk.{i}.{norm}.weight").load() for i in here])
        if config.experts:
            segment["router"] = jnp.stack(
                [jnp.asarray(_values(tensor(f"blk.{i}.ffn_gate_inp.weight").load())) for i in here]
            )
        segments.append(segment)
        first = last

    file.release()
    if left:  # biases, for one: without them the model would be another
        raise ValueError(f"{file.path}: tensors that are not implemented here: {', '.join(sorted(left)[:4])}, ...")
    params["segments"] = segments
    return params, config


@partial(jax.jit, donate_argnums=0)
def _put(stack: Any, one: Any, i: Any) -> Any:
    return jax.tree.map(lambda s, o: lax.dynamic_update_index_in_dim(s, o, i, 0), stack, one)


def _values(w: Any) -> jax.Array:
    return w.dequantize() if isinstance(w, ggml.QTensor) else w


# --------------------------------------------------------------------------------------------------------------- model


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    squares = jnp.einsum("...i,...i->...", x, x)[..., None]
    return x * lax.rsqrt(squares / x.shape[-1] + epsilon) * weight


def rotate(x: jax.Array, positions: jax.Array, config: Config) -> jax.Array:
    """Rotary embedding of x [..., T, heads, head_size]: neighbouring values are pairs, as GGUF files store them."""
    size = config.rotary_size
    angles = positions[:, None] * config.rotary_base ** (-jnp.arange(0, size, 2) / size)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = x[..., 0:size:2], x[..., 1:size:2]
    turned = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(*x.shape[:-1], size)
    return jnp.concatenate([turned, x[..., size:]], axis=-1)


def new_cache(config: Config, length: int, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    """Keys and values of `length` positions, for every layer. float16 halves what a token has to read."""
    shape = (config.layers, config.kv_heads, length, config.head_size)
    return {"k": jnp.zeros(shape, dtype), "v": jnp.zeros(shape, dtype)}


QUERIES = 128  # positions whose scores are computed together: they should stay in the cache


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, config: Config, cache: Any = None, i: Any = 0, first: Any = 0
) -> jax.Array:
    """Attention of new positions to themselves and to those before.

    q [T, heads, head_size], k and v [T, kv_heads, head_size] at positions first, first + 1, ...; cache: keys and values
    of every layer, of which the first `first` of layer i count, or None.
    """
    k, v = k.transpose(1, 0, 2), v.transpose(1, 0, 2)
    if cache is None:
        return _attend(q, k, v, None, first, config)
    # Only as much of the cache as is filled, in at most four sizes, is read: one program has them all. Pieces of a
    # prompt come in steps of their own length.
    length = cache["k"].shape[2]
    step = -(-max(length // 4, q.shape[0]) // 128) * 128

    def up_to(size: int) -> Any:
        part = lambda a: lax.dynamic_slice(a, (i, 0, 0, 0), (1, a.shape[1], size, a.shape[3]))[0]  # noqa: E731
        return lambda cache: _attend(q, k, v, jax.tree.map(part, cache), first, config)

    sizes = [min(size, length) for size in range(step, length + step, step)]
    return lax.switch((first - 1) // step, [up_to(size) for size in sizes], cache)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, old: Any, first: Any, config: Config) -> jax.Array:
    steps, group = q.shape[0], config.heads // config.kv_heads
    together = QUERIES if old is None else 2 * QUERIES  # every size of the cache has its own program: keep it small
    q = q.reshape(steps, config.kv_heads, group, -1).transpose(1, 2, 0, 3) * config.head_size**-0.5

    def scores(rows: jax.Array, keys: jax.Array, seen: jax.Array) -> jax.Array:
        every = jnp.einsum("gnd,gsd->gns", rows, keys.astype(rows.dtype))
        every = every.reshape(config.kv_heads, group, -1, keys.shape[1])
        return jnp.where(seen, every, -jnp.inf).reshape(config.kv_heads, -1, keys.shape[1])

    def block(begin: int) -> jax.Array:
        end = min(begin + together, steps)
        rows = q[:, :, begin:end].reshape(config.kv_heads, -1, config.head_size)
        parts = [(scores(rows, k[:, :end], jnp.arange(end) <= jnp.arange(begin, end)[:, None]), v[:, :end])]
        if old is not None:
            parts.append((scores(rows, old["k"], jnp.arange(old["k"].shape[1]) < first), old["v"].astype(v.dtype)))
        # One softmax over both parts, which are not copied together.
        most = lax.stop_gradient(jnp.stack([s.max(-1) for s, _ in parts]).max(0))[..., None]
        weights = [jnp.exp(s - most) for s, _ in parts]
        out = sum(w @ values for w, (_, values) in zip(weights, parts, strict=True))
        out /= sum(w.sum(-1, keepdims=True) for w in weights)
        return out.reshape(config.kv_heads, group, end - begin, -1)

    blocks = [block(begin) for begin in range(0, steps, together)]
    return jnp.concatenate(blocks, axis=2).transpose(2, 0, 1, 3).reshape(steps, -1)


def product_shape(params: Any, name: str) -> tuple[int, int]:
    """k and n of a product of PRODUCTS."""
    shapes = [w.shape for w in params["segments"][0][name]]
    return shapes[0][-1], sum(shape[-2] for shape in shapes)


def load_adapters(path: Any, params: Any, config: Config) -> Any:
    """Low-rank adapters as finetune_lora.py writes them, checked against the model; params["adapters"] applies them."""
    adapters: dict[str, dict[str, jax.Array]] = {}
    try:
        found = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: {error}: is this a file of adapters?") from None
    for key, value in found.items():
        name, _, part = key.rpartition(".")
        if name not in params["segments"][0] or name not in PRODUCTS or part not in ("a", "b"):
            raise ValueError(f"{path}: {key}: this model has {', '.join(f'{name}.a, {name}.b' for name in PRODUCTS)}")
        k, n = product_shape(params, name)
        size = k if part == "a" else n
        if value.ndim != 3 or (value.shape[0], value.shape[1 if part == "a" else 2]) != (config.layers, size):
            wanted = f"[{config.layers}, {k}, rank]" if part == "a" else f"[{config.layers}, rank, {n}]"
            raise ValueError(f"{path}: {key}: expected {wanted}, got {list(value.shape)}: are they of this model?")
        adapters.setdefault(name, {})[part] = jnp.asarray(value)
    for name, pair in adapters.items():
        if set(pair) != {"a", "b"} or pair["a"].shape[2] != pair["b"].shape[1]:
            raise ValueError(f"{path}: {name}: expected {name}.a and {name}.b of one rank")
    return adapters


def _of_layers(adapters: Any, start: int, count: int) -> Any:
    return jax.tree.map(lambda a: a[start : start + count], adapters or {})


def _product(w: list[Any], x: jax.Array, i: Any, lhs_qtype: Any, adapter: Any = None) -> jax.Array:
    """x times the matrices of layer i, side by side, and the low-rank update of an adapter."""
    out = [ggml.linear(x, each, index=i, lhs_qtype=lhs_qtype) for each in w]
    y = out[0] if len(out) == 1 else jnp.concatenate(out, axis=-1)
    return y if adapter is None else y + (x @ adapter["a"]) @ adapter["b"]


def _experts(segment: Any, x: jax.Array, i: Any, config: Config, lhs_qtype: Any) -> jax.Array:
    """The feed-forward part of each token's best experts, weighted by the router (Mixtral)."""

    def chosen(w: list[Any], x: jax.Array) -> jax.Array:
        # One stack of layers times experts: the layer's experts are multiplied where they lie.
        flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), w)
        return jnp.concatenate(
            [ggml.moe_linear(x, m, i * config.experts + ids, lhs_qtype=lhs_qtype) for m in flat], axis=-1
        )

    scores, ids = lax.top_k(x @ segment["router"][i].T, config.experts_used)
    gate, up = jnp.split(chosen(segment["gate_up"], x[:, None]), 2, axis=-1)
    return (chosen(segment["down"], jax.nn.silu(gate) * up) * jax.nn.softmax(scores)[..., None]).sum(axis=1)


def layer(
    segment: Any, i: Any, x: jax.Array, *, positions: jax.Array, attention: Any, config: Config, lhs_qtype: Any,
    adapters: Any = None, total: Any = lambda x: x,
) -> jax.Array:  # fmt: skip
    """Layer i of a stack on x [T, width].

    attention(q, k, v) gives the mixed values; total sums over the devices of a shard_map, once for each half.
    """
    adapters = adapters or {}
    product = lambda name, h: _product(segment[name], h, i, lhs_qtype, adapters.get(name))  # noqa: E731
    h = rms_norm(x, segment["attn_norm"][i], config.epsilon)
    heads = lambda y: y.reshape(len(x), -1, config.head_size)  # noqa: E731
    if "qkv" in segment:
        qk, v = jnp.split(heads(product("qkv", h)), [config.heads + config.kv_heads], axis=1)
        q, k = jnp.split(rotate(qk, positions, config), [config.heads], axis=1)
    else:
        q, k, v = (heads(product(name, h)) for name in ("attn_q", "attn_k", "attn_v"))
        q, k = rotate(q, positions, config), rotate(k, positions, config)
    mixed = attention(q, k, v)
    x = x + total(product("o" if "o" in segment else "attn_output", mixed))

    h = rms_norm(x, segment["ffn_norm"][i], config.epsilon)
    if config.experts:
        return x + _experts(segment, h, i, config, lhs_qtype)
    if "gate_up" in segment:
        gate, up = jnp.split(product("gate_up", h), 2, axis=-1)
    else:
        gate, up = product("ffn_gate", h), product("ffn_up", h)
    return x + total(product("down" if "down" in segment else "ffn_down", jax.nn.silu(gate) * up))


def embed(params: Any, tokens: jax.Array) -> jax.Array:
    embedding = params.get("embedding", params["head"])
    if not isinstance(embedding, ggml.QTensor):
        return embedding[tokens].astype(jnp.float32)
    return embedding.take(tokens)


def decode(
    params: Any, config: Config, tokens: jax.Array, first: Any, cache: Any, *, empty: bool = False,
    lhs_qtype: Any = jnp.int8, total: Any = lambda x: x,
) -> tuple[jax.Array, Any]:  # fmt: skip
    """Tokens [T] at positions first, first + 1, ...: the last layer's output [T, width], and the cache with them added.

    empty: nothing is in the cache yet, and nothing in it is looked at.
    """
    positions = first + jnp.arange(tokens.shape[0])
    x, start, added = embed(params, tokens), 0, []
    for segment in params["segments"]:

        def step(x: jax.Array, s: Any, segment: Any = segment, start: int = start) -> Any:
            (i, mine), new = s, {}

            def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                new.update({n: y.transpose(1, 0, 2).astype(cache[n].dtype) for n, y in (("k", k), ("v", v))})
                return attend(q, k, v, config, None if empty else cache, start + i, first)

            x = layer(
                segment, i, x, positions=positions, attention=attention, config=config, lhs_qtype=lhs_qtype,
                adapters=mine, total=total,
            )  # fmt: skip
            return x, new

        count = segment["attn_norm"].shape[0]
        x, new = lax.scan(step, x, (jnp.arange(count), _of_layers(params.get("adapters"), start, count)))
        added.append(new)
        start += count
    # Written once, after all layers: a cache that layers read and write would be copied by each of them.
    added = {name: jnp.concatenate([new[name] for new in added]) for name in cache}
    return x, jax.tree.map(lambda old, new: lax.dynamic_update_slice(old, new, (0, 0, first, 0)), cache, added)


def logits(params: Any, config: Config, x: jax.Array, *, lhs_qtype: Any = jnp.int8) -> jax.Array:
    """[..., vocabulary] of the last layer's output."""
    x = rms_norm(x, params["norm"], config.epsilon)
    head = params["head"]
    return ggml.linear(x, head, lhs_qtype=lhs_qtype) if isinstance(head, ggml.QTensor) else x @ head.T


def forward(
    params: Any, config: Config, tokens: jax.Array, adapters: Any = None, *, lhs_qtype: Any = None, remat: bool = True
) -> jax.Array:
    """Logits [T, vocabulary] of whole sequences, for training: no cache, each layer's intermediates recomputed."""
    positions = jnp.arange(tokens.shape[0])
    attention = lambda q, k, v: attend(q, k, v, config)  # noqa: E731
    x, start = embed(params, tokens), 0
    for segment in params["segments"]:
        count = segment["attn_norm"].shape[0]
        step = partial(layer, positions=positions, attention=attention, config=config, lhs_qtype=lhs_qtype)
        body = lambda x, s, segment=segment, step=step: (step(segment, s[0], x, adapters=s[1]), None)  # noqa: E731
        mine = _of_layers(adapters or params.get("adapters"), start, count)
        x, _ = lax.scan(jax.checkpoint(body) if remat else body, x, (jnp.arange(count), mine))
        start += count
    return logits(params, config, x, lhs_qtype=lhs_qtype)


# ------------------------------------------------------------------------------------------------------ several devices

# Tensor parallelism: heads and the inner width are split, so that each half of a layer needs one sum.
ROWS, COLUMNS = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"), ("attn_output", "ffn_down")


def partition_specs(params: Any, axis: str) -> Any:
    """Where parameters go on a mesh axis, for weights loaded with ``prepare=False, fuse=False``.

    A matrix is cut by rows, or along its rows in whole blocks; what is left is on every device.
    """

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        names = {getattr(key, "key", None) for key in path}
        if names & set(ROWS):
            return PartitionSpec(None, axis, None)
        return PartitionSpec(None, None, axis) if names & set(COLUMNS) else PartitionSpec(*[None] * leaf.ndim)

    return jax.tree_util.tree_map_with_path(spec, params)


def local(config: Config, devices: int) -> Config:
    """What one of the devices of a shard_map sees."""
    if config.heads % devices or config.kv_heads % devices:
        raise ValueError(f"{config.heads} heads and {config.kv_heads} of keys: not divisible over {devices} devices")
    return replace(config, heads=config.heads // devices, kv_heads=config.kv_heads // devices)
