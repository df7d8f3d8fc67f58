"""What a package of ONNX stages runs on: numpy and ONNX Runtime, copied into it as `runtime/`."""
