"""Stage 1 of decoder, the 2nd of 3: attentions.0 to attentions.1.qkv."""

import torch.nn.functional as F
from torch import Tensor, nn


class AttentionPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)

    def forward(self, add: Tensor, softmax: Tensor, transpose_2: Tensor) -> Tensor:
        # models.py:58-66
        batch, length, dim = add.shape
        mixed = F.dropout(softmax, p=0.0, training=self.training) @ transpose_2  # (B, 2, 6, 4)
        mixed = mixed.transpose(1, 2).reshape(batch, length, dim)  # (B, 6, 8)
        attentions_0_out = self.out(mixed)
        return attentions_0_out


class AttentionPart2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, add_1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # models.py:58-63
        batch, length, dim = add_1.shape
        q, k, v = self.qkv(add_1).chunk(3, dim=-1)
        floor_div_4 = dim // 2
        q = q.view(batch, length, 2, floor_div_4).transpose(1, 2)  # (B, 2, 6, 4)
        k = k.view(batch, length, 2, floor_div_4).transpose(1, 2)
        v = v.view(batch, length, 2, floor_div_4).transpose(1, 2)
        scores = k.transpose(-2, -1)  # (B, 2, 4, 6)
        return q, v, scores


class Stage1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attentions = nn.ModuleDict({"0": AttentionPart(), "1": AttentionPart2()})

    def forward(self, softmax: Tensor, transpose_2: Tensor, add: Tensor) -> tuple[Tensor, ...]:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            softmax: (B, 2, 6, 6) float32, from stage 0, made at models.py:65.
            transpose_2: (B, 2, 6, 4) float32, from stage 0, made at models.py:62.
            add: (B, 6, 8) float32, from stage 0, made at models.py:82.

        Returns:
            add_1: (B, 6, 8) float32, for stage 2.
            transpose_5: (B, 2, 6, 4) float32, for stage 2.
            transpose_7: (B, 2, 6, 4) float32, for stage 2.
            transpose_8: (B, 2, 4, 6) float32, for stage 2.
        """
        # models.py:84
        attentions_0_out = self.attentions["0"](add, softmax, transpose_2)  # (B, 6, 8)
        add_1 = add + attentions_0_out
        del attentions_0_out
        transpose_5, transpose_7, transpose_8 = self.attentions["1"](add_1)
        return add_1, transpose_5, transpose_7, transpose_8
