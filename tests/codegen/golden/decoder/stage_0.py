"""Stage 0 of decoder, the 1st of 3: wte to attentions.0."""

import math

import torch
from torch import Tensor, nn


class AttentionPart(nn.Module):
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("mask", torch.empty(6, 6, dtype=torch.bool))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # models.py:59-65
        length = x.shape[1]
        shape = x.shape[:2]
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q = q.view(*shape, 2, 4).transpose(1, 2)  # (B, 2, ids.1, 4)
        k = k.view(*shape, 2, 4).transpose(1, 2)
        v = v.view(*shape, 2, 4).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / 2.0  # (B, 2, ids.1, ids.1)
        scores = scores.masked_fill(~self.mask[:length, :length], -math.inf)
        softmax = torch.softmax(scores, dim=-1)
        return v, softmax


class Stage0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, 8)
        self.wpe = nn.Parameter(torch.empty(6, 8))
        self.attentions = nn.ModuleDict({"0": AttentionPart()})

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            ids: (B, ids.1) int64, the model's args[0].

        Returns:
            x: (B, ids.1, 8) float32, for stage 1.
            v: (B, 2, ids.1, 4) float32, for stage 1.
            softmax: (B, 2, ids.1, ids.1) float32, for stage 1.
        """
        # models.py:82-84
        length = ids.shape[1]
        wte_out = self.wte(ids)  # (B, ids.1, 8)
        x = wte_out + self.wpe[:length]
        del wte_out
        v, softmax = self.attentions["0"](x)
        return x, v, softmax
