"""A decoder language model of 1,313,722,368 parameters, described but not held in memory.

    gpipe-compile examples/transformer_1_3b.py --stages 4

The model is built on the meta device, so the package has no weights and initialises itself on the
devices that it runs on.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformer import DecoderLM

VOCABULARY = 50304
SEQUENCE = 1024
DIM = 2048
HEADS = 16
LAYERS = 24
DROPOUT = 0.1
BATCH = 8


def build_model(
    vocabulary: int = VOCABULARY,
    sequence: int = SEQUENCE,
    dim: int = DIM,
    heads: int = HEADS,
    layers: int = LAYERS,
    dropout: float = DROPOUT,
) -> nn.Module:
    with torch.device("meta"):
        return DecoderLM(vocabulary, sequence, dim, heads, layers, dropout)


def example_inputs(batch: int = BATCH, sequence: int = SEQUENCE) -> Tensor:
    return torch.arange(batch * sequence).view(batch, sequence) % VOCABULARY


def example_target(batch: int = BATCH, sequence: int = SEQUENCE) -> Tensor:
    return example_inputs(batch, sequence) + 1


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def make_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=2e-4, betas=(0.9, 0.95), weight_decay=0.1)
