"""jax.export: round trips through bytes, platforms without a kernel, symbolic sizes, gradients, several devices."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import transforms
from jax import export
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, put
from operations import NAMED
from oracle import assert_same_bits
from transforms import BLOCKS, CHANNELS, Case

import jaxquant

GOLDEN = pathlib.Path(__file__).parent / "golden" / "affine_v1.stablehlo"
NAMES = ["fake_quantize", "quantize", "dequantize", "quantize_backward", "quantize_packed", "pack", "unpack"]


def exported(function, *arguments, platforms=None, vjp_order=0):
    """Serialised and read back."""
    options = {"disabled_checks": jaxquant.export_checks()}
    if platforms is not None:
        options["platforms"] = platforms
    module = export.export(jax.jit(function), **options)(*arguments)
    return export.deserialize(module.serialize(vjp_order=vjp_order))


@pytest.mark.parametrize("granularity", [CHANNELS, BLOCKS], ids=repr)
@pytest.mark.parametrize("name", NAMES)
def test_round_trip_for_every_platform(name, granularity):
    case = Case(NAMED[name], granularity, None)
    module = exported(case.call, *case.operands, platforms=["cpu", "cuda", "tpu"])
    assert module.platforms == ("cpu", "cuda", "tpu")
    case.same(module.call(*case.operands), case.compiled(*case.operands))


@pytest.mark.smoke
def test_only_our_own_targets_and_none_on_other_platforms():
    case = Case(NAMED["fake_quantize"], CHANNELS, None)
    cpu = exported(case.call, *case.operands, platforms=["cpu"]).mlir_module()
    tpu = exported(case.call, *case.operands, platforms=["tpu"]).mlir_module()
    assert "jaxquant_fake_quantize" in cpu
    assert "custom_call" not in tpu
    through_xla = Case(NAMED["fake_quantize"], CHANNELS, "xla")
    assert "custom_call" not in exported(through_xla.call, *case.operands, platforms=["cpu"]).mlir_module()


def test_without_export_checks_jax_refuses():
    with pytest.raises(ValueError, match="jaxquant_fake_quantize"):
        export.export(jax.jit(lambda x: jaxquant.fake_quantize(x, 0.5, implementation="ffi")))(jnp.ones(3))


def test_a_kernel_that_a_platform_lacks_is_an_error():
    with pytest.raises(NotImplementedError, match=r'fake_quantize: implementation="ffi".*no kernel for this platform'):
        exported(lambda x: jaxquant.fake_quantize(x, 0.5, implementation="ffi"), jnp.ones(3), platforms=["tpu"])


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
@pytest.mark.parametrize("name", ["fake_quantize", "quantize_packed", "fake_quantize_gradient"])
def test_symbolic_batch(name, implementation):
    """One module for every batch size: the mapped axis, and an axis of x itself."""
    case = Case(NAMED[name], CHANNELS, implementation)
    (batch,) = export.symbolic_shape("batch")
    mapped = case.operation.operands[:-2]
    axes = [0] * len(mapped) + [None, None]
    symbolic = [
        jax.ShapeDtypeStruct((batch, *a.shape) if d == 0 else a.shape, a.dtype)
        for a, d in zip(case.operands, axes, strict=True)
    ]
    module = exported(jax.vmap(case.call, axes), *symbolic)
    for size in (1, 3):
        stacked = [
            jnp.stack(case.examples(size, i)) if d == 0 else a
            for i, (a, d) in enumerate(zip(case.operands, axes, strict=True))
        ]
        case.same(module.call(*stacked), transforms.looped(case, case.compiled, range(len(mapped)), size))


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_symbolic_axes_of_x(implementation):
    """Rows, and whole blocks: sums whose length is known only at run time are ordered all the same."""
    rows, groups = export.symbolic_shape("rows, groups")

    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def loss(x, scale, dy):
        return (jaxquant.fake_quantize(x, scale, block_shape=(-1, 4), implementation=implementation) * dy).sum()

    gradient = jax.grad(loss, (0, 1))
    module = exported(gradient, f32(rows, 4 * groups), f32(1, groups), f32(rows, 4 * groups))
    rng = np.random.default_rng(0)
    for shape in ((3, 8), (400, 12)):
        x, dy = rng.normal(size=(2, *shape)).astype(np.float32) * 40
        scale = rng.uniform(0.1, 1, (1, shape[1] // 4)).astype(np.float32)
        expected = oracle.fake_quantize_gradient(dy, x, scale)
        dx, dscale = module.call(x, scale, dy)
        assert_same_bits(dx, expected.dx)
        oracle.assert_same_sum(dscale, expected.dscale, np.float32, exact=implementation == "ffi")


@pytest.mark.smoke
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_gradient_of_an_exported_function(implementation):
    case = Case(NAMED["fake_quantize"], CHANNELS, implementation)
    platforms = ["cpu", "tpu"]
    module = exported(case.call, *case.operands, platforms=platforms, vjp_order=1)
    gradient = jax.grad(lambda *a: case.loss(*a, call=module.call), (0, 1, 2))(*case.operands)
    case.same_gradient(gradient, case.gradient(*case.operands), (0, 1, 2))
    backward = module.vjp()
    case.same_gradient(backward.call(*case.operands, case.weights[0]), case.gradient(*case.operands), (0, 1, 2))


# ------------------------------------------------------------------------------------------------------ several devices


def sharded_operands():
    mesh = mesh_of((2, 2))
    x = np.linspace(-3, 3, 64, dtype=np.float32).reshape(8, 8)
    return put(mesh, P("a", "b"), x), put(mesh, P(None, "b"), np.full((1, 8), 0.25, np.float32))


def test_several_devices_through_xla():
    x, scale = sharded_operands()

    def f(x, s):
        return jaxquant.fake_quantize(x, s, implementation="xla")

    module = exported(f, x, scale)
    assert module.nr_devices == 4
    out = jax.jit(module.call)(x, scale)
    assert_same_bits(out, oracle.fake_quantize(np.asarray(x), np.asarray(scale)))
    assert out.sharding.is_equivalent_to(x.sharding, 2)


@pytest.mark.smoke
def test_several_devices_with_kernels_is_a_clear_error():
    x, scale = sharded_operands()

    def f(x, s):
        return jaxquant.fake_quantize(x, s, implementation="ffi")

    with pytest.raises(
        NotImplementedError, match=r'fake_quantize: jax.export cannot .* 4 devices; .*implementation="xla"'
    ):
        exported(f, x, scale)


def test_several_devices_with_kernels_inside_shard_map():
    """The remedy that the error names."""
    x, scale = sharded_operands()
    mesh = x.sharding.mesh

    def f(x, s):
        return jaxquant.fake_quantize(x, s, implementation="ffi")

    mapped = jax.shard_map(f, mesh=mesh, in_specs=(P("a", "b"), P(None, "b")), out_specs=P("a", "b"))
    module = exported(mapped, x, scale)
    assert "jaxquant_fake_quantize" in module.mlir_module()
    assert_same_bits(jax.jit(module.call)(x, scale), oracle.fake_quantize(np.asarray(x), np.asarray(scale)))


# --------------------------------------------------------------------------------------------------------------- golden


def golden_function(x, scale, zero_point, dy):
    """Everything with a serialised target, on codes of 4 bits."""
    options = {"qtype": jnp.int4, "implementation": "ffi"}
    y, backward = jax.vjp(lambda *a: jaxquant.fake_quantize(*a, **options), x, scale, zero_point)
    carried, codes_backward = jax.vjp(lambda *a: jaxquant.quantize(*a, dtype=x.dtype, **options), x, scale, zero_point)

    def dequantize(*a):
        return jaxquant.dequantize(*a, implementation="ffi")

    back, back_backward = jax.vjp(dequantize, carried, scale, zero_point)
    packed = jaxquant.quantize(x, scale, zero_point, packed=True, **options)
    codes = jaxquant.unpack(packed, jnp.int4, x.shape[-1], implementation="ffi")
    repacked = jaxquant.pack(codes, jnp.int4, implementation="ffi")
    return (y, back, carried, codes, packed, repacked), (backward(dy), codes_backward(dy), back_backward(dy))


def golden_export():
    checks = jaxquant.export_checks()
    return export.export(jax.jit(golden_function), platforms=["cpu"], disabled_checks=checks)(*golden_operands())


def golden_operands():
    rng = np.random.default_rng(7)
    x, dy = rng.normal(size=(2, 6, 5)).astype(np.float32) * 3
    return x, np.linspace(0.1, 0.6, 6, dtype=np.float32)[:, None], np.float32(rng.integers(-2, 3, (6, 1))), dy


@pytest.mark.smoke
def test_golden_module():
    """A module serialised by an earlier version still runs: targets and attributes keep their meaning.

    Never regenerate it to make this pass; a changed meaning needs a new target name. What is stored is the StableHLO
    inside the exported module, readable for years; JAX itself reads its own envelope for six months only.
    """
    operands = golden_operands()
    module = dataclasses.replace(golden_export(), mlir_module_serialized=GOLDEN.read_bytes())
    values, gradients = module.call(*operands)
    x, scale, zero_point, dy = operands
    grid = {"qtype": "int4"}
    codes = oracle.quantize(x, scale, zero_point, **grid)
    carried = codes.astype(np.float32)
    packed = oracle.pack(codes, "int4")
    y, back = oracle.fake_quantize(x, scale, zero_point, **grid), oracle.dequantize(codes, scale, zero_point)
    for actual, expected in zip(values, (y, back, carried, codes, packed, packed), strict=True):
        assert_same_bits(actual, expected)
    expected_gradients = (
        oracle.fake_quantize_gradient(dy, x, scale, zero_point, **grid),
        oracle.quantize_gradient(dy, x, scale, zero_point, **grid),
        oracle.dequantize_gradient(dy, carried, scale, zero_point),
    )
    for (dx, dscale, dzero_point), expected in zip(gradients, expected_gradients, strict=True):
        assert_same_bits(dx, expected.dx)
        assert_same_bits(dscale, expected.dscale.value)
        assert_same_bits(dzero_point, expected.dzero_point.value)


if __name__ == "__main__":
    # Run once with the oldest supported JAX, when a target is added under a new name.
    GOLDEN.write_bytes(golden_export().mlir_module_serialized)
