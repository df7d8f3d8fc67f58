"""Casts, autocast regions, and models whose weights are not all of one type."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from adversary.case import FP32_ONLY, MANNERS, ONE_PIECE_BF16, Case, Refused
from adversary.inputs import classes, rows, steps
from torch import Tensor, nn

BOTH = (
    {},
    ONE_PIECE_BF16,
    {"precision": "bf16", "schedule": "1f1b", "remat": "full", "microbatches": 1},
)

IN_ONE_PIECE = ({"microbatches": 1}, ONE_PIECE_BF16)


class RMSNorm(nn.Module):
    """As Llama has it: computed in fp32, whatever comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(kind)


class Normed(nn.Module):
    """Two layers with an RMSNorm after each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Linear(6, 8), RMSNorm(8)
        self.last, self.norm2 = nn.Linear(8, 3), RMSNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm2(self.last(self.norm1(self.first(x)).tanh()))


class FloatSoftmax(nn.Module):
    """`.float()` before a softmax, `.type_as` after it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 24), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        chances = (q @ k.transpose(-2, -1)).float().div(8**0.5).softmax(-1).type_as(q)
        return self.out(chances @ v)


class DtypeArgument(FloatSoftmax):
    """The same by `dtype=torch.float32`."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        chances = F.softmax(q @ k.transpose(-2, -1), dim=-1, dtype=torch.float32).to(q.dtype)
        return self.out(chances @ v)


class Region(nn.Module):
    """A part that says it is not to be autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        with torch.autocast(x.device.type, enabled=False):
            x = self.middle(x.float()).exp().clamp(max=9)
        return self.last(x)


class Decorated(Region):
    """The same as a decorator of a method."""

    @torch.autocast("cpu", enabled=False)
    def careful(self, x: Tensor) -> Tensor:
        return self.middle(x.float()).square()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.careful(self.first(x).tanh()))


class OwnAutocast(Region):
    """A part that asks for bf16 by itself, in whatever precision the rest is."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        with torch.autocast(x.device.type, torch.bfloat16):
            x = self.middle(x)
        return self.last(x.float())


class Asks(Region):
    """Looks at the type of what it gets."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + torch.zeros(8, dtype=x.dtype, device=x.device)
        tiny = torch.finfo(x.dtype).eps
        x = self.middle(x.tanh()) + tiny
        return self.last(x.to(self.last.weight.dtype))


class Doubles(Region):
    """A part in double precision."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).double().cumsum(-1).tanh().float()
        return self.last(self.middle(x).tanh())


class ToOther(Region):
    """`.to(other)`, which says dtype and device at once."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        gate = self.middle(hidden).sigmoid().to(x)
        return self.last(hidden.to(x) * gate)


class HalfWeights(nn.Module):
    """bf16 weights, fp32 in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8).bfloat16()
        self.last = nn.Linear(8, 3).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.bfloat16()).tanh()).float()


class MixedWeights(HalfWeights):
    """A body in bf16, a head in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.to(self.first.weight.dtype)).float().tanh())


class IntegerCasts(Region):
    """Numbers to booleans, to integers and back."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        steps = (hidden * 4).round().long().clamp(-3, 3)
        positive = (steps > 0).to(hidden.dtype)
        return self.last(self.middle(hidden).tanh() * positive + steps.float())


class GradScaled(Region):
    """Keeps a residual stream in fp32, as T5 does."""

    def forward(self, x: Tensor) -> Tensor:
        stream = self.first(x).float()
        stream = stream + self.middle(stream).float()
        variance = stream.pow(2).mean(-1, keepdim=True)
        stream = stream * torch.rsqrt(variance + 1e-6)
        if self.last.weight.dtype in (torch.float16, torch.bfloat16):
            stream = stream.to(self.last.weight.dtype)
        return self.last(stream)


class Rotated(Region):
    """Turns pairs of features as complex numbers, which torch has not of 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        pairs = self.first(x).unflatten(-1, (-1, 2))
        turned = torch.view_as_complex(pairs) * 1j  # refused: complex_of_16_bits
        return self.last(torch.view_as_real(turned).flatten(1))


class Scattered(Region):
    """Adds what a layer makes of 16 bits to a tensor of 32, which scatter does not."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        places = torch.zeros_like(hidden, dtype=torch.long)
        start = torch.zeros(hidden.shape)
        return self.last(start.scatter_add(1, places, hidden))  # refused: scattered_16_bits


def mean_logits(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.mean(1), target)


def float_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.float(), target)


def both_ways(name: str, model: type[nn.Module], **options: object) -> tuple[Case, ...]:
    """Compiled in fp32 and run in bf16 too, and compiled in bf16 and run in fp32 too."""
    return (
        Case(name, model, rows, F.cross_entropy, classes, manners=BOTH, **options),
        Case(
            f"{name}_compiled_in_bf16",
            model,
            rows,
            F.cross_entropy,
            classes,
            options="--precision bf16",
            manners=({}, {"precision": "fp32"}, ONE_PIECE_BF16),
        ),
    )


def not_in_bf16(name: str, model: type[nn.Module]) -> Case:
    return Case(
        name,
        model,
        rows,
        F.cross_entropy,
        classes,
        options="--precision bf16",
        expect=Refused(
            ("fails in bf16",), ("enabled=False",), "--precision fp32", reference="whole"
        ),
        manners=({}, {"schedule": "1f1b", "remat": "full"}),
    )


CASES = (
    not_in_bf16("complex_of_16_bits", Rotated),
    not_in_bf16("scattered_16_bits", Scattered),
    *both_ways("rms_norm", Normed, quick=True),
    *both_ways("region", Region),
    *both_ways("decorated", Decorated),
    *both_ways("asks_for_dtypes", Asks),
    *both_ways("to_other", ToOther),
    *both_ways("residual_stream", GradScaled),
    Case("float_softmax", FloatSoftmax, steps, mean_logits, classes, manners=BOTH),
    Case("softmax_in_fp32", DtypeArgument, steps, mean_logits, classes, manners=BOTH),
    Case("own_autocast", OwnAutocast, rows, F.cross_entropy, classes, manners=IN_ONE_PIECE),
    Case("doubles", Doubles, rows, F.cross_entropy, classes, manners=BOTH),
    Case("float_loss", Region, rows, float_loss, classes, manners=BOTH),
    Case(
        "half_weights", HalfWeights, rows, F.cross_entropy, classes, manners=({"microbatches": 1},)
    ),
    Case(
        "mixed_weights",
        MixedWeights,
        rows,
        F.cross_entropy,
        classes,
        manners=({"microbatches": 1},),
    ),
    Case("integer_casts", IntegerCasts, rows, F.cross_entropy, classes, manners=FP32_ONLY),
    Case(
        "double_mlp",
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double(),
        lambda n: rows(n).double(),
        F.cross_entropy,
        classes,
        manners=MANNERS[:2],
    ),
    Case(
        "rms_norm_fp16",
        Normed,
        rows,
        F.cross_entropy,
        classes,
        manners=({"precision": "bf16", "microbatches": 1},),
        options="--precision fp16",
    ),
    Case("rms_norm_inference", Normed, rows, options="--mode infer"),
    Case(
        "region_inference",
        Region,
        rows,
        options="--mode infer --precision bf16",
        manners=({}, {"precision": "fp32"}),
    ),
)
