"""Adam with moments of 8 bits: bits against NumPy, transforms and sharding, and what training with it comes to."""

import builtins
import os
import re
import subprocess
import sys

import adam_oracle
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import collectives, mesh_of, put

import jaxquant
from jaxquant import optim

optax = pytest.importorskip("optax")

IMPLEMENTATIONS = ["ffi", "xla", "cuda_emulation"]
EDGES = [np.nan, np.inf, -np.inf, 1e30, -1e25, 0.0, -0.0, 1e-30]


def transformation(**keywords):
    return optim.scale_by_adam8bit(**{"min_size": 0, **keywords})


def gradients(shape, seed, dtype="float32", edges=False):
    rng = np.random.default_rng(seed)
    g = rng.standard_normal(shape) * 1e-3 * np.exp(3 * rng.standard_normal(shape))
    if edges and g.size > 20:
        g.flat[: len(EDGES)] = EDGES
    with np.errstate(over="ignore"):
        return g.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def same(a, b):
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.shape == y.shape and x.dtype == y.dtype
        np.testing.assert_array_equal(x.astype(np.float64), y.astype(np.float64))


# --------------------------------------------------------------------------------------------------------------- values

SHAPES = {  # row size and block that the layout gives
    (1000,): (1000, 250),
    (7, 300): (300, 150),
    (2, 257): (257, 256),
    (3, 4, 16, 24): (384, 192),
    (2, 512): (512, 256),
    (50, 3): (150, 150),
}


@pytest.mark.parametrize(
    "dtype, implementation",
    [
        (dtype, implementation)
        for dtype in ("float32", "bfloat16", "float16")
        for implementation in IMPLEMENTATIONS
        if implementation != "xla" or dtype == "bfloat16"  # compiles for long
    ],
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_steps_have_the_bits_of_the_oracle(shape, dtype, implementation):
    if implementation == "cuda_emulation" and jaxquant._core.ffi.module(implementation) is None:
        pytest.skip("not compiled in")
    row, block = SHAPES[shape]
    tx = transformation(implementation=implementation)
    state = tx.init(jnp.zeros(shape, dtype))
    expected = [np.asarray(x).ravel() for x in (*state.mu, *state.nu)]
    update = jax.jit(tx.update)
    for count in range(1, 4):
        g = gradients(shape, count, dtype, edges=True)
        u, state = update(jnp.asarray(g), state)
        factors = [np.asarray(f) for f in optim._factors(0.9, 0.999, 1e-8, jnp.int32(count), jnp.float32)]
        seed = count * 0x85EBCA6B % 2**32
        wide, expected = adam_oracle.step(g.astype(np.float32).ravel(), expected, factors, seed, row, block)
        with np.errstate(over="ignore"):
            same(u, wide.reshape(shape).astype(g.dtype))
        same([x.ravel() for x in (*state.mu, *state.nu)], expected)


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["portable", "v3"])
def test_instruction_sets_agree(isa):
    if isa not in jaxquant._core.ffi.module("cpu").compiled_isas().split():
        pytest.skip("not compiled in")
    code = (
        "import hashlib, jax, jax.numpy as jnp, numpy as np\n"
        "from jaxquant import optim\n"
        "tx = optim.scale_by_adam8bit(min_size=0); h = hashlib.sha256()\n"
        "for dtype in ('float32', 'bfloat16', 'float16'):\n"
        "    state = tx.init(jnp.zeros((3, 1100), dtype))\n"
        "    for i in range(3):\n"
        "        g = np.random.default_rng(i).standard_normal((3, 1100)).astype('float32')\n"
        "        out = tx.update(jnp.asarray(g, dtype), state); state = out[1]\n"
        "        [h.update(np.asarray(x).tobytes()) for x in jax.tree.leaves(out)]\n"
        "print(h.hexdigest())\n"
    )

    def output(**environment):
        command = [sys.executable, "-P", "-c", code]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout

    assert output(JAXQUANT_ISA=isa) == output()


def test_first_step_is_the_gradients_sign():
    tx = transformation()
    u, _ = tx.update(jnp.array([0.1, -3.0, 1e-5]), tx.init(jnp.zeros(3)))
    np.testing.assert_allclose(u, [1, -1, 1 / (1 + 1e-3)], rtol=1e-5)


