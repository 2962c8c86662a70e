"""Adam with moments of 8 bits in NumPy, from the description in ffi/optim/math.h: codes by search in the table of their
values, not by arithmetic on bits."""

import numpy as np

F = np.float32
BINADES = {"m": 15, "v": 31}


def table(exponent, which):
    """(c + value) of each code, and the value, in float64."""
    c = 2.0 ** (np.clip(int(exponent), 40, 250) - 127 - BINADES[which])
    k = np.arange(8 * (BINADES[which] + 1))
    shifted = c * (1 + k % 8 / 8) * 2.0 ** (k // 8)
    return shifted, shifted - (c if which == "m" else c * 31 / 32)


def decode(codes, exponent, which):
    values = table(exponent, which)[1].astype(F)
    if which == "v":
        return values[codes]
    return np.where(codes & 128, F(-1), F(1)) * values[codes & 127]


def encode(values, exponent, dither, which):
    """dither: from 0 to below 1."""
    shifted, _ = table(exponent, which)
    y = (np.abs(values) + F(shifted[0])).astype(F).astype(np.float64)
    low = np.searchsorted(shifted, y, side="right") - 1
    above = np.append(shifted[1:], shifted[-1] * 16 / 15)[low]
    codes = low + ((y - shifted[low]) / (above - shifted[low]) + dither >= 1)
    return (codes | (np.signbit(values) * 128 if which == "m" else 0)).astype(np.uint8)


def exponent_of(values):
    most = float(np.abs(values).max())
    if most == 0:
        return np.uint8(40)
    fraction, exponent = np.frexp(most)  # fraction from 1/2 to below 1
    return np.uint8(np.clip(exponent - 1 + 127 + (fraction > 0.875), 40, 250))


def flush(x):
    """As XLA's CPU handlers compute: a subnormal result is zero."""
    return np.where(np.abs(x) < F(2.0**-126), F(0), x)


def step_block(g, m, m_exponent, v, v_exponent, factors, seed):
    """One block: (update, codes and exponent of m, codes and exponent of v). g: float32."""
    b1, rest1, b2, rest2, root, floor = (F(f) for f in factors)
    with np.errstate(all="ignore"):
        bounded = np.clip(np.where(np.isfinite(g), g, F(0)), F(-(2.0**60)), F(2.0**60)).astype(F)
        m = flush(flush(rest1 * bounded) + b1 * decode(m, m_exponent, "m"))
        v = flush(flush(rest2 * flush(bounded * bounded)) + b2 * decode(v, v_exponent, "v"))
        denominator = root * np.sqrt(v) + floor
        update = np.where(denominator != 0, flush(m / denominator), F(0))
        update = np.where(np.isfinite(g), update, F(np.nan))
        h = (
            m.astype(F).view(np.uint32) + v.astype(F).view(np.uint32)
            ^ (np.arange(g.size, dtype=np.uint32) * np.uint32(0x9E3779B1) + np.uint32(seed))
        ) * (np.uint32(0x7FEB352D))
        h = (h ^ h >> np.uint32(15)) * np.uint32(0x846CA68B)
    m_exponent, v_exponent = exponent_of(m), exponent_of(v)
    m_codes = encode(m, m_exponent, (h >> np.uint32(6) & np.uint32(0xFFFFF)) / 2.0**20, "m")
    v_codes = encode(v, v_exponent, (h >> np.uint32(12)) / 2.0**20, "v")
    return update, m_codes, m_exponent, v_codes, v_exponent


def step(g, state, factors, seed, row_size, block):
    """g: float32, flat; state: codes and exponents of m and v, flat. Rows of row_size values, cut into blocks."""
    update, new = np.empty_like(g), [np.empty_like(x) for x in state]
    b = 0
    for row in range(0, g.size, row_size):
        for at in range(row, row + row_size, block):
            s = slice(at, min(at + block, row + row_size))
            old = (state[0][s], state[1][b], state[2][s], state[3][b])
            update[s], new[0][s], new[1][b], new[2][s], new[3][b] = step_block(g[s], *old, factors, seed)
            b += 1
    return update, new
