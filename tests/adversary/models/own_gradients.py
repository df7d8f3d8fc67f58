"""Functions with a backward of the user's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from adversary.case import FP32_ONLY, Case, Refused
from adversary.inputs import classes, rows
from adversary.layers import Two
from torch import Tensor, nn

LEVELS = 4.0


def nearest(x: Tensor) -> Tensor:
    return (x * LEVELS).round() / LEVELS


class Rounded(torch.autograd.Function):
    """Straight through, clipped; uses a function and a number of its module."""

    @staticmethod
    def forward(ctx: object, x: Tensor, limit: float = 1.0) -> Tensor:
        ctx.save_for_backward(x)
        ctx.limit = limit
        return nearest(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() <= ctx.limit), None


class StraightThrough(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(Rounded.apply(self.body(x), 0.7))


class Reversed(torch.autograd.Function):
    """Gradient reversal, as domain-adversarial training has it."""

    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.neg() * ctx.strength, None


class DomainAdversarial(Two):
    def __init__(self) -> None:
        super().__init__()
        self.domain = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return self.last(hidden) + self.domain(Reversed.apply(hidden, 0.3))


class Fused(torch.autograd.Function):
    """Two inputs that take gradients, two outputs, a parameter, setup_context."""

    @staticmethod
    def forward(x, weight, eps):
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return x * scale * weight, scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, _ = inputs
        ctx.save_for_backward(x, weight, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, gradient, _):
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        inner = gradient * weight
        back = scale * (inner - normed * (inner * normed).mean(-1, keepdim=True))
        return back, (gradient * normed).sum(0), None


class FusedNorm(Two):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        out, _scale = Fused.apply(self.body(x), self.weight, 1e-6)
        return self.last(out)


class InLayers(nn.Module):
    """Layers that repeat, each with a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + Rounded.apply(layer(x).tanh())
        return self.head(x)


def straight(x: Tensor) -> Tensor:
    """As many repositories call it."""
    return Rounded.apply(x)


def quantiser(bits: int) -> type[torch.autograd.Function]:
    """A function for a number of bits, as DoReFa makes it."""
    levels = 2**bits - 1

    class Quantiser(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx: object, x: Tensor) -> Tensor:
            return (x * levels).round() / levels

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return gradient.clone()

    return Quantiser


class Bits(Two):
    """Two functions of one source, and one by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = quantiser(4), quantiser(2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fine.apply(self.first(x).sigmoid())
        return self.last(straight(self.coarse.apply(self.middle(hidden).sigmoid())))


class Scaled(torch.autograd.Function):
    """Rounds by the largest of all samples."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        scale = x.abs().amax() / 7
        return (x / scale).round() * scale

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


