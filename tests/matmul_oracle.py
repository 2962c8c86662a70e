"""Integer products in NumPy: exact sums in int64, scales one float32 operation at a time."""

import ml_dtypes
import numpy as np

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def wrap(total):
    """int64 to int32, modulo 2^32."""
    return (total & 0xFFFFFFFF).astype(np.uint32).view(np.int32)


def int_matmul(a, b):
    return wrap(np.matmul(a.astype(np.int64), b.astype(np.int64)))


def zero_points(z):
    return np.rint(np.clip(np.nan_to_num(z, nan=0), -65536, 65536)).astype(np.int64)


def scaled_matmul(a, a_scale, a_zero_point, w, w_scale, w_zero_point, bias, dtype="float32"):
    """w: logical codes [b, k, n]; absent operands None."""
    groups, k = w_scale.shape[1], a.shape[2]
    x = a.astype(np.int64) - (0 if a_zero_point is None else zero_points(a_zero_point))
    size, t = k // groups, None
    for g in range(groups):
        part = w[:, g * size : (g + 1) * size].astype(np.int64)
        if w_zero_point is not None:
            part = part - zero_points(w_zero_point)[:, g : g + 1]
        product = wrap(np.matmul(x[:, :, g * size : (g + 1) * size], part)).astype(np.float32) * w_scale[:, g : g + 1]
        t = product if t is None else t + product
    y = t * a_scale
    if bias is not None:
        y = y + bias
    return y.astype(DTYPES[dtype])


def pack(codes, bits):
    """Along the last axis, low bits first."""
    parts = 8 // bits
    size = -(-codes.shape[-1] // parts)
    fields = np.zeros((*codes.shape[:-1], size * parts), np.uint8)
    fields[..., : codes.shape[-1]] = codes.view(np.uint8) & ((1 << bits) - 1)
    fields = fields.reshape(*codes.shape[:-1], size, parts)
    out = np.zeros(fields.shape[:-1], np.uint8)
    for i in range(parts):
        out |= fields[..., i] << (bits * i)
    return out


def prepare(codes, bits):
    """[b, k, n] codes to the prepared layout."""
    b, k, n = codes.shape
    parts = 8 // bits
    words, panels = -(-k // (4 * parts)), -(-n // 16)
    padded = np.zeros((b, words * 4 * parts, panels * 16), np.uint8)
    padded[:, :k, :n] = codes.view(np.uint8) & ((1 << bits) - 1)
    fields = (
        padded.reshape(b, words, parts, 4, panels, 16) << (bits * np.arange(parts, dtype=np.uint8))[:, None, None, None]
    )
    return np.bitwise_or.reduce(fields, axis=2).transpose(0, 3, 1, 4, 2).reshape(b, panels, words, 64)
