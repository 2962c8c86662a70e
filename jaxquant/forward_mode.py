"""The operations without their custom_vjp, for direct forward mode.

JAX refuses ``jvp``, ``jacfwd`` and ``linearize`` of a function with a custom_vjp. These spellings bind the primitives
themselves, whose own differentiation rules serve forward and reverse mode alike, with the same values and gradients.
"""

from jaxquant.affine.dequantize import dequantize_forward_mode as dequantize
from jaxquant.affine.fake_quantize import fake_quantize_forward_mode as fake_quantize
from jaxquant.affine.quantize import quantize_forward_mode as quantize

__all__ = ["dequantize", "fake_quantize", "quantize"]
