"""Stage 2 of decoder, the 3rd of 3: attentions.1 to lm_head."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class AttentionPart(nn.Module):
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.empty(6, 6, dtype=torch.bool))
        self.out = nn.Linear(8, 8)

    def forward(self, q: Tensor, v: Tensor, transpose: Tensor) -> Tensor:
        # models.py:63-66
        length = q.shape[2]
        scores = q @ transpose / 2.0  # (B, 2, ids.1, ids.1)
        scores = scores.masked_fill(~self.mask[:length, :length], -math.inf)
        mixed = F.dropout(torch.softmax(scores, dim=-1), p=0.0, training=self.training) @ v
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(q.shape[0], length, 8))
        return out


class Stage2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attentions = nn.ModuleDict({"1": AttentionPart()})
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 11, bias=False)

    def forward(self, q: Tensor, transpose: Tensor, v: Tensor, x: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            q: (B, 2, ids.1, 4) float32, from stage 1, made at models.py:60.
            transpose: (B, 2, 4, ids.1) float32, from stage 1, made at models.py:63.
            v: (B, 2, ids.1, 4) float32, from stage 1, made at models.py:62.
            x: (B, ids.1, 8) float32, from stage 1, made at models.py:84.

        Returns:
            lm_head_out: (B, ids.1, 11) float32, for the caller.
        """
        # models.py:84-85
        x = x + self.attentions["1"](q, v, transpose)  # (B, ids.1, 8)
        lm_head_out: Tensor = self.lm_head(self.norm(x))  # (B, ids.1, 11)
        return lm_head_out

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of one micro-batch.

        Args:
            output: (B, ids.1, 11) float32, what forward returned.
            target: (B, ids.1) int64, the target.
        """
        # models.py:208
        loss = F.cross_entropy(output.flatten(0, -2), target.flatten())
        return loss
