"""A Llama decoder in NumPy, float64, for the tests of examples/llm: written from the architecture's description.

Weights are dequantised once, by ggml's own code; nothing of jaxquant is used.
"""

import ggml_library
import numpy as np


class Model:
    def __init__(self, tensors, meta):
        """tensors: name -> (type id, bytes, shape); meta: name -> value, as in a GGUF file."""
        self.meta = meta
        self.w = {}
        for name, (type_id, data, shape) in tensors.items():
            values = data.view(np.float32) if type_id == 0 else ggml_library.dequantize(type_id, data.reshape(1, -1))
            self.w[name] = np.asarray(values, np.float64).reshape(shape)

    def value(self, key, default=None):
        found = self.meta.get(f"llama.{key}", default)
        assert found is not None, key
        return found

    def add(self, names, updates):
        """Updates [layers, rows of all the names, columns] to matrices whose rows follow each other."""
        for i, update in enumerate(updates):
            for name in names:
                w = self.w[f"blk.{i}.{name}.weight"]
                w += update[: len(w)]
                update = update[len(w) :]
            assert not len(update)

    def logits(self, tokens):
        """[len(tokens), vocabulary]."""
        layers, heads = int(self.value("block_count")), int(self.value("attention.head_count"))
        kv_heads, epsilon = (
            int(self.value("attention.head_count_kv")),
            float(self.value("attention.layer_norm_rms_epsilon")),
        )
        x = self.w["token_embd.weight"][np.asarray(tokens)]
        size = x.shape[1] // heads
        count = len(tokens)
        for i in range(layers):
            of = lambda name, i=i: self.w[f"blk.{i}.{name}.weight"]  # noqa: E731
            h = self.norm(x, of("attn_norm"), epsilon)
            q = self.turn((h @ of("attn_q").T).reshape(count, heads, size))
            k = self.turn((h @ of("attn_k").T).reshape(count, kv_heads, size))
            v = (h @ of("attn_v").T).reshape(count, kv_heads, size)
            mixed = np.zeros((count, heads, size))
            for head in range(heads):
                group = head // (heads // kv_heads)
                scores = q[:, head] @ k[:, group].T / np.sqrt(size)
                scores[np.triu_indices(count, 1)] = -np.inf
                p = np.exp(scores - scores.max(1, keepdims=True))
                mixed[:, head] = p / p.sum(1, keepdims=True) @ v[:, group]
            x = x + mixed.reshape(count, -1) @ of("attn_output").T
            h = self.norm(x, of("ffn_norm"), epsilon)
            if f"blk.{i}.ffn_gate_inp.weight" in self.w:
                x = x + self.experts(h, of)
            else:
                x = x + self.swiglu(h, of("ffn_gate"), of("ffn_up"), of("ffn_down"))
        x = self.norm(x, self.w["output_norm.weight"], epsilon)
        return x @ self.w.get("output.weight", self.w["token_embd.weight"]).T

    def experts(self, h, of):
        used = int(self.value("expert_used_count"))
        scores = h @ of("ffn_gate_inp").T
        out = np.zeros_like(h)
        for t, row in enumerate(scores):
            best = np.argsort(-row)[:used]
            share = np.exp(row[best] - row[best].max())
            share /= share.sum()
            for expert, part in zip(best, share, strict=True):
                gate, up, down = (of(f"ffn_{name}_exps")[expert] for name in ("gate", "up", "down"))
                out[t] += part * self.swiglu(h[t], gate, up, down)
        return out

    @staticmethod
    def swiglu(h, gate, up, down):
        g = h @ gate.T
        return (g / (1 + np.exp(-g)) * (h @ up.T)) @ down.T

    @staticmethod
    def norm(x, weight, epsilon):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight

    def turn(self, x):
        """Neighbouring values as complex numbers, turned by their position."""
        size = x.shape[-1]
        frequency = float(self.value("rope.freq_base", 10000.0)) ** (-np.arange(0, size, 2) / size)
        z = x[..., 0::2] + 1j * x[..., 1::2]
        z = z * np.exp(1j * np.arange(len(x))[:, None, None] * frequency)
        return np.stack([z.real, z.imag], -1).reshape(x.shape)

    def greedy(self, tokens, count):
        """The continuation, and how far ahead the winners were."""
        tokens, margins = list(tokens), []
        for _ in range(count):
            last = self.logits(tokens)[-1]
            best = np.sort(last)[-2:]
            margins.append(best[1] - best[0])
            tokens.append(int(last.argmax()))
        return tokens[-count:], margins
