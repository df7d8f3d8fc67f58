"""A Llama of 12 layers, 1,024 wide; a file for gpipe-compile."""

from torch import nn

from networks.llama_8 import build_model as build
from networks.llama_8 import example_inputs, example_target, loss_fn

__all__ = ["build_model", "example_inputs", "example_target", "loss_fn"]


def build_model() -> nn.Module:
    """150 million parameters."""
    return build(layers=12, width=1024, heads=16)
