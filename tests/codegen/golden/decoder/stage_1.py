"""Stage 1 of decoder, the 2nd of 3: attentions.0 to attentions.1."""

import torch.nn.functional as F
from torch import Tensor, nn


class AttentionPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)

    def forward(self, v: Tensor, softmax: Tensor) -> Tensor:
        # models.py:65-66
        mixed = F.dropout(softmax, p=0.0, training=self.training) @ v  # (B, 2, ids.1, 4)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(v.shape[0], v.shape[2], 8))
        return out


class AttentionPart2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # models.py:59-63
        shape = x.shape[:2]
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q = q.view(*shape, 2, 4).transpose(1, 2)  # (B, 2, ids.1, 4)
        k = k.view(*shape, 2, 4).transpose(1, 2)
        v = v.view(*shape, 2, 4).transpose(1, 2)
        k = k.transpose(-2, -1)  # (B, 2, 4, ids.1)
        return q, v, k


class Stage1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attentions = nn.ModuleDict({"0": AttentionPart(), "1": AttentionPart2()})

    def forward(self, softmax: Tensor, v: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            softmax: (B, 2, ids.1, ids.1) float32, from stage 0, made at models.py:65.
            v: (B, 2, ids.1, 4) float32, from stage 0, made at models.py:62.
            x: (B, ids.1, 8) float32, from stage 0, made at models.py:82.

        Returns:
            x: (B, ids.1, 8) float32, for stage 2.
            q: (B, 2, ids.1, 4) float32, for stage 2.
            v: (B, 2, ids.1, 4) float32, for stage 2.
            transpose: (B, 2, 4, ids.1) float32, for stage 2.
        """
        # models.py:84
        x = x + self.attentions["0"](v, softmax)  # (B, ids.1, 8)
        q, v, transpose = self.attentions["1"](x)
        return x, q, v, transpose
