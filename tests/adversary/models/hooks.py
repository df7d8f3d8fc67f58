"""Hooks, checkpointing, observers: what other code puts around a model."""

from __future__ import annotations

import warnings

import torch
import torch.ao.quantization
import torch.nn.functional as F
from adversary.case import FP32_ONLY, Case, Refused
from adversary.inputs import classes, rows
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).tanh()).tanh())


def with_forward_hook() -> nn.Module:
    model = Two()
    model.middle.register_forward_hook(lambda module, args, output: output * 2)
    return model


def with_pre_hook() -> nn.Module:
    model = Two()
    model.middle.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return model


class HookUnasked(Two):
    """Where autograd does not record, as in evaluations, torch raises."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        hidden.register_hook(lambda gradient: gradient * 2)  # refused: unasked
        return self.last(self.middle(hidden).tanh())


def with_closure() -> nn.Module:
    """The hook reads another module of the same model."""
    model = Two()
    gate = nn.Linear(8, 8)
    model.gate = gate

    def gated(module: nn.Module, args: object, output: Tensor) -> Tensor:
        return output * gate(output).sigmoid()

    model.first.register_forward_hook(gated)
    return model


class Remembers(Two):
    """A closure hook that keeps what a layer gave, for the forward to use."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Tensor] = {}
        self.first.register_forward_hook(lambda m, a, output: self.seen.update(first=output))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + self.seen["first"].mean(-1, keepdim=True)


def with_full_backward_hook() -> nn.Module:
    model = Two()
    model.middle.register_full_backward_hook(lambda module, given, got: None)
    return model


def with_parameter_hook() -> nn.Module:
    """Gradients are halved when they are there."""
    model = Two()
    model.middle.weight.register_hook(lambda gradient: gradient * 0.5)  # refused: of_a_parameter
    return model


class TensorHook(Two):
    """A hook on an activation."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        if hidden.requires_grad:
            hidden.register_hook(lambda g: g * 0.5)
        return self.last(self.middle(hidden).tanh())


class HookInTraining(Two):
    """A hook that takes for granted that training computes gradients."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        if self.training:
            hidden.register_hook(lambda g: g * 0.5)
        return self.last(self.middle(hidden).tanh())


class ManyTensorHooks(Two):
    """Clipped, masked by a buffer and by what the forward computes, of tensors used before, or
    written to after."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keep", (torch.rand(8) > 0.3).float())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        gate = hidden.mean(-1, keepdim=True).sigmoid()
        hooked = hidden.requires_grad
        if hooked:
            hidden.register_hook(lambda g: g.clamp(-1e-2, 1e-2))
        more = self.middle(hidden) + hidden
        if hooked:
            more.register_hook(lambda g: torch.where(gate > 0.5, g * self.keep, -g))
        out = self.last(more.tanh())
        if hooked:
            out.register_hook(lambda g: 2 * g + 0 * out)
        out.mul_(1.5)
        return out


class MixingHook(Two):
    """A gradient that is normalised over the batch."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        if hidden.requires_grad:
            hidden.register_hook(lambda g: g / (g.norm() + 1e-3))  # refused: mixing_hook
        return self.last(self.middle(hidden).tanh())


class BoundsAll(Two):
    """Bounds what no gradient of the example exceeds: the norm over the batch, within a
    checkpoint, by a method."""

    def bounded(self, gradient: Tensor) -> Tensor:
        return gradient * (50 / (gradient.norm() + 1e-6)).clamp(max=1)

    def part(self, x: Tensor) -> Tensor:
        hidden = self.middle(x)
        if hidden.requires_grad:
            hidden.register_hook(self.bounded)  # refused: bounds_all
        return hidden.tanh()

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.part, self.first(x).tanh(), use_reentrant=False)
        return self.last(hidden)


class BoundsEach(BoundsAll):
    """The same of each sample, with a bound that many exceed."""

    def bounded(self, gradient: Tensor) -> Tensor:
        return gradient * (0.02 / (gradient.norm(dim=-1, keepdim=True) + 1e-6)).clamp(max=1)


class BoundsWeight(Two):
    """Bounds entries of a sum over samples."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.last.weight.tanh()
        if weight.requires_grad:
            weight.register_hook(lambda g: g.clamp(-30, 30))  # refused: bounds_weight
        return F.linear(self.middle(self.first(x).tanh()), weight)


class WritingHook(Two):
    """Plain PyTorch goes on with what is written into the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        def halve(gradient: Tensor) -> None:
            gradient[:, :4].mul_(0.5)

        hidden = self.first(x).tanh()
        if hidden.requires_grad:
            hidden.register_hook(halve)  # refused: writing
        return self.last(self.middle(hidden).tanh())


