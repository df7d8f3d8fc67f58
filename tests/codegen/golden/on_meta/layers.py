"""What several stages of meta_decoder have."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    cos: Tensor
    sin: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)
        self.register_buffer("cos", torch.zeros(8, 16))
        self.register_buffer("sin", torch.zeros(8, 16))
        self.register_buffer("mask", torch.zeros(8, 8, dtype=torch.bool), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        # meta_decoder.py:33-44
        batch = x.shape[0]
        qkv = self.qkv(x).view(batch, 8, 3, 2, 16)  # (B, 8, 3, 2, 16)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        scale = torch.sqrt(torch.full([], 16.0, device=x.device))
        first, second = query.chunk(2, -1)
        turn_out = query * self.cos + torch.cat([-second, first], -1) * self.sin  # (B, 2, 8, 16)
        first, second = key.chunk(2, -1)
        turn_out_2 = key * self.cos + torch.cat([-second, first], -1) * self.sin
        matmul = turn_out @ turn_out_2.transpose(-1, -2)  # (B, 2, 8, 8)
        del turn_out, turn_out_2
        scores = matmul / scale
        del matmul
        scores.masked_fill_(~self.mask, -1000000000.0)
        softmax = F.softmax(scores, dim=-1)
        del scores
        mixed = softmax @ value  # (B, 2, 8, 16)
        del qkv, query, key, value, first, second
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, 8, 32))  # (B, 8, 32)
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.attention = Attention()
        self.narrow = nn.Linear(32, 32)
        self.noise = nn.Parameter(torch.empty(1, 1, 32))
        self.scale = nn.Parameter(torch.empty(32))

    def forward(self, x: Tensor) -> Tensor:
        # meta_decoder.py:58
        norm_out = self.norm(x)  # (B, 8, 32)
        add: Tensor = x + self.scale * self.narrow(F.gelu(self.attention(norm_out) + self.noise))
        return add
