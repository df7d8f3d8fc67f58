"""Attention in all its layouts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from adversary.case import FP32_ONLY, Case, Refused, RefusedAtStep
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

VOCABULARY = 17


def features(samples: int) -> Tensor:
    return torch.randn(samples, 5, 8)


def tokens(samples: int) -> Tensor:
    return torch.randint(VOCABULARY, (samples, 6))


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def next_token(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Block(nn.Module):
    """Pre-norm, written by hand."""

    def __init__(self, causal: bool = True, heads: int = 2) -> None:
        super().__init__()
        self.causal, self.heads = causal, heads
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        samples, time, width = x.shape
        split = self.qkv(self.norm1(x)).view(samples, time, 3, self.heads, -1)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """A small GPT, its embedding tied to its head."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, 8), nn.Embedding(6, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def encoder_layers(**options: object) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class SequenceFirst(nn.Module):
    """Takes and gives (time, samples, features), as nn.TransformerEncoder does by default."""

    def __init__(self) -> None:
        super().__init__()
        self.body = encoder_layers()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Pooled(nn.Module):
    """A sequence-first body within a batch-first model."""

    def __init__(self) -> None:
        super().__init__()
        self.body = encoder_layers()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.transpose(0, 1)).mean(0))


class Padded(nn.Module):
    """With a mask of the positions that are padding; packed in eval mode, unless it is told not."""

    def __init__(self, packing: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        norm = nn.LayerNorm(8) if packing else None
        self.body = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=packing)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.body(x, src_key_padding_mask=padding)


def with_padding(samples: int) -> tuple[Tensor, Tensor]:
    lengths = torch.randint(2, 6, (samples, 1))
    return features(samples), torch.arange(5) >= lengths


def with_biases(samples: int) -> tuple[Tensor, Tensor]:
    """The same as what is added to attention scores."""
    x, padding = with_padding(samples)
    return x, torch.zeros(samples, 5).masked_fill(padding, float("-inf"))


def padded_before(samples: int) -> tuple[Tensor, Tensor]:
    """The last two samples, a micro-batch or more, have no padding."""
    x, padding = with_padding(samples)
    return x, padding.flip(1) & (torch.arange(samples) < samples - 2)[:, None]


def unpadded(samples: int) -> tuple[Tensor, Tensor]:
    return features(samples), torch.zeros(samples, 5, dtype=torch.bool)


class ByHand(nn.Module):
    """softmax(QK/sqrt(d))V with a causal mask that forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        time = x.shape[1]
        allowed = torch.ones(time, time, dtype=torch.bool, device=x.device).tril()
        scores = self.q(x) @ self.k(x).transpose(-2, -1) / math.sqrt(8)
        scores = scores.masked_fill(~allowed, float("-inf"))
        return self.out(scores.softmax(-1) @ self.v(x))


class Cross(nn.Module):
    """Of one input to another, with nn.MultiheadAttention and its weights as an output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(8, 2, batch_first=True)
        self.second = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.first(x, x, x, need_weights=False)[0]
        found, weights = self.second(x, memory, memory)
        return x + found, weights


class Alibi(nn.Module):
    """Biases that depend on distance, in a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        distance = torch.arange(5)[None] - torch.arange(5)[:, None]
        bias = torch.tensor([0.5, 0.25])[:, None, None] * -distance.abs()
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (q, k, v))
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)
        return self.out(found.transpose(1, 2).flatten(2))


class Rotary(nn.Module):
    """Positions as rotations, by complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.qk, self.v = nn.Linear(8, 16), nn.Linear(8, 8)
        angles = torch.outer(torch.arange(16.0), torch.tensor([1.0, 0.1, 0.01, 0.001]))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def rotated(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (4, 2)).contiguous())
        turns = self.turns[: x.shape[1]].view(1, x.shape[1], -1)
        return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (self.rotated(part) for part in self.qk(x).chunk(2, -1))
        return F.scaled_dot_product_attention(q, k, self.v(x), is_causal=True)


class Flexible(nn.Module):
    """flex_attention with a score of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))

        def nearer(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score - (i - j).abs() * 0.1

        return self.out(flex_attention(q, k, v, score_mod=nearer).transpose(1, 2).flatten(2))


class AcrossSamples(nn.Module):
    """Attends over the samples of a batch: no micro-batch can know the others."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mean(1)
        scores = x @ x.t()  # refused: across_samples
        return self.head(scores.softmax(-1) @ x).unsqueeze(1).expand(-1, 5, -1)


