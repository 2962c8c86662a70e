"""The quantised products of layers: values against NumPy, gradients, transformations; rules; what imports what."""

import doctest
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant
from jaxquant import PerToken, observers
from jaxquant.nn import Rules, Spec, UnmatchedRules, as_dot_general, as_einsum, layers, products
from jaxquant.nn.scales import Scales, exponent_of, observed, rounded, scale_of

SPECS = {
    "W8A8": Spec(),
    "W4A8": Spec(w_qtype=jnp.int4),
    "W2A8 asymmetric": Spec(w_qtype=jnp.int2, x_qtype=jnp.uint8, symmetric=False),
    "groups": Spec(w_qtype=jnp.int4, w_granularity=jaxquant.PerGroup(8, axis=0)),
    "tensors": Spec(w_granularity=jaxquant.PerTensor(), x_granularity=jaxquant.PerTensor()),
    "learned groups": Spec(w_qtype=jnp.int4, w_granularity=jaxquant.PerGroup(8, axis=0), learned=True),
    "weight-only": Spec(w_qtype=jnp.int4, x_qtype=None),
    "learned": Spec(w_qtype=jnp.int4, learned=True),
    "learned unsigned": Spec(x_qtype=jnp.uint8, learned=True),
}
MATRIX = (((1,), (0,)), ((), ()))


def uniform(seed, shape):
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def codes_of(x, axis, low, high, symmetric):
    """NumPy's own: codes, scale and zero point, of a scale shared along `axis`."""
    least, most = np.minimum(x.min(axis, keepdims=True), 0), np.maximum(x.max(axis, keepdims=True), 0)
    if symmetric:
        scale = np.maximum(-least, most) / np.float32(high)
        return np.clip(np.round(x / scale), -high, high), scale, np.float32(0)
    scale = (most - least) / np.float32(high - low)
    zero_point = np.clip(low - np.round(least / scale), low, high)
    return np.clip(np.round(x / scale) + zero_point, low, high), scale, zero_point


def limits(qtype):
    info = jnp.iinfo(qtype)
    return int(info.min), int(info.max)


@pytest.mark.parametrize("spec", [SPECS[name] for name in ("W8A8", "W4A8", "W2A8 asymmetric")], ids=repr)
def test_a_product_is_that_of_the_integers(spec):
    x, w = uniform(0, (5, 24)), uniform(1, (24, 7))
    a, a_scale, a_zero = codes_of(x, 1, *limits(spec.x_qtype), spec.symmetric)
    b, b_scale, _ = codes_of(w, 0, *limits(spec.w_qtype), True)
    expected = ((a - a_zero) @ b).astype(np.float32) * b_scale * a_scale
    np.testing.assert_array_equal(as_dot_general(spec)(x, w, MATRIX), expected)


