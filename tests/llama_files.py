"""Small random models for the tests of examples/llm."""

import numpy as np

from jaxquant import ggml


def make(path, *, layers=2, width=256, inner=512, heads=8, kv_heads=4, vocabulary=96, formats=("Q8_0",), experts=0):
    """A random model whose layers take `formats` in turn."""
    rng = np.random.default_rng(0)
    size = width // heads
    tensors, names = {}, {"token_embd": (vocabulary, width)}

    def matrix(shape, format):
        return ggml.quantize(rng.standard_normal(shape).astype(np.float32) * shape[-1] ** -0.5, format)

    for i in range(layers):
        names = {"attn_q": (width, width), "attn_k": (kv_heads * size, width), "attn_v": (kv_heads * size, width)}
        names |= {"attn_output": (width, width)}
        if experts:
            names |= {f"ffn_{part}_exps": (experts, inner, width) for part in ("gate", "up")}
            names |= {"ffn_down_exps": (experts, width, inner)}
            tensors[f"blk.{i}.ffn_gate_inp.weight"] = rng.standard_normal((experts, width)).astype(np.float32) * 0.2
        else:
            names |= {"ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}
        for name, shape in names.items():
            tensors[f"blk.{i}.{name}.weight"] = matrix(shape, formats[i % len(formats)])
        for norm in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{i}.{norm}.weight"] = rng.uniform(0.5, 1.5, width).astype(np.float32)
    tensors["token_embd.weight"] = matrix((vocabulary, width), "Q8_0")
    tensors["output.weight"] = matrix((vocabulary, width), formats[0])
    tensors["output_norm.weight"] = rng.uniform(0.5, 1.5, width).astype(np.float32)
    metadata = {
        "general.architecture": "llama", "llama.block_count": layers, "llama.embedding_length": width,
        "llama.feed_forward_length": inner, "llama.attention.head_count": heads, "llama.context_length": 512,
        "llama.attention.head_count_kv": kv_heads, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
    }  # fmt: skip
    if experts:
        metadata |= {"llama.expert_count": experts, "llama.expert_used_count": 2}
    ggml.save_gguf(path, tensors, metadata)
    return str(path)
