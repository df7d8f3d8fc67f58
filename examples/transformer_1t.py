r"""A decoder language model of 1,008 billion parameters: the largest of Megatron's.

    gpipe-compile examples/transformer_1t.py --stages 512 --microbatches 1024 \
        --schedule 1f1b --dry-run

Its sizes are those of arXiv 2104.04473, table 1, last row. It is `transformer.py` grown large, on
the meta device, which holds no numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformer import DecoderLM

VOCABULARY = 51200
SEQUENCE = 2048
DIM = 25600
HEADS = 160
LAYERS = 128
DROPOUT = 0.1
BATCH = 1024


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
    return (example_inputs(batch, sequence) + 1) % VOCABULARY


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def make_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-4)