@pytest.mark.parametrize(
    "strides, dilation, groups, padding", [(1, 1, 1, "SAME"), (2, 1, 1, 1), ((1, 2), (2, 1), 2, "VALID")]
)
def test_a_convolution_is_that_of_the_integers(strides, dilation, groups, padding):
    """Within the rounding of float32, in which the sum over the window is otherwise taken."""
    x, w, bias = uniform(0, (3, 9, 8, 4)), uniform(1, (3, 2, 4 // groups, 6)), uniform(2, (6,))
    a, a_scale, _ = codes_of(x, (1, 2, 3), -128, 127, True)
    b, b_scale, _ = codes_of(w, (0, 1, 2), -128, 127, True)
    pair = {"strides": strides, "dilation": dilation}
    window, rate = ((v, v) if isinstance(v, int) else v for v in pair.values())
    pads = [(padding, padding)] * 2 if isinstance(padding, int) else padding
    exact = jax.lax.conv_general_dilated(
        a.astype(np.int32), b.astype(np.int32), window, pads, rhs_dilation=rate, feature_group_count=groups,
        dimension_numbers=("NHWC", "HWIO", "NHWC"), preferred_element_type=jnp.int32,
    )  # fmt: skip
    expected = np.asarray(exact).astype(np.float32) * b_scale * a_scale + bias
    y = layers.convolve(jnp.array(x), jnp.array(w), bias, Spec(), padding=padding, groups=groups, **pair)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("name", SPECS)
def test_training_and_inference_have_the_same_bits(name):
    spec, x, w, bias = SPECS[name], uniform(0, (6, 32)), uniform(1, (32, 8)), uniform(2, (8,))
    scales = layers.dense_scales(jnp.array(w), jnp.array(x), spec)
    served = layers.dense_kernel(jnp.array(w), spec, scales)
    assert isinstance(served, jaxquant.QArray) and served.qtype == jnp.dtype(spec.w_qtype)

    @jax.jit
    def call(kernel, scales):
        return layers.dense(jnp.array(x), kernel, bias, spec, scales)

    trained, integers = call(w, scales), call(served, scales._replace(kernel=None))
    constant = jax.jit(lambda: layers.dense(jnp.array(x), served, bias, spec, scales))()
    np.testing.assert_array_equal(trained, integers)
    np.testing.assert_array_equal(trained, constant)


@pytest.mark.parametrize("name", SPECS)
def test_gradients_are_those_of_the_rounded_operands(name):
    spec, x, w = SPECS[name], jnp.array(uniform(0, (6, 32))), jnp.array(uniform(1, (32, 8)))
    scales, upstream = layers.dense_scales(w, x, spec), jnp.array(uniform(2, (6, 8)))
    of_x, of_w = products.Dot((((1,), (0,)), ((), ()))).hows(x, w, spec)

    def of_rounded(x, w, scales):
        x_hat = x if of_x is None else rounded(x, of_x, scales.input)
        return (upstream * jnp.dot(x_hat, rounded(w, of_w, scales.kernel), precision="highest")).sum()

    def product(x, w, scales):
        return (upstream * layers.dense(x, w, None, spec, scales)).sum()

    expected, got = (jax.jit(jax.grad(f, (0, 1, 2)))(x, w, scales) for f in (of_rounded, product))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), got, expected)


@pytest.mark.parametrize("name", ["W8A8", "W2A8 asymmetric", "weight-only"])
def test_einsum_and_batched_products(name):
    spec, x, w = SPECS[name], uniform(0, (2, 5, 3, 16)), uniform(1, (2, 3, 16, 4))
    y = jax.jit(lambda x, w: as_einsum(spec)("bqhd,bhdk->bhqk", x, w))(x, w)
    one = as_dot_general(spec)
    for b in range(2):
        for h in range(3):
            np.testing.assert_array_equal(y[b, h], one(x[b, :, h], w[b, h], MATRIX))


@pytest.mark.parametrize("spec", [Spec(), Spec(w_qtype=jnp.int4, x_qtype=jnp.uint8, symmetric=False)], ids=repr)
def test_vmap_scan_and_dtypes(spec):
    x, w, f = jnp.array(uniform(0, (3, 5, 16))), jnp.array(uniform(1, (3, 16, 16))), as_dot_general(spec)
    stacked = jax.vmap(lambda x, w: f(x, w, MATRIX))(x, w)
    _, scanned = jax.lax.scan(lambda c, each: (c, f(*each, MATRIX)), 0, (x, w))
    np.testing.assert_array_equal(stacked, scanned)
    np.testing.assert_array_equal(stacked[1], f(x[1], w[1], MATRIX))
    assert f(x[0].astype(jnp.bfloat16), w[0].astype(jnp.bfloat16), MATRIX).dtype == jnp.bfloat16
    assert f(x[0].astype(jnp.bfloat16), w[0], MATRIX, None, jnp.float32).dtype == jnp.float32
    gradient = jax.grad(lambda w: jax.lax.scan(lambda h, w: (jnp.tanh(f(h, w, MATRIX)), None), x[0], w)[0].sum())
    assert np.abs(jax.jit(gradient)(w)).max() > 0


