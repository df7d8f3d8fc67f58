"""A plan of an ONNX graph becomes a package: one model per stage, and the scripts that run them."""
