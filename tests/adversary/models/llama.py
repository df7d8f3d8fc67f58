"""Decoders as Hugging Face writes them, by hand: their norms, rotations, masks and outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from adversary.case import ONE_PIECE_BF16, Case
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, GROUPS = 19, 8, 4, 2


@dataclass
class Output:
    """What a causal language model returns."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(kind)


def half_turned(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([-right, left], -1)


class Attention(nn.Module):
    """Grouped queries, rotated, causal."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, GROUPS * size, bias=False)
        self.v = nn.Linear(WIDTH, GROUPS * size, bias=False)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        samples, time, _ = x.shape
        q = self.q(x).view(samples, time, HEADS, -1).transpose(1, 2)
        k = self.k(x).view(samples, time, GROUPS, -1).transpose(1, 2)
        v = self.v(x).view(samples, time, GROUPS, -1).transpose(1, 2)
        cos, sin = turns
        q, k = (t * cos + half_turned(t) * sin for t in (q, k))
        k, v = (t.repeat_interleave(HEADS // GROUPS, 1) for t in (k, v))
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o(found.transpose(1, 2).reshape(samples, time, WIDTH))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(), RMSNorm(), RMSNorm()
        self.gate = nn.Linear(WIDTH, 12, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 12, bias=False), nn.Linear(12, WIDTH, bias=False)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), turns, mask)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, hidden: bool = False) -> None:
        super().__init__()
        self.returns_hidden = hidden
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = RMSNorm()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        size = WIDTH // HEADS
        inverse = 1.0 / 10000 ** (torch.arange(0, size, 2).float() / size)
        self.register_buffer("inverse", inverse, persistent=False)

    def turns(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            angles = torch.outer(torch.arange(x.shape[1]).float(), self.inverse.float())
            angles = torch.cat([angles, angles], -1)
            return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Output:
        x = self.words(input_ids)
        time = input_ids.shape[1]
        mask = torch.ones(time, time, dtype=torch.bool).tril()[None, None]
        if attention_mask is not None:
            mask = mask & attention_mask.bool()[:, None, None, :]
        turns, seen = self.turns(x), []
        for layer in self.layers:
            seen.append(x)
            x = layer(x, turns, mask)
        logits = self.head(self.norm(x))
        loss = None
        if labels is not None:
            shifted = logits[:, :-1].float().flatten(0, 1)
            loss = F.cross_entropy(shifted, labels[:, 1:].flatten(), ignore_index=-100)
        return Output(loss, logits, tuple(seen) if self.returns_hidden else None)


def ids(samples: int) -> Tensor:
    return torch.randint(VOCABULARY, (samples, 6))


def whole(samples: int) -> dict[str, Tensor]:
    tokens = ids(samples)
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.clone(),
    }


def padded(samples: int) -> dict[str, Tensor]:
    batch = whole(samples)
    lengths = torch.randint(3, 7, (samples, 1))
    kept = torch.arange(6) < lengths
    batch["attention_mask"] = kept.long()
    batch["labels"] = batch["labels"].masked_fill(~kept, -100)
    return batch


CASES = (
    Case("own_loss", Llama, whole, later_inputs=padded),
    Case(
        "own_loss_in_bf16",
        Llama,
        whole,
        later_inputs=padded,
        options="--precision bf16",
        manners=(ONE_PIECE_BF16, {"precision": "fp32"}),
        quick=True,
    ),
    Case("padded_example", Llama, padded),
    Case("hidden_states", lambda: Llama(hidden=True), whole, later_inputs=padded),
    Case("inference", Llama, lambda n: {"input_ids": ids(n)}, options="--mode infer"),
    Case(
        "loss_of_logits",
        Llama,
        ids,
        lambda y, t: F.cross_entropy(y.logits.flatten(0, 1), t.flatten()),
        ids,
        options="--stages 3 --schedule 1f1b",
    ),
    Case("four_stages", Llama, whole, later_inputs=padded, options="--stages 4 --remat full"),
)
