"""pack, unpack and the packed form of quantize: 4- and 2-bit codes along the last axis, low bits first."""

import granularities
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import assert_same_bits

import jaxquant

QTYPES = sorted(oracle.BITS)
SHAPES = [(1,), (2,), (3,), (7,), (8,), (64,), (129,), (3, 5), (2, 3, 9), (4, 1, 2, 3, 6), (5, 1)]


def codes(qtype, shape, seed=0):
    low, high = oracle.RANGES[qtype]
    return np.random.default_rng(seed).integers(low, high, shape, endpoint=True).astype(oracle.CONTAINERS[qtype])


@pytest.mark.parametrize("qtype", QTYPES)
def test_every_byte(qtype, implementation):
    """All 256 bytes unpack to the codes their bits spell, and pack again to themselves."""
    qdtype = getattr(jnp, qtype)
    every = np.arange(256, dtype=np.uint8)
    size = 256 * 8 // oracle.BITS[qtype]
    unpacked = jaxquant.unpack(every, qdtype, size, implementation=implementation)
    assert_same_bits(unpacked, oracle.unpack(every, qtype, size))
    assert_same_bits(jaxquant.pack(unpacked, qdtype, implementation=implementation), every)
    # One byte a row: each is then the only, last byte of its row.
    rows = jaxquant.unpack(every[:, None], qdtype, 8 // oracle.BITS[qtype], implementation=implementation)
    assert_same_bits(np.asarray(rows).reshape(-1), oracle.unpack(every, qtype, size))


def test_low_bits_come_first(implementation):
    pack = jax.jit(jaxquant.pack, static_argnums=1, static_argnames="implementation")
    assert_same_bits(pack(np.uint8([1, 2, 3]), jnp.uint4, implementation=implementation), np.uint8([0x21, 0x03]))
    assert_same_bits(pack(np.int8([-1, 7, -8]), jnp.int4, implementation=implementation), np.uint8([0x7F, 0x08]))
    four = np.uint8([1, 2, 3, 0, 2])
    assert_same_bits(pack(four, jnp.uint2, implementation=implementation), np.uint8([0b00111001, 0b10]))
    assert_same_bits(pack(np.int8([-1, -2, 0, 1]), jnp.int2, implementation=implementation), np.uint8([0b01001011]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("qtype", QTYPES)
def test_round_trip(qtype, shape, implementation):
    q = codes(qtype, shape)
    qdtype = getattr(jnp, qtype)

    @jax.jit
    def there_and_back(q):
        packed = jaxquant.pack(q, qdtype, implementation=implementation)
        return packed, jaxquant.unpack(packed, qdtype, shape[-1], implementation=implementation)

    packed, unpacked = there_and_back(q)
    assert packed.nbytes == q.size // shape[-1] * -(-shape[-1] * oracle.BITS[qtype] // 8)
    assert_same_bits(packed, oracle.pack(q, qtype))
    assert_same_bits(unpacked, q)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)], ids=str)
@pytest.mark.parametrize("qtype", QTYPES)
def test_empty(qtype, shape, implementation):
    q = codes(qtype, shape)
    packed = jaxquant.pack(q, getattr(jnp, qtype), implementation=implementation)
    assert_same_bits(packed, oracle.pack(q, qtype))
    unpacked = jaxquant.unpack(packed, getattr(jnp, qtype), shape[-1], implementation=implementation)
    assert_same_bits(unpacked, q)


@pytest.mark.parametrize(
    "granularity", [*granularities.FEW, granularities.PER_CHANNEL_MIDDLE, granularities.EMPTY], ids=repr
)
@pytest.mark.parametrize("qtype", QTYPES)
def test_packed_quantize_is_pack_of_quantize(qtype, granularity, implementation):
    operands = granularity.operands("float32", qtype)
    keywords = {"qtype": getattr(jnp, qtype), "implementation": implementation, **granularity.keywords}

    @jax.jit
    def both(x, scale, zero_point):
        q = jaxquant.quantize(x, scale, zero_point, **keywords)
        return (
            jaxquant.quantize(x, scale, zero_point, packed=True, **keywords),
            jaxquant.pack(q, keywords["qtype"], implementation=implementation),
        )

    fused, separate = both(operands.x, operands.scale, operands.zero_point)
    q = oracle.quantize(operands.x, operands.scale, operands.zero_point, qtype=qtype, **granularity.keywords)
    assert_same_bits(fused, oracle.pack(q, qtype))
    assert_same_bits(separate, oracle.pack(q, qtype))


@pytest.mark.parametrize("in_axis", [0, 1, 2])
@pytest.mark.parametrize("qtype", QTYPES)
def test_vmap(qtype, in_axis, implementation):
    """The last axis of the unbatched array is packed, wherever the batch axis lies."""
    qdtype = getattr(jnp, qtype)
    q = codes(qtype, (3, 4, 7))
    rows = np.moveaxis(q, in_axis, 0)
    pack = jax.vmap(lambda q: jaxquant.pack(q, qdtype, implementation=implementation), in_axes=in_axis)
    packed = pack(q)
    assert_same_bits(packed, np.stack([oracle.pack(row, qtype) for row in rows]))
    unpack = jax.vmap(
        lambda p: jaxquant.unpack(p, qdtype, rows.shape[-1], implementation=implementation), in_axes=in_axis, out_axes=1
    )
    assert_same_bits(unpack(np.moveaxis(np.asarray(packed), 0, in_axis)), np.moveaxis(rows, 0, 1))


@pytest.mark.parametrize("qtype", QTYPES)
def test_vmap_of_packed_quantize(qtype, implementation):
    x = np.random.default_rng(2).normal(size=(7, 3, 4)).astype(np.float32)
    call = jax.vmap(
        lambda x: jaxquant.quantize(x, 0.3, qtype=getattr(jnp, qtype), packed=True, implementation=implementation),
        in_axes=2,
    )
    wanted = [oracle.pack(oracle.quantize(x[..., i], np.float32(0.3), qtype=qtype), qtype) for i in range(4)]
    assert_same_bits(call(x), np.stack(wanted))


def test_large(implementation):
    q = codes("int4", (1031, 1033))
    packed = jaxquant.pack(q, jnp.int4, implementation=implementation)
    assert_same_bits(packed, oracle.pack(q, "int4"))
    assert_same_bits(jaxquant.unpack(packed, jnp.int4, 1033, implementation=implementation), q)


def test_codes_from_a_wider_container_keep_their_low_bits(implementation):
    """-1 is all ones; in four bits it is 15, and comes back as -1."""
    q = np.int8([-1, -8, 7, 0])
    packed = jaxquant.pack(q, jnp.int4, implementation=implementation)
    assert_same_bits(packed, np.uint8([0x8F, 0x07]))
    assert_same_bits(jaxquant.unpack(packed, jnp.uint4, 4, implementation=implementation), np.uint8([15, 8, 7, 0]))
