"""Costs and facts of ONNX nodes."""