OBSERVERS = {
    "asymmetric": observers.MinMax(qtype=jnp.uint8, symmetric=False),
    "symmetric": observers.AbsMax(),
    "histogram": observers.Histogram(bins=64, search="percentile", percentile=100),
}


@pytest.mark.parametrize("name", OBSERVERS)
def test_observed_scales(name):
    """Constants, of all batches seen, in training and inference alike; what lies beyond saturates."""
    observer, w, x = OBSERVERS[name], uniform(1, (24, 7)), 2 * uniform(3, (5, 24))
    spec = Spec(w_qtype=jnp.int4, x_observer=observer)
    assert (spec.x_qtype, spec.symmetric) == (observer.qtype.name, observer.symmetric)
    batches = [uniform(0, (2, 6, 24)), 0.5 + 0.5 * uniform(2, (4, 24))]
    state = layers.begin(layers.DENSE, spec, w, None, 24).input
    for batch in batches:
        state = observed(observer, state, jnp.array(batch))
    low, high = min(b.min() for b in batches), max(b.max() for b in batches)
    ends = np.array([[low, high] if observer.qtype == jnp.uint8 else [-max(-low, high), max(-low, high)]], np.float32)
    _, a_scale, a_zero = codes_of(ends, 1, *limits(spec.x_qtype), spec.symmetric)
    lowest = -127 if spec.symmetric else 0
    a = np.clip(np.round(x / a_scale) + a_zero, lowest, lowest + (254 if spec.symmetric else 255))
    b, b_scale, _ = codes_of(w, 0, *limits(jnp.int4), True)
    expected = ((a - a_zero) @ b).astype(np.float32) * b_scale * a_scale
    served, left = layers.converted(layers.DENSE, spec, jnp.array(w), Scales(None, state), 2)
    dense = jax.jit(layers.dense, static_argnums=3)
    for kernel, scales in ((w, Scales(None, state)), (w, left), (served, left)):
        np.testing.assert_array_equal(dense(jnp.array(x), kernel, None, spec, scales), expected)
    dx, dw, dstate = jax.grad(lambda *a: dense(a[0], a[1], None, spec, Scales(None, a[2])).sum(), (0, 1, 2))(
        jnp.array(x), jnp.array(w), state
    )
    inside = np.abs(np.round(x / a_scale) + a_zero - a) == 0
    np.testing.assert_allclose(dx, np.where(inside, (b * b_scale).sum(1), 0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dw, np.repeat(((a - a_zero) * a_scale).sum(0)[:, None], 7, 1), rtol=1e-5, atol=1e-4)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(dstate))


def test_an_embedding_takes_rows_of_the_codes():
    table, ids = jnp.array(uniform(0, (11, 6))), jnp.array([[0, 10], [3, 3]])
    for spec in (Spec(), Spec(w_qtype=jnp.int4, learned=True), Spec(w_granularity=jaxquant.PerGroup(3))):
        scales = layers.embed_scales(table, None, spec)
        served = layers.embed_kernel(table, spec, scales)
        np.testing.assert_array_equal(layers.embed(ids, served, spec), served.dequantize()[ids])
        np.testing.assert_array_equal(layers.embed(ids, table, spec, scales), served.dequantize()[ids])
    query = jnp.array(uniform(1, (2, 6)))
    logits = layers.attend(query, layers.embed_kernel(table, Spec()), Spec())
    np.testing.assert_array_equal(layers.attend(query, table, Spec()), logits)


def test_scales_of_exponents():
    exponents = np.concatenate([np.linspace(-50, 50, 1001), [-1e9, 1e9]]).astype(np.float32)
    whole = np.floor(np.clip(exponents, -60, 60).astype(np.float64))
    expected = 2**whole * (1 + (np.clip(exponents, -60, 60) - whole))
    np.testing.assert_allclose(scale_of(exponents), expected, rtol=1e-7)
    scales = np.array([1e-9, 0.003, 0.5, 1, 1.5, 700], np.float32)
    np.testing.assert_allclose(scale_of(exponent_of(scales)), scales, rtol=2e-6)


