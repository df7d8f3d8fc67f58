"""ONNX models, and stages that run on ONNX Runtime."""