def test_codes_keep_their_relative_error():
    """A moment decays by 1/8 at most of itself, but for what lies far below its block's largest."""
    tx = transformation(b1=0.5)
    g = gradients((64, 256), 0)
    _, state = tx.update(jnp.asarray(g), tx.init(jnp.asarray(g)))
    for which, moment, exact in (("m", state.mu, 0.5 * g), ("v", state.nu, np.float32(0.001) * g * g)):
        codes, exponents = (np.asarray(x) for x in moment)
        got = np.stack([adam_oracle.decode(c, e, which) for c, e in zip(codes, exponents[:, 0], strict=True)])
        least = np.abs(exact).max(1, keepdims=True) * 2.0 ** -(14 if which == "m" else 30)
        assert (np.abs(got - exact) <= np.abs(exact) / 8 + least).all(), which


def test_rounding_has_no_bias():
    """Without gradients moments decay by b to the step, though each step is far smaller than the codes' own."""
    tx, n = transformation(b1=0.97), 1 << 16
    g = jnp.asarray(np.random.default_rng(0).uniform(0.1, 1.0, (n // 256, 256)).astype(np.float32))
    update = jax.jit(tx.update)
    _, state = update(g, tx.init(g))

    def decoded(state):
        return [
            np.stack([adam_oracle.decode(np.asarray(c), e, w) for c, e in zip(x.codes, x.exponents[:, 0], strict=True)])
            for w, x in (("m", state.mu), ("v", state.nu))
        ]

    before = decoded(state)
    for _ in range(60):
        _, state = update(jnp.zeros_like(g), state)
    for old, new, b in zip(before, decoded(state), (0.97, 0.999), strict=True):
        ratio = new / (old * b**60)
        assert abs(ratio.mean() - 1) < 4 * ratio.std() / np.sqrt(n)
        assert ratio.std() > 0.01
        neighbours = (ratio - ratio.mean()).ravel()
        assert abs((neighbours[1:] * neighbours[:-1]).mean() / neighbours.var()) < 4 / np.sqrt(n)


# ----------------------------------------------------------------------------------------------------------- robustness


@pytest.mark.parametrize("eps", [1e-8, 0.0])
@pytest.mark.parametrize("b2", [0.999, 0.9, 0.0])
def test_nothing_becomes_nan_or_huge(eps, b2):
    """Outliers, gradients that stop, and gradients whose squares vanish in float32."""
    tx = transformation(eps=eps, b2=b2)
    update = jax.jit(tx.update)
    state = tx.init(jnp.zeros((8, 256)))
    bound = 0.1 / np.sqrt(max(1 - b2, 0.01)) * 8 + 12
    for i in range(120):
        g = gradients((8, 256), i)
        g[0, 3] *= 1e12  # one element of a block far above the others
        g[1] *= 1e-18
        g[2] = 0
        g[3] *= i < 5
        g[4] *= 1e9 if i == 10 else 1
        u, state = update(jnp.asarray(g), state)
        u = np.asarray(u)
        assert np.isfinite(u).all()
        if eps and b2 >= 0.9:
            assert np.abs(u).max() < bound, (i, np.abs(u).max(1))


def test_a_gradient_that_is_not_finite_stays_where_it_is():
    tx = transformation()
    p = jnp.zeros((2, 256))
    g = np.ones((2, 256), np.float32)
    g[0, :3] = np.nan, np.inf, -np.inf
    u, state = tx.update(jnp.asarray(g), tx.init(p))
    assert np.isnan(u[0, :3]).all() and np.isfinite(u[0, 3:]).all() and np.isfinite(u[1]).all()
    u, state = tx.update(jnp.ones((2, 256)), state)
    assert np.isfinite(u).all()


def test_any_bytes_are_a_state():
    tx = transformation()
    rng = np.random.default_rng(0)
    state = tx.init(jnp.zeros((4, 512)))
    garbage = jax.tree.map(lambda x: jnp.asarray(rng.integers(0, 256, x.shape).astype(np.uint8)), (state.mu, state.nu))
    u, _ = tx.update(jnp.ones((4, 512)), state._replace(mu=garbage[0], nu=garbage[1]))
    assert np.isfinite(u).all()


# ------------------------------------------------------------------------------------------------------------- training


def regression(tx, steps=600):
    """Loss after training, and the parameters, of a small network on noisy targets of another."""
    keys = jax.random.split(jax.random.key(0), 5)

    def network(p, x):
        return jax.nn.gelu(x @ p["a"] + p["b"]) @ p["c"]

    def new(key, scale):
        k = jax.random.split(key)
        return {"a": scale * jax.random.normal(k[0], (16, 64)) / 4, "b": jnp.zeros(64),
                "c": scale * jax.random.normal(k[1], (64, 8)) / 8}  # fmt: skip

    params, teacher = new(keys[0], 1.0), new(keys[1], 1.5)
    held_out = jax.random.normal(keys[2], (2048, 16))

    def loss(p, x, noise):
        return jnp.mean((network(p, x) - network(teacher, x) - noise) ** 2)

    def step(carry, key):
        p, state = carry
        x = jax.random.normal(key, (64, 16))
        noise = 0.1 * jax.random.normal(jax.random.fold_in(key, 1), (64, 8))
        updates, state = tx.update(jax.grad(loss)(p, x, noise), state, p)
        return (optax.apply_updates(p, updates), state), None

    (trained, _), _ = jax.jit(jax.lax.scan, static_argnums=0)(
        step, (params, tx.init(params)), jax.random.split(keys[3], steps)
    )
    return float(loss(trained, held_out, 0)), np.concatenate([np.ravel(x) for x in jax.tree.leaves(trained)])


def test_training_is_that_of_adam():
    schedule = optax.cosine_decay_schedule(1e-2, 600)
    expected, theirs = regression(optax.adam(schedule))
    loss, ours = regression(optim.adam8bit(schedule, min_size=0))
    assert loss < 1.05 * expected
    assert np.linalg.norm(ours - theirs) < 0.1 * np.linalg.norm(theirs)


def test_small_parameters_are_adam_itself():
    schedule = optax.cosine_decay_schedule(1e-2, 50)
    expected, theirs = regression(optax.adam(schedule), 50)
    loss, ours = regression(optim.adam8bit(schedule), 50)
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)
    assert loss == pytest.approx(expected, rel=1e-3)


def test_weight_decay():
    params = jnp.full((64, 64), 2.0)
    ours, theirs = optim.adamw8bit(1e-2, weight_decay=0.1), optax.adamw(1e-2, weight_decay=0.1)
    g = jnp.asarray(gradients((64, 64), 0))
    u, _ = ours.update(g, ours.init(params), params)
    expected, _ = theirs.update(g, theirs.init(params), params)
    np.testing.assert_allclose(u, expected, rtol=1e-5)


# ----------------------------------------------------------------------------------------------------------- the state


def test_state_takes_two_bytes_a_parameter():
    params = {"w": jnp.zeros((512, 1024)), "small": jnp.zeros(100)}
    state = optim.scale_by_adam8bit().init(params)
    large = jax.tree.leaves((state.mu["w"], state.nu["w"]))
    assert sum(x.nbytes for x in large) == 2 * (512 * 1024 + 512 * 4)
    assert state.mu["small"].dtype == state.nu["small"].dtype == jnp.float32
    assert state.count.dtype == jnp.int32


@pytest.mark.parametrize(
    "shape, block", [((512, 4096), (-1, 256)), ((3, 3, 64, 64), (-2, 4)), ((64,), (-1, 64)), ((1000, 1), (-2, 250)),
                     ((50257, 8), (-2, 29)), ((10, 509), (-1, 256)), ((2, 3), (-2, 2))],
)  # fmt: skip
def test_blocks_are_whole_where_they_can_be(shape, block):
    assert optim._blocks(shape, 256) == block


def test_the_state_is_updated_in_place():
    tx = transformation()
    state = tx.init(jnp.zeros((64, 512)))
    step = jax.jit(lambda s, x: tx.update(x @ x.T @ jnp.ones((64, 512)), s), donate_argnums=0)
    compiled = step.lower(state, jnp.ones((64, 64))).compile()
    # A copy of the state, of its size at least, would be a copy instruction or fusion of bytes.
    assert not re.search(r"= u8\[64,512\]\S* (copy|fusion)", compiled.as_text())


def test_scalars_empty_arrays_and_absent_leaves():
    params = {"scalar": jnp.float32(1), "empty": jnp.zeros((0, 8)), "none": None, "w": jnp.ones((3, 5))}
    for tx in (transformation(), optim.scale_by_adam8bit()):
        u, state = tx.update(params, tx.init(params))
        u, state = jax.jit(tx.update)(params, state)
        assert u["scalar"].shape == () and u["empty"].shape == (0, 8) and u["none"] is None
        np.testing.assert_allclose(u["w"], np.ones((3, 5)), rtol=0.1)


def test_float64_keeps_its_own(x64):
    tx, p = transformation(), jnp.zeros((8, 8), jnp.float64)
    u, state = tx.update(p + 1, tx.init(p))
    assert u.dtype == state.mu.dtype == jnp.float64
    mixed, _ = tx.update(jnp.ones((8, 8), jnp.float64), tx.init(jnp.zeros((8, 8))))
    assert mixed.dtype == jnp.float64


def test_state_survives_a_checkpoint():
    tx = optim.adam8bit(1e-3, min_size=0)
    params = {"w": jnp.ones((8, 300))}
    _, state = tx.update(params, tx.init(params))
    leaves, tree = jax.tree.flatten(state)
    restored = tree.unflatten([jnp.asarray(np.asarray(x)) for x in leaves])
    same(tx.update(params, state), tx.update(params, restored))
    assert jax.tree.structure(optax.tree.map_params(tx, lambda x: x, state)) == tree


# ----------------------------------------------------------------------------------------------------------- transforms


@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_eager_jit_and_scan_agree(implementation):
    tx = transformation(implementation=implementation)
    g = jnp.stack([jnp.asarray(gradients((5, 300), i)) for i in range(3)])
    state = jitted = tx.init(g[0])
    update, eager = jax.jit(tx.update), []
    for x in g:
        u, state = tx.update(x, state)
        eager.append(u)
        same(update(x, jitted), (u, state))
        jitted = state

    def body(s, x):
        u, s = tx.update(x, s)
        return s, u

    last, stacked = jax.jit(lambda s, g: jax.lax.scan(body, s, g))(tx.init(g[0]), g)
    same((stacked, last), (jnp.stack(eager), state))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["ffi", "xla"])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("own_count", [False, True])
def test_vmap_is_a_loop(implementation, axis, own_count):
    tx = transformation(implementation=implementation)
    n, g = 3, [jnp.asarray(gradients((5, 300), i)) for i in range(3)]
    states = [tx.update(x, tx.init(x))[1] for x in g]
    counts = [jnp.int32(7 * i if own_count else 4) for i in range(n)]
    states = [s._replace(count=c) for s, c in zip(states, counts, strict=True)]
    expected = [tx.update(x, s) for x, s in zip(g, states, strict=True)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *states)._replace(count=jnp.stack(counts) if own_count else 4)
    in_state = optim.Adam8bitState(0 if own_count else None, 0, 0)
    out = jax.jit(jax.vmap(tx.update, (axis, in_state)))(jnp.stack(g, axis), stacked)
    for i in range(n):
        same(jax.tree.map(lambda x, i=i: x[i], out[0]), expected[i][0])
        same(jax.tree.map(lambda x, i=i: x[i], (out[1].mu, out[1].nu)), (expected[i][1].mu, expected[i][1].nu))


def test_vmap_of_vmap():
    tx = transformation()
    g = jnp.asarray(gradients((2, 3, 4, 300), 0))
    init = jax.vmap(jax.vmap(tx.init))(g)
    init = init._replace(count=jnp.arange(6, dtype=jnp.int32).reshape(2, 3))
    out = jax.vmap(jax.vmap(tx.update))(g, init)
    for i in range(2):
        for j in range(3):
            one = jax.tree.map(lambda x, i=i, j=j: x[i, j], (g, init, out))
            same(tx.update(one[0], one[1]), one[2])


# ------------------------------------------------------------------------------------------------------------- sharding

SPECS = {  # of a (8, 16, 1024) array: whole blocks on each shard
    "first": P("a"), "middle": P(None, "b"), "last": P(None, None, "a"), "two": P("a", None, "b"),
    "both": P(("a", "b")),
}  # fmt: skip


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_sharded_steps_need_no_communication(spec, kind):
    mesh, tx, g = mesh_of((4, 2), kind), transformation(), jnp.asarray(gradients((8, 16, 1024), 0))
    expected = tx.update(g, tx.init(g))
    sharded = put(mesh, spec, g)
    with jax.set_mesh(mesh):
        state = tx.init(sharded)
        for x in jax.tree.leaves(state.mu):
            assert x.sharding.is_equivalent_to(sharded.sharding, 3), x.shape
        assert collectives(tx.update, sharded, state) == {}
        u, new = jax.jit(tx.update)(sharded, state)
    assert u.sharding.is_equivalent_to(sharded.sharding, 3)
    assert new.nu.exponents.sharding.is_equivalent_to(sharded.sharding, 3)
    same((u, new), expected)


def test_shards_that_cut_blocks_are_gathered():
    mesh, tx, g = mesh_of((4, 2)), transformation(), jnp.asarray(gradients((8, 256), 0))
    sharded = put(mesh, P(None, "a"), g)
    state = tx.init(sharded)
    same(jax.jit(tx.update)(sharded, state), tx.update(g, tx.init(g)))
    # A block for each shard needs none.
    fine = transformation(block_size=64)
    assert collectives(fine.update, sharded, fine.init(sharded)) == {}


def test_batches_of_counts_are_sharded_with_them():
    mesh, tx, g = mesh_of((4, 2)), transformation(), jnp.asarray(gradients((4, 6, 512), 0))
    state = jax.vmap(tx.init)(g)._replace(count=jnp.arange(4, dtype=jnp.int32))
    expected = jax.vmap(tx.update)(g, state)
    placed = jax.tree.map(lambda x: put(mesh, P("a"), x), (g, state))
    same(jax.jit(jax.vmap(tx.update))(*placed), expected)


def test_inside_shard_map():
    mesh, tx, g = mesh_of((4, 2)), transformation(), jnp.asarray(gradients((8, 512), 0))
    state = tx.init(g)
    specs = optim.Adam8bitState(P(), optim.Moment(P("a"), P("a")), optim.Moment(P("a"), P("a")))
    step = jax.shard_map(tx.update, mesh=mesh, in_specs=(P("a"), specs), out_specs=(P("a"), specs))
    same(jax.jit(step)(g, state), tx.update(g, state))


def test_export():
    tx, g = transformation(), jnp.ones((4, 256))
    state = tx.init(g)
    leaves, tree = jax.tree.flatten(state)
    function = jax.jit(lambda g, *leaves: jax.tree.leaves(tx.update(g, tree.unflatten(leaves))))
    exported = jax.export.export(function, disabled_checks=jaxquant.export_checks())(g, *leaves)
    again = jax.export.deserialize(exported.serialize())
    same(again.call(g, *leaves), tx.update(g, state))


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("make", [optim.scale_by_adam8bit, lambda: optim.adam8bit(1e-3), lambda: optim.adamw8bit(1e-3)])
def test_without_optax(monkeypatch, make):
    real = builtins.__import__

    def refuse(name, *arguments, **keywords):
        if name == "optax":
            raise ImportError(name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match="pip install optax"):
        make()


def test_errors():
    with pytest.raises(ValueError, match="block_size: expected 1 to 2048, got 4096"):
        optim.scale_by_adam8bit(block_size=4096)
    with pytest.raises(ValueError, match="b2: expected a number from 0 to below 1"):
        optim.scale_by_adam8bit(b2=1.0)
    with pytest.raises(ValueError, match="implementation"):
        optim.scale_by_adam8bit(implementation="fast")
    with pytest.raises(TypeError, match="params: expected floating-point arrays, got int32"):
        transformation().init(jnp.zeros(3, jnp.int32))
    state = transformation(block_size=64).init(jnp.zeros((2, 256)))
    with pytest.raises(ValueError, match="state was made for other parameters or another block_size"):
        transformation().update(jnp.zeros((2, 256)), state)
    with pytest.raises(ValueError, match="state was made for other"):
        transformation().update(jnp.zeros((2, 128)), state)


BAD = {
    "axis": ({"axis": 0}, "axis: expected a negative one"),
    "length": ({"length": 0}, "block: expected 1 to 2048 values"),
    "exponents": ({"length": 128}, "exponents: expected one for each block"),
    "codes": ({"codes": (2, 255)}, "codes: expected shape"),
    "factors": ({"factors": (3, 6)}, "factors and seed: expected"),
}


@pytest.mark.parametrize("change, message", BAD.values(), ids=BAD)
@pytest.mark.parametrize("prefix", ["jaxquant_", "jaxquant_emulated_"])
def test_handlers_refuse(prefix, change, message):
    if prefix != "jaxquant_" and jaxquant._core.ffi.module("cuda_emulation") is None:
        pytest.skip("not compiled in")
    codes, factors = jnp.zeros(change.get("codes", (2, 256)), jnp.uint8), jnp.ones(change.get("factors", (1, 6)))
    exponents = jnp.zeros((2, 1), jnp.uint8)
    operands = (jnp.zeros((2, 256)), codes, exponents, codes, exponents, factors, jnp.zeros(len(factors), jnp.uint32))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[:5]]
    attributes = {"axis": np.int64(change.get("axis", -1)), "length": np.int64(change.get("length", 256))}
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(jax.ffi.ffi_call(f"{prefix}adam8bit", shapes)(*operands, **attributes))
