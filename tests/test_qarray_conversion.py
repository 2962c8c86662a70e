"""QArray's shardings, and the way to qwix and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of
from oracle import assert_same_bits

import jaxquant
from jaxquant import PerBlock, PerGroup, PerToken, QArray

X = np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)
CASES = {
    "int8": {"qtype": jnp.int8},
    "int4": {"qtype": jnp.int4, "granularity": PerGroup(8)},
    "uint4": {"qtype": jnp.uint4, "symmetric": False},
    "uint8": {"qtype": jnp.uint8, "symmetric": False, "granularity": PerBlock((4, 8))},
    "int2": {"qtype": jnp.int2},
}


@pytest.mark.parametrize("case", CASES)
def test_shardings(case):
    q, mesh = jaxquant.dynamic_quantize(X, **CASES[case]), mesh_of((2, 4))
    for spec in (P(), P("a"), P(None, "b"), P("b", "a")):
        where = q.shardings(NamedSharding(mesh, spec))
        placed = jax.device_put(q, where)
        entries = (*spec, None, None)[:2]
        assert placed.data.sharding.spec == P(*entries)
        for d, (entry, m) in enumerate(zip(entries, q.scale.shape, strict=True)):
            parts = mesh.shape[entry] if entry else 1
            assert (placed.scale.sharding.spec[d] == entry) == (entry is None or (m > 1 and m % parts == 0))
        jax.tree.map(assert_same_bits, placed, q)
        back = jax.jit(lambda q: q.dequantize(), in_shardings=(where,))(placed)
        assert_same_bits(back, q.dequantize())


def test_shardings_refuse_to_cut_a_byte():
    q = jaxquant.dynamic_quantize(X[:, :12], qtype=jnp.int4)
    with pytest.raises(ValueError, match="shards of whole bytes of 4-bit codes"):
        q.shardings(NamedSharding(mesh_of((2, 4)), P(None, "b")))


@pytest.mark.parametrize("case", CASES)
def test_qwix(case):
    qwix = pytest.importorskip("qwix")
    q = jaxquant.dynamic_quantize(X, **CASES[case])
    theirs = q.to_qwix()
    assert isinstance(theirs, qwix.QArray) and theirs.qvalue.dtype == CASES[case]["qtype"]
    np.testing.assert_allclose(qwix.dequantize(theirs), q.dequantize(), rtol=1e-6)
    back = QArray.from_qwix(theirs)
    for ours, again in zip(jax.tree.leaves(q), jax.tree.leaves(back), strict=True):
        assert_same_bits(again, ours)
    assert back.qtype == q.qtype and back.shape == q.shape


def test_from_qwix_takes_what_qwix_makes():
    qwix = pytest.importorskip("qwix")
    for qtype in (jnp.int8, jnp.int4):
        theirs = qwix.quantize(jnp.asarray(X), qtype, channelwise_axes=[0], tiled_axes={1: 8})
        np.testing.assert_allclose(QArray.from_qwix(theirs).dequantize(), qwix.dequantize(theirs), rtol=1e-6)


def test_sixteen_bits_have_no_place_in_qwix():
    pytest.importorskip("qwix")
    with pytest.raises(TypeError, match="at most 8 bits"):
        jaxquant.dynamic_quantize(X, PerToken(), qtype=jnp.int16).to_qwix()
