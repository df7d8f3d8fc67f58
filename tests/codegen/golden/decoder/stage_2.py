"""Stage 2 of decoder, the 3rd of 3: attentions.1 to lm_head."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class AttentionPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)
        self.register_buffer("mask", torch.empty(6, 6, dtype=torch.bool))

    def forward(
        self, add_1: Tensor, transpose_5: Tensor, transpose_8: Tensor, transpose_7: Tensor
    ) -> Tensor:
        # models.py:58-66
        batch, length, dim = add_1.shape
        q = dim // 2
        scores = transpose_5 @ transpose_8 / q**0.5  # (B, 2, 6, 6)
        scores = scores.masked_fill(~self.mask[:length, :length], -math.inf)
        scores = scores.softmax(dim=-1)
        mixed = F.dropout(scores, p=0.0, training=self.training) @ transpose_7  # (B, 2, 6, 4)
        mixed = mixed.transpose(1, 2).reshape(batch, length, dim)  # (B, 6, 8)
        attentions_1_out = self.out(mixed)
        return attentions_1_out


class Stage2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attentions = nn.ModuleDict({"1": AttentionPart()})
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 11, bias=False)

    def forward(
        self, transpose_5: Tensor, transpose_8: Tensor, transpose_7: Tensor, add_1: Tensor
    ) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            transpose_5: (B, 2, 6, 4) float32, from stage 1, made at models.py:60.
            transpose_8: (B, 2, 4, 6) float32, from stage 1, made at models.py:63.
            transpose_7: (B, 2, 6, 4) float32, from stage 1, made at models.py:62.
            add_1: (B, 6, 8) float32, from stage 1, made at models.py:84.

        Returns:
            lm_head: (B, 6, 11) float32, for the caller.
        """
        # models.py:84-85
        attentions_1_out = self.attentions["1"](add_1, transpose_5, transpose_8, transpose_7)
        x = add_1 + attentions_1_out
        del attentions_1_out
        lm_head = self.lm_head(self.norm(x))  # (B, 6, 11)
        return lm_head

    def loss(self, lm_head: Tensor, target: Tensor) -> Tensor:
        """The loss of one micro-batch.

        Args:
            lm_head: (B, 6, 11) float32, what forward returned.
            target: (B, 6) int64, the target.
        """
        # models.py:208
        loss = F.cross_entropy(lm_head.flatten(0, -2), target.flatten())
        return loss
