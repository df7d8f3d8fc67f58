"""What several stages of meta_decoder have."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # meta_decoder.py:33-34
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin  # (B, 2, 8, 16)


class Attention(nn.Module):
    mask: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.register_buffer("mask", torch.zeros(8, 8, dtype=torch.bool), persistent=False)
        self.register_buffer("cos", torch.zeros(8, 16))
        self.register_buffer("sin", torch.zeros(8, 16))
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        # meta_decoder.py:38-44
        qkv = self.qkv(x).view(*x.shape[:2], 3, 2, 16)  # (B, 8, 3, 2, 16)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        scale = torch.sqrt(torch.tensor(16.0, dtype=torch.float32, device=x.device))
        matmul = turn(query, self.cos, self.sin) @ turn(key, self.cos, self.sin).transpose(-1, -2)
        scores = matmul / scale
        del matmul
        scores.masked_fill_(~self.mask, -1e9)
        softmax = torch.softmax(scores, dim=-1)
        del scores
        mixed = softmax @ value  # (B, 2, 8, 16)
        del qkv, query, key, value
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(*x.shape))  # (B, 8, 32)
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.attention = Attention()
        self.scale = nn.Parameter(torch.empty(32))
        self.narrow = nn.Linear(32, 32)
        self.noise = nn.Parameter(torch.empty(1, 1, 32))

    def forward(self, x: Tensor) -> Tensor:
        # meta_decoder.py:58
        add: Tensor = (
            x + self.scale * self.narrow(F.gelu(self.attention(self.norm(x)) + self.noise))
        )
        return add
