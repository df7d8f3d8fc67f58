"""A decoder language model over bytes, with its embedding tied to the output layer.

    gpipe-compile examples/transformer.py --stages 4
    python transformer_x4/run.py train --steps 100

The text that it learns is this file. `transformer_1_3b.py` is the same network grown large.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256
SEQUENCE = 64
DIM = 128
HEADS = 4
LAYERS = 6
DROPOUT = 0.1
BATCH = 8
SEED = 0


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


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.widen = nn.Linear(dim, 4 * dim)
        self.narrow = nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.narrow(F.gelu(self.widen(self.norm2(x)))))


class DecoderLM(nn.Module):
    """Tokens (batch, sequence) to the scores of the next one (batch, sequence, vocabulary)."""

    def __init__(
        self, vocabulary: int, sequence: int, dim: int, heads: int, layers: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Embedding(sequence, dim)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.scores = nn.Linear(dim, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.scores.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return self.scores(self.norm(x))


def build_model(
    vocabulary: int = VOCABULARY,
    sequence: int = SEQUENCE,
    dim: int = DIM,
    heads: int = HEADS,
    layers: int = LAYERS,
    dropout: float = DROPOUT,
) -> nn.Module:
    torch.manual_seed(SEED)
    return DecoderLM(vocabulary, sequence, dim, heads, layers, dropout)


def example_inputs(batch: int = BATCH, sequence: int = SEQUENCE) -> Tensor:
    return _passages(batch, sequence, SEED)[0]


def example_target(batch: int = BATCH, sequence: int = SEQUENCE) -> Tensor:
    return _passages(batch, sequence, SEED)[1]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def make_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def train_data() -> Iterator[tuple[Tensor, Tensor]]:
    """Passages from this file for ever."""
    seed = SEED
    while True:
        seed += 1
        yield _passages(BATCH, SEQUENCE, seed)


def _passages(batch: int, sequence: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random passages, and the same ones a byte further on."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - sequence, (batch, 1), generator=generator)
    places = starts + torch.arange(sequence)
    return text[places], text[places + 1]