CASES = (
    Case(
        "encoder",
        lambda: encoder_layers(batch_first=True),
        features,
        square,
        features,
        manners=FP32_ONLY,
    ),
    Case(
        "packed",
        lambda: Padded(packing=True),
        with_padding,
        square,
        features,
        manners=FP32_ONLY,
        quick=True,
    ),
    Case(
        "packed_by_biases",
        lambda: Padded(packing=True),
        with_biases,
        square,
        features,
        manners=FP32_ONLY,
    ),
    Case(
        "unpacked",
        lambda: Padded(packing=True),
        padded_before,
        square,
        features,
        manners=FP32_ONLY,
    ),
    Case(
        "packed_later",
        lambda: Padded(packing=True),
        unpadded,
        square,
        features,
        manners=FP32_ONLY,
        later_inputs=with_padding,
    ),
    Case(
        "unpacked_later",
        lambda: Padded(packing=True),
        with_padding,
        options="--mode infer",
        manners=({},),
        expect=RefusedAtStep(
            lambda: padded_before(8),
            ("attention.py:", "goes another way"),
            way_out=("enable_nested_tensor=False",),
        ),
    ),
    Case(
        "encoder_in_bf16",
        lambda: encoder_layers(batch_first=True),
        features,
        options="--mode infer",
        manners=FP32_ONLY[:1],
        expect=RefusedAtStep(
            lambda: features(8),
            ("autocast on a CPU", "layers.0"),
            way_out=("set_fastpath_enabled(False)", "fp32"),
            arguments={"precision": "bf16"},
        ),
    ),
    Case(
        "encoder_by_ops_in_bf16",
        lambda: encoder_layers(batch_first=True),
        features,
        square,
        features,
        by_ops=True,
    ),
    Case(
        "packed_in_bf16",
        lambda: Padded(packing=True),
        with_padding,
        options="--mode infer",
        manners=FP32_ONLY[:1],
        expect=RefusedAtStep(
            lambda: with_padding(8),
            ("packs what is padded", "attention.py"),
            way_out=("enable_nested_tensor=False",),
            arguments={"precision": "bf16"},
        ),
    ),
    Case(
        "sequence_first",
        SequenceFirst,
        lambda n: torch.randn(5, n, 8),
        square,
        lambda n: torch.randn(5, n, 3),
        manners=FP32_ONLY,
    ),
    Case(
        "sequence_first_inference",
        SequenceFirst,
        lambda n: torch.randn(5, n, 8),
        options="--mode infer",
        manners=({}, {"microbatches": 3}),
    ),
    Case(
        "sequence_first_as_long_as_the_batch",
        SequenceFirst,
        lambda n: torch.randn(8, n, 8),
        square,
        lambda n: torch.randn(8, n, 3),
        manners=FP32_ONLY,
    ),
    Case("pooled", Pooled, features, F.cross_entropy, lambda n: torch.randint(3, (n,))),
    Case("padded", Padded, with_padding, square, features, manners=FP32_ONLY),
    Case("gpt", Decoder, tokens, next_token, tokens, quick=True),
    Case("gpt_untied", lambda: Decoder(tied=False), tokens, next_token, tokens),
    Case("gpt_1f1b", Decoder, tokens, next_token, tokens, options="--schedule 1f1b --remat full"),
    Case("gpt_bf16", Decoder, tokens, next_token, tokens, options="--precision bf16"),
    Case("gpt_inference", Decoder, tokens, options="--mode infer"),
    Case("by_hand", ByHand, features, square, features),
    Case(
        "cross",
        Cross,
        lambda n: (features(n), torch.randn(n, 3, 8)),
        lambda output, target: square(output[0], target),
        features,
    ),
    Case("alibi", Alibi, features, square, features),
    Case("rotary", Rotary, features, square, features),
    Case("rotary_inference", Rotary, features, options="--mode infer"),
    Case(
        "heads", lambda: nn.Sequential(Block(False, 4), Block(False, 1)), features, square, features
    ),
    Case(
        "flex_inference",
        Flexible,
        lambda n: torch.randn(n, 16, 8),
        options="--mode infer",
        manners=({}, {"microbatches": 3}),
    ),
    Case(
        "across_samples",
        AcrossSamples,
        features,
        square,
        features,
        sizes=(8,),
        manners=FP32_ONLY,
        expect=Refused(
            ("takes the samples of a batch together",),
            ("--per-microbatch", "--microbatches 1"),
            accept="--per-microbatch",
        ),
    ),
)