class PerTensor(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(Scaled.apply(self.body(x)))  # refused: per_tensor


class Kept(torch.autograd.Function):
    """Keeps tensors beside save_for_backward, and writes into one in the backward."""

    @staticmethod
    def forward(ctx, x, others):
        ctx.mask = x > 0
        ctx.count = len(others)
        ctx.out = x.clone()
        return ctx.out * ctx.mask

    @staticmethod
    def backward(ctx, gradient):
        return gradient.masked_fill(~ctx.mask, 0.0) * ctx.out.abs() * ctx.count, None


class KeepsInContext(Two):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(self.first(x).tanh())
        return self.last(F.relu(Kept.apply(hidden, [1, None, "two"])))


class Doubles(torch.autograd.Function):
    """Writes in place."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class InPlace(Two):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(self.first(x).tanh())
        Doubles.apply(hidden)
        return self.last(hidden.tanh())


class ByAutograd(torch.autograd.Function):
    """Differentiates by autograd what it has computed in forward, as solvers of equations do."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            start = x.detach().requires_grad_()
            end = start.sin() * start
        ctx.save_for_backward(start, end)
        return end.detach()

    @staticmethod
    def backward(ctx, gradient):
        start, end = ctx.saved_tensors
        return torch.autograd.grad(end, start, gradient, retain_graph=True)[0]


class Solves(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(ByAutograd.apply(self.first(x)))


class Penalises(Two):
    """A gradient penalty within forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            made = self.last(self.body(x))
            (slope,) = torch.autograd.grad(made.sum(), x, create_graph=True)  # refused: penalises
        return made + slope.norm(dim=-1, keepdim=True)


class Forces(Two):
    """Forces are the gradient of an energy by places, which are an input."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x.requires_grad_()
            energy = self.last(self.body(x))
            forces = torch.autograd.grad(energy.sum(), x, create_graph=True)  # refused: forces
        return energy - forces[0][:, :3]


class Adapts(Two):
    """A step of descent on a weight, by a loss of its own, before it is used."""

    def forward(self, x: Tensor) -> Tensor:
        hidden, weight = self.body(x), self.last.weight
        if self.training:
            inner = F.linear(hidden, weight).square().sum()
            (slope,) = torch.autograd.grad(inner, weight, create_graph=True)  # refused: adapts
            weight = weight - 0.1 * slope
        return F.linear(hidden, weight)


class Bounded(torch.autograd.Function):
    """Bounds the norm of all gradients, which those of the example do not exceed."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient / (gradient.norm() / 20).clamp(min=1)


class BoundedByValue(torch.autograd.Function):
    """The same by numbers of Python's."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient / max(1.0, float(gradient.norm()) / 20)


class Bounds(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(Bounded.apply(self.body(x)))  # refused: clips_all


class BoundsByValue(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(BoundedByValue.apply(self.body(x)))  # refused: clips_by_value


class Local(Two):
    """A function that nobody else can write down."""

    def __init__(self) -> None:
        super().__init__()
        gate = nn.Linear(8, 8)

        class Gated(torch.autograd.Function):  # refused: local
            @staticmethod
            def forward(ctx: object, x: Tensor) -> Tensor:
                return x.round()

            @staticmethod
            def backward(ctx: object, gradient: Tensor) -> Tensor:
                return gradient * gate.weight.mean()

        self.function, self.gate = Gated, gate

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function.apply(self.gate(self.body(x))))


def through(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(straight(output), target)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + straight(self.fc(x)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class MeetsInGradients(Two):
    """The samples meet in the gradients alone, beside one that is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.root = nn.Parameter(torch.tensor(-1.0))

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        mean = hidden.mean(0, keepdim=True)
        met = hidden + (mean - mean.detach()) * mean.detach()
        return met + torch.where(self.root > 0, self.root.sqrt(), 0.0)


def simple(name: str, model: object, **options: object) -> Case:
    options = {"manners": FP32_ONLY, **options}  # in 16 bits what rounds rounds elsewhere
    return Case(name, model, rows, F.cross_entropy, classes, **options)


MIXES = Refused(("together",), ("--microbatches 1",), accept="--per-microbatch")

BY_ITSELF = Refused(("differentiates by itself",), ("torch.autograd.Function of your own",))


@torch.library.custom_op("adversary_own_gradients::doubled", mutates_args=())
def doubled(x: Tensor, limit: float) -> Tensor:
    """An operator whose backward bounds the norm of all gradients together."""
    return 2 * x


def keep_limit(ctx: object, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.limit = inputs[1]


def bounded_gradient(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
    return 2 * gradient * (ctx.limit / gradient.norm().clamp(min=ctx.limit)), None


doubled.register_fake(lambda x, limit: torch.empty_like(x))
doubled.register_autograd(bounded_gradient, setup_context=keep_limit)


class ByOperator(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(doubled(self.body(x), limit=50.0))  # refused: clips_in_operator


class Jittered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * (1 + 0.1 * torch.randn_like(gradient))


class Jitters(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(Jittered.apply(self.body(x)))  # refused: jitters


class WarmsUp(Two):
    """Gives little until its weights have a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        scale = 0.1 if self.last.weight.grad is None else 1.0  # refused: reads_its_gradient
        return self.last(self.first(x).tanh()) * scale


CASES = (
    simple(
        "jitters",
        Jitters,
        expect=Refused(
            ("the backward of Jittered draws random numbers",),
            ("draw in forward", "save_for_backward", "--microbatches 1"),
        ),
    ),
    simple("straight_through", StraightThrough, quick=True),
    simple("reversed", DomainAdversarial, manners=None),
    simple("fused", FusedNorm, manners=None),
    simple("in_layers", InLayers),
    simple("bits", Bits),
    simple("keeps_in_context", KeepsInContext),
    simple("writes_in_place", InPlace),
    simple("in_blocks", Blocks),
    simple("by_autograd", Solves),
    simple("penalises", Penalises, expect=BY_ITSELF),
    simple("forces", Forces, expect=BY_ITSELF),
    simple("adapts", Adapts, expect=BY_ITSELF),
    Case("in_the_loss", Two, rows, through, classes, manners=FP32_ONLY),
    simple("per_tensor", PerTensor, sizes=(8,), expect=MIXES),
    simple(
        "clips_all",
        Bounds,
        manners=({}, {"remat": "full"}),
        expect=Refused(("Bounded", "together"), ("each sample",), accept="--microbatches 1"),
    ),
    simple(
        "clips_in_operator",
        ByOperator,
        expect=Refused(("doubled", "together"), ("each sample", "--microbatches 1")),
    ),
    simple(
        "clips_by_value",
        BoundsByValue,
        expect=Refused(("BoundedByValue", "Python values"), ("torch.where",)),
    ),
    simple(
        "reads_its_gradient",
        WarmsUp,
        expect=Refused(("reads the gradient of a tensor",), ("after step()",)),
    ),
    simple(
        "meets_in_gradients",
        MeetsInGradients,
        expect=Refused(
            ("takes the samples of a batch together",), ("--microbatches 1",), at_line=False
        ),
    ),
    simple("local", Local, expect=Refused(("Gated", "gate"), ("top of a file",))),
)
