"""Block-quantised tensors in the GGML formats: quantise, multiply, read and write GGUF files.

Every format of ggml 0.20.2 with its bytes and its values; products read the packed weights, differentiate with respect
to the activations, and compose with every transformation of JAX.
"""

from jaxquant.ggml.formats import BlockFormat, formats
from jaxquant.ggml.gguf import load_gguf, save_gguf
from jaxquant.ggml.imatrix import load_imatrix
from jaxquant.ggml.products import linear, moe_linear, ragged_linear
from jaxquant.ggml.qtensor import QTensor, quantize
from jaxquant.ggml.validation import Finding, validate

__all__ = [
    "BlockFormat",
    "Finding",
    "QTensor",
    "formats",
    "linear",
    "load_gguf",
    "load_imatrix",
    "moe_linear",
    "quantize",
    "ragged_linear",
    "save_gguf",
    "validate",
]
