"""A decoder that is given what it has seen, and a recurrent network; plain PyTorch alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LAYERS, WORDS = 16, 2, 4, 20

Past = list[tuple[Tensor, Tensor]]


class Layer(nn.Module):
    """Attention over what was seen and what is new, and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(
        self, x: Tensor, past: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch, new, _ = x.shape
        parts = self.project(x).view(batch, new, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        length = key.shape[2]
        seen = torch.arange(length) <= torch.arange(length - new, length)[:, None]
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        x = x + self.out(found.transpose(1, 2).reshape(batch, new, WIDTH))
        return x + self.wide(x), (key, value)


class Decoder(nn.Module):
    """Returns logits, and what it has seen by then."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, past: Past) -> tuple[Tensor, Past]:
        x, seen = self.embed(tokens), []
        for layer, own in zip(self.layers, past, strict=True):
            x, now = layer(x, own)
            seen.append(now)
        return self.head(x), seen


def past_of(samples: int, length: int) -> Past:
    """What was seen of some samples, made up."""
    shape = samples, HEADS, length, WIDTH // HEADS
    return [(torch.randn(shape), torch.randn(shape)) for _ in range(LAYERS)]


class Listening(nn.Module):
    """Hears a piece of sound, and remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cell = nn.Linear(6, 8), nn.GRU(8, 8, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, sound: Tensor, hidden: Tensor) -> dict[str, Tensor]:
        heard, hidden = self.cell(self.first(sound).relu(), hidden)
        return {"said": self.last(heard), "hidden": hidden}
