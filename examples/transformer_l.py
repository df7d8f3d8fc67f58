r"""Transformer-L, the decoder language models of the GPipe article (arXiv 1811.06965, section 5).

    gpipe-compile examples/transformer_l.py --stages 8 --microbatches 32 --schedule 1f1b
    gpipe-compile examples/transformer_l.py:transformer_1663 --stages 128 --microbatches 256 \
        --schedule 1f1b --dry-run

Transformer-L has L layers of 50,358,272 parameters and 131,104,000 parameters besides: 21.0 billion
at L = 415, 83.9 billion at L = 1663. All of them are built on the meta device, which holds no
numbers: the package initialises itself on the devices that it runs on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 32000
SEQUENCE = 1024
DIM = 2048
FEED_FORWARD = 8192
HEADS = 16
LAYERS = 103
DROPOUT = 0.1
BATCH = 256


class Attention(nn.Module):
    """Causal self-attention over (batch, sequence, dim)."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, dim = x.shape
        qkv = self.qkv(x).view(batch, sequence, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, sequence, dim))


class Layer(nn.Module):
    """Attention and feed-forward, each with a residual and a norm after it."""

    def __init__(self, dim: int, feed_forward: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(dim, heads, dropout)
        self.norm1 = nn.LayerNorm(dim)
        self.widen = nn.Linear(dim, feed_forward)
        self.narrow = nn.Linear(feed_forward, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x)))
        return self.norm2(x + self.dropout(self.narrow(F.relu(self.widen(x)))))


class TransformerL(nn.Module):
    """Tokens (batch, sequence) to the scores of the next one (batch, sequence, vocabulary)."""

    def __init__(
        self,
        vocabulary: int,
        dim: int,
        feed_forward: int,
        heads: int,
        layers: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(dim, feed_forward, heads, dropout) for _ in range(layers))
        self.scores = nn.Linear(dim, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x = self.dropout(x + sinusoids(tokens.shape[1], x.shape[2], tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.scores(x)


def sinusoids(length: int, dim: int, device: torch.device) -> Tensor:
    """The places 0 to `length` as sines and cosines (length, dim); arXiv 1706.03762, 3.5."""
    places = torch.arange(length, device=device).unsqueeze(1)
    rates = torch.exp(torch.arange(0, dim, 2, device=device) * (-math.log(10000.0) / dim))
    return torch.cat([torch.sin(places * rates), torch.cos(places * rates)], dim=1)


def build_model(
    vocabulary: int = VOCABULARY,
    dim: int = DIM,
    feed_forward: int = FEED_FORWARD,
    heads: int = HEADS,
    layers: int = LAYERS,
    dropout: float = DROPOUT,
) -> nn.Module:
    with torch.device("meta"):
        return TransformerL(vocabulary, dim, feed_forward, heads, layers, dropout)


def transformer_3() -> nn.Module:
    """282 million parameters."""
    return build_model(layers=3)


def transformer_13() -> nn.Module:
    """786 million parameters."""
    return build_model(layers=13)


def transformer_103() -> nn.Module:
    """5.3 billion parameters."""
    return build_model(layers=103)


def transformer_415() -> nn.Module:
    """21.0 billion parameters."""
    return build_model(layers=415)


def transformer_1663() -> nn.Module:
    """83.9 billion parameters."""
    return build_model(layers=1663)


def example_inputs(batch: int = BATCH, sequence: int = SEQUENCE) -> Tensor:
    return torch.arange(batch * sequence).view(batch, sequence) % VOCABULARY


def example_target(batch: int = BATCH, sequence: int = SEQUENCE) -> Tensor:
    return (example_inputs(batch, sequence) + 1) % VOCABULARY


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def make_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-4)
