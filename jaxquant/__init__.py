"""Quantisation kernels for JAX that compose with jit, vmap, grad and sharding."""

from jaxquant import export, forward_mode, ggml, nn, observers, optim
from jaxquant._core.information import export_checks, info
from jaxquant._core.platforms import register_kernels
from jaxquant.affine.choose import choose_qparams
from jaxquant.affine.dequantize import dequantize
from jaxquant.affine.dynamic import dynamic_fake_quantize, dynamic_quantize
from jaxquant.affine.fake_quantize import fake_quantize
from jaxquant.affine.granularity import PerAxis, PerBlock, PerGroup, PerTensor, PerToken
from jaxquant.affine.int_matmul import int_matmul
from jaxquant.affine.learned_step import lsq_gradient_scale, lsq_init, positive_scale, raw_scale
from jaxquant.affine.packing import pack, unpack
from jaxquant.affine.products import dot_general, einsum, matmul, ragged_dot
from jaxquant.affine.qarray import QArray
from jaxquant.affine.qat_dense import qat_dense
from jaxquant.affine.qparams import QParams
from jaxquant.affine.quantize import (
    quantize,
    quantize_backward,
    quantize_per_channel,
    quantize_per_channel_backward,
)
from jaxquant.affine.smoothquant import smooth, smoothquant_factors

__version__ = "0.1.0"

__all__ = [
    "PerAxis",
    "PerBlock",
    "PerGroup",
    "PerTensor",
    "PerToken",
    "QArray",
    "QParams",
    "choose_qparams",
    "dequantize",
    "dot_general",
    "dynamic_fake_quantize",
    "dynamic_quantize",
    "einsum",
    "export",
    "export_checks",
    "fake_quantize",
    "forward_mode",
    "ggml",
    "info",
    "int_matmul",
    "lsq_gradient_scale",
    "lsq_init",
    "matmul",
    "nn",
    "observers",
    "optim",
    "pack",
    "positive_scale",
    "qat_dense",
    "quantize",
    "quantize_backward",
    "quantize_per_channel",
    "quantize_per_channel_backward",
    "ragged_dot",
    "raw_scale",
    "register_kernels",
    "smooth",
    "smoothquant_factors",
    "unpack",
]
