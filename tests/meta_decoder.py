"""A small decoder on the meta device, with an initialisation of its own in many styles."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, LENGTH, DIM, HEADS, LAYERS = 400, 8, 32, 2, 3


class Attention(nn.Module):
    """Rotary tables, a causal mask and a number that forward makes a tensor of."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        nn.init.orthogonal_(self.qkv.weight)
        nn.init.zeros_(self.qkv.bias)
        mask = torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool))
        self.register_buffer("mask", mask, persistent=False)
        width = DIM // HEADS
        rate = 1.0 / 10000 ** (torch.arange(0, width, 2).float() / width)
        angles = torch.outer(torch.arange(LENGTH).float(), rate).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def turn(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-second, first], dim=-1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(x).view(batch, length, 3, HEADS, dim // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        scale = torch.sqrt(torch.tensor(float(dim // HEADS), device=x.device))
        scores = self.turn(query) @ self.turn(key).transpose(-1, -2) / scale
        scores = scores.masked_fill(~self.mask, -1e9)
        mixed = scores.softmax(dim=-1) @ value
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attention = Attention()
        self.narrow = nn.Linear(DIM, DIM)
        nn.init.normal_(self.narrow.weight, 0.0, 0.02 / math.sqrt(2 * LAYERS))
        self.scale = nn.Parameter(0.1 * torch.ones(DIM))
        self.noise = nn.Parameter(torch.randn(1, 1, DIM) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.narrow(F.gelu(self.attention(self.norm(x)) + self.noise))


class Decoder(nn.Module):
    """Blocks that begin alike, a padding row, a tied head, a tensor that is in no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, DIM, padding_idx=0)
        self.position = nn.Parameter(torch.zeros(1, LENGTH, DIM))
        nn.init.trunc_normal_(self.position, std=0.02)
        self.shift = torch.arange(DIM) / DIM
        block = Block()
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(LAYERS))
        self.batch_norm = nn.BatchNorm1d(LENGTH)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.position + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(self.batch_norm(x))


def build_model(device: str = "meta") -> nn.Module:
    with torch.device(device):
        return Decoder()


def example_inputs() -> Tensor:
    return torch.arange(4 * LENGTH).view(4, LENGTH)


def example_target() -> Tensor:
    return example_inputs() + 1


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