def test_rules():
    fine, coarse = Spec(), Spec(w_qtype=jnp.int4)
    rules = Rules({"head/*": None, "blocks/*/out": fine, "*/kernel": coarse, "*/kern?l": fine})
    assert rules.find("head/kernel") is None
    assert rules.find("blocks/3/out/kernel") == fine
    assert rules.find("blocks/3/in/kernel") == coarse
    assert rules.find("blocks/3/in/bias") is None
    # Shadowed by the third.
    assert rules.unmatched(["head/kernel", "a/out/kernel"]) == ["blocks/*/out", "*/kern?l"]
    with pytest.warns(UnmatchedRules, match=r"head/\*.*the parameters are: a/kernel"):
        Rules([("head/*", fine), ("*", coarse)]).check(["a/kernel"])
    with pytest.raises(ValueError, match=r"head/\*"):
        Rules([("head/*", fine)], unmatched="raise").check([])
    Rules([("head/*", fine)], unmatched="ignore").check([])


@pytest.mark.parametrize(
    "make, kind, message",
    [
        (lambda: Spec(w_qtype=jnp.uint8), ValueError, "signed"),
        (lambda: Spec(x_qtype=jnp.uint8), ValueError, "signed"),
        (lambda: Spec(w_qtype=jnp.int16), TypeError, "at most 8 bits"),
        (lambda: Spec(learned=True, symmetric=False), ValueError, "learned"),
        (lambda: Spec(w_granularity="channel"), TypeError, "granularity"),
        (lambda: Spec(x_observer="minmax"), TypeError, "x_observer"),
        (lambda: Spec(x_observer=observers.AbsMax(jaxquant.PerToken())), ValueError, "x_observer"),
        (lambda: Spec(x_observer=observers.AbsMax(), learned=True), ValueError, "x_observer"),
        (lambda: as_einsum(Spec(x_observer=observers.AbsMax())), ValueError, "observed"),
        (lambda: Rules([("*", 8)]), TypeError, "pairs"),
        (lambda: Rules(Spec(), unmatched="print"), ValueError, "unmatched"),
        (lambda: as_dot_general(Spec(learned=True)), ValueError, "chosen"),
        (lambda: as_einsum("int8"), TypeError, "Spec"),
        (
            lambda: layers.convolve(
                jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 2)), None, Spec(x_granularity=PerToken())
            ),
            ValueError,
            "Conv: x_granularity: expected one scale, or one for each example",
        ),
    ],
)
def test_what_is_refused(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_frameworks_are_imported_by_their_adapters_alone():
    code = "import jaxquant, sys; jaxquant.nn.Spec; assert not {'flax', 'equinox', 'optax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


@pytest.mark.parametrize("adapter, package", [("linen", "flax"), ("nnx", "flax"), ("equinox", "equinox")])
def test_a_missing_framework_is_named(adapter, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"jaxquant.nn.{adapter}", raising=False)
    monkeypatch.delitem(vars(jaxquant.nn), adapter, raising=False)
    monkeypatch.setitem(sys.modules, "flax.linen", None)
    with pytest.raises(ImportError, match=f"pip install {package}"):
        getattr(jaxquant.nn, adapter)
    with pytest.raises(AttributeError):
        jaxquant.nn.torch  # noqa: B018


@pytest.mark.parametrize(
    "path",
    ["Rules", "Spec", "as_dot_general", "as_einsum", "linen.QuantDense", "nnx.Observed", "equinox.QuantLinear"],
)
def test_the_example_of_a_docstring(path):
    module, _, name = path.rpartition(".")
    if module:
        pytest.importorskip(module if module == "equinox" else "flax")
    names = vars(getattr(jaxquant.nn, module) if module else jaxquant.nn)
    (example,) = doctest.DocTestFinder(recurse=False).find(
        names[name], name, globs={"jax": jax, "jnp": jnp, "observers": observers, **names}
    )
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0