class CountingHook(Two):
    """The norm of a gradient is kept in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("norm", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        def keep(gradient: Tensor) -> None:
            self.norm.copy_(gradient.norm())

        hidden = self.first(x).tanh()
        if hidden.requires_grad:
            hidden.register_hook(keep)  # refused: counting
        return self.last(self.middle(hidden).tanh())


class HooksWhileItRuns(Two):
    """A layer that is called under a hook which this call registers, and again without."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        handles = (
            self.middle.register_forward_hook(lambda m, given, made: made * 0.5),
            self.middle.register_forward_pre_hook(lambda m, given: (given[0].clamp(-0.5, 0.5),)),
            self.middle.register_full_backward_pre_hook(lambda m, got: (got[0] * 2,)),
        )
        hooked = self.middle(x)
        for handle in handles:
            handle.remove()
        return self.last(hooked + self.middle(x))


def with_changed_gradients() -> nn.Module:
    """By hooks of modules, one after another, of tensors that others read too."""
    model = TensorHook()
    model.middle.register_full_backward_hook(lambda m, given, got: (given[0] * 0.5,))
    model.middle.register_full_backward_hook(lambda m, given, got: (given[0].clamp(-0.01, 0.01),))
    model.middle.register_full_backward_pre_hook(lambda m, got: (got[0] * 3,))
    return model


def with_gradients_of_others() -> nn.Module:
    """Guided backpropagation."""
    model = Two()
    model.middle.register_full_backward_hook(
        lambda m, given, got: (given[0] * got[0].relu(),)  # refused: of_others
    )
    return model


class Checkpointed(Two):
    """Recomputes its middle in the backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        x = checkpoint(self.middle, x, use_reentrant=self.reentrant).tanh()
        return self.last(x)


class Sequentially(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint_sequential(self.body, 2, x, use_reentrant=False))


class Straight(torch.autograd.Function):
    """Rounds forward, passes gradients straight through."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


class OwnFunction(Two):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        return self.last(Straight.apply(self.middle(hidden) * 4) / 4)


class StraightByDetach(Two):
    """The same without a function of one's own."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(self.first(x).tanh()) * 4
        return self.last((hidden + (hidden.round() - hidden).detach()) / 4)


class Cancels(Two):
    """A bias whose gradient is zero but for rounding: a softmax does not see it."""

    def forward(self, x: Tensor) -> Tensor:
        shift = self.middle.bias.sum()
        logits = self.last(self.first(x).tanh()) + shift
        return (logits - logits.logsumexp(-1, keepdim=True)) + 0 * self.middle(self.first(x)).sum(
            -1, keepdim=True
        )


class Vmapped(Two):
    """torch.func.vmap over samples."""

    def forward(self, x: Tensor) -> Tensor:
        def one(row: Tensor) -> Tensor:
            return self.last(self.first(row).tanh())

        return torch.vmap(one)(x)  # refused: vmapped


class Observed(Two):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)  # refused: fresh_observers
        return self.last(self.middle(hidden).tanh())


def prepared(model: nn.Module) -> nn.Module:
    """For training with simulated 8-bit numbers, whose observers follow the batches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.train()
        model.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
        return torch.ao.quantization.prepare_qat(model)


def frozen() -> nn.Module:
    """With ranges that stay as they are."""
    return observed().apply(torch.ao.quantization.disable_observer)


