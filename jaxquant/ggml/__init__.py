"""Block-quantised tensors in the GGML formats."""

from jaxquant.ggml.formats import BlockFormat, formats

__all__ = ["BlockFormat", "formats"]
