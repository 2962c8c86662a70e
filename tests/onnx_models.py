"""Models for ONNX, run by ONNX Runtime and compared with their functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxquant.export import to_onnx

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

RANDOM = np.random.default_rng(20)


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(RANDOM.normal(size=shape), dtype)


X, W, B = normal(5, 64), normal(64, 24), normal(24)


def session(model, every=()):
    """every: tensors to give as results too. Weight-only products in float32: by default the runtime quantises x."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in every)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(model, *inputs, every=()):
    s = session(model, every)
    return s.run(None, {i.name: np.asarray(x) for i, x in zip(s.get_inputs(), inputs, strict=True)})


def operators(model):
    return [node.op_type for node in model.graph.node]


def weight_codes(model):
    return next(t for t in model.graph.initializer if "codes" in t.name)


def close(got, want):
    """Within float32 accumulation: 2^-20 of the largest magnitude."""
    want = np.asarray(want, np.float64)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=0, atol=2.0**-20 * max(np.abs(want).max(initial=0), 1e-30))


def agrees(f, *inputs, **options):
    model = to_onnx(f, *inputs, **options)
    onnx.checker.check_model(model, full_check=True)
    for got, want in zip(run(model, *inputs), jax.tree.leaves(f(*inputs)), strict=True):
        assert got.dtype == want.dtype
        if np.issubdtype(got.dtype, np.floating):
            close(got, want)
        else:
            np.testing.assert_array_equal(got, want)
    return model
