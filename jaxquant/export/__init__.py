"""Models and arrays for other programs: ONNX graphs with QuantizeLinear and DequantizeLinear, and safetensors files."""

from jaxquant.export.jaxpr import to_onnx
from jaxquant.export.trees import load_safetensors, safetensors_metadata, save_safetensors

__all__ = ["load_safetensors", "safetensors_metadata", "save_safetensors", "to_onnx"]