def observed() -> nn.Module:
    """With observers that have seen a batch."""
    model = prepared(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
    model(rows(8))
    return model


class Rounded(Two):
    """Simulates 8-bit numbers by hand: of all features, of each, and by a scale in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scales", torch.rand(8) / 10 + 0.01)
        self.register_buffer("zeros", torch.zeros(8, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.fake_quantize_per_tensor_affine(self.first(x).tanh(), 0.01, 0, -128, 127)
        x = self.middle(x).tanh()
        x = torch.fake_quantize_per_channel_affine(x, self.scales, self.zeros, 1, -128, 127)
        scale, zero = self.scales[:1], self.zeros[:1]
        return torch.fake_quantize_per_tensor_affine(self.last(x), scale, zero, -128, 127)


class TakenBack(Two):
    """Hooks that are removed before the backward, of a tensor and of a module."""

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        handle = self.middle.register_forward_hook(lambda module, args, made: seen.append(made))
        hidden = self.first(x)
        if hidden.requires_grad:
            first = hidden.register_hook(lambda gradient: 2 * gradient)
            hidden.register_hook(lambda gradient: 3 * gradient)
        made = self.middle(hidden.tanh())
        handle.remove()
        if hidden.requires_grad:
            first.remove()
        return self.last(made + seen[0] + hidden)


class ByNumber(Two):
    """A hook that divides by the samples that there are."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda g: g / g.shape[0])  # refused: by_number
        return self.last(self.middle(hidden).tanh())


class ScaledGradient(Two):
    """A branch whose gradients are scaled."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        hidden = 0.1 * hidden + 0.9 * hidden.detach()
        return self.last(self.middle(hidden).tanh())


def simple(name: str, model: object, **options: object) -> Case:
    return Case(name, model, rows, F.cross_entropy, classes, **options)


ONE_PIECE = ({}, {"remat": "full"})


def removing_itself() -> nn.Module:
    model = Two()

    def doubled_once(module: nn.Module, inputs: object, output: Tensor) -> Tensor:  # refused: once
        handle.remove()
        return output * 2

    handle = model.middle.register_forward_hook(doubled_once)
    return model


CASES = (
    simple(
        "once",
        removing_itself,
        expect=Refused(
            ("a hook of middle", "is removed when the model is called"), ("build_model",)
        ),
    ),
    simple("forward", with_forward_hook),
    simple("pre", with_pre_hook),
    simple("closure", with_closure),
    simple("remembers", Remembers),
    simple("full_backward", with_full_backward_hook),
    simple(
        "of_a_parameter",
        with_parameter_hook,
        expect=Refused(("middle.weight", "hook"), ("Pipeline().named_parameters()",)),
    ),
    simple("of_an_activation", TensorHook),
    simple(
        "unasked",
        HookUnasked,
        expect=Refused(("doesn't require gradient",), ("output.requires_grad",)),
    ),
    simple("in_training", HookInTraining),
    simple("of_activations", ManyTensorHooks, manners=FP32_ONLY, quick=True),
    simple("changed_gradients", with_changed_gradients),
    simple(
        "mixing_hook",
        MixingHook,
        manners=ONE_PIECE,
        expect=Refused(("together",), ("--per-microbatch",), accept="--microbatches 1"),
    ),
    simple(
        "bounds_all",
        BoundsAll,
        manners=ONE_PIECE,
        expect=Refused(("a hook", "together"), ("--per-microbatch",), accept="--microbatches 1"),
    ),
    simple(
        "bounds_weight",
        BoundsWeight,
        manners=ONE_PIECE,
        expect=Refused(("a hook", "together"), ("each sample",), accept="--microbatches 1"),
    ),
    simple("bounds_each", BoundsEach, manners=FP32_ONLY),
    simple("taken_back", TakenBack),
    simple(
        "by_number",
        ByNumber,
        manners=ONE_PIECE,
        expect=Refused(("a hook", "together"), ("each sample",), accept="--microbatches 1"),
    ),
    simple("writing", WritingHook, expect=Refused(("writes into the gradient",), ("return",))),
    simple("counting", CountingHook, expect=Refused(("a tensor of the model",), ("return",))),
    simple("of_others", with_gradients_of_others, expect=Refused(("of others",), ("backward",))),
    simple("registered_while_it_runs", HooksWhileItRuns),
    simple("checkpoint", lambda: Checkpointed(False)),
    simple("checkpoint_reentrant", lambda: Checkpointed(True)),
    simple("checkpoint_sequential", Sequentially),
    simple("own_function", OwnFunction, manners=FP32_ONLY),
    simple("straight_through", StraightByDetach, manners=FP32_ONLY),
    Case("zero_but_for_rounding", Cancels, rows, F.nll_loss, classes, manners=FP32_ONLY),
    simple("vmapped", Vmapped, expect=Refused(("torch.vmap",), ("whole batch",))),
    simple(
        "observers",
        observed,
        sizes=(8,),
        manners=FP32_ONLY,
        expect=Refused(
            ("fake_quant",),
            ("--per-microbatch", "--microbatches 1", "disable_observer"),
            accept="--per-microbatch",
            at_line=False,
        ),
    ),
    simple("rounded", Rounded, manners=FP32_ONLY),
    simple("frozen_observers", frozen, sizes=(8,), manners=FP32_ONLY),
    simple(
        "fresh_observers",
        lambda: prepared(Observed()),
        expect=Refused(("gets its size when the model runs",), ("once in build_model()",)),
    ),
    simple("scaled_gradient", ScaledGradient),
)
