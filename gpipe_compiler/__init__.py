"""Compiles a PyTorch model into a pipeline of stages: trace, plan, emit, compile."""
