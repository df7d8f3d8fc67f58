"""Parameters and buffers: tied, frozen, written in training, normalising."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
import torch.nn.functional as F
from adversary.case import FP32_ONLY, MANNERS, SAMPLES, Case, Refused
from adversary.inputs import classes, rows
from adversary.layers import Two
from torch import Tensor, nn

EXACT_WAYS = ({}, {"remat": "full"}, {"microbatches": 3})


class Normed(nn.Module):
    """Convolutions with BatchNorm between."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4, momentum=momentum)
        self.last, self.norm2 = nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4, momentum=momentum)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.first(x)).relu()
        return self.head(self.norm2(self.last(x)).relu().mean(-1))


class PooledNormed(Normed):
    """BatchNorm after a global pooling, which one sample cannot train."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.first(x)).relu()
        return self.head(self.norm2(self.last(x).mean(-1)).relu())


class Frozen(Normed):
    """BatchNorm that stays in eval mode."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm1.eval()
        self.norm2.eval()
        return self


class Teacher(Two):
    """A copy of a layer that follows it, as its average over the steps.

    Attributes:
        assigned: whether the copy gets new parameters, in place of new numbers.
    """

    def __init__(self, assigned: bool) -> None:
        super().__init__()
        self.teacher, self.assigned = nn.Linear(8, 8).requires_grad_(False), assigned

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.assigned:
            new = 0.9 * self.teacher.weight + 0.1 * self.middle.weight.detach()
            self.teacher.weight = nn.Parameter(new, False)  # refused: teacher_assigned
        elif self.training:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.middle.weight, 0.1)
        hidden = self.first(x).tanh()
        return self.last(self.middle(hidden) + self.teacher(hidden))


class Tallies(Two):
    """Sums over all samples that were seen, and the largest number of all."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("total", torch.zeros(8))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        if self.training:
            self.seen += len(x)
            self.total += hidden.detach().sum(0)
            self.largest.copy_(torch.maximum(self.largest, hidden.detach().abs().amax()))
        return self.last(hidden)


class Tied(nn.Module):
    """One layer used in the first and in the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.middle = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.shared(self.middle(self.shared(x).tanh())).tanh())


class TiedTransposed(nn.Module):
    """An autoencoder whose decoder is its encoder, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6) * 0.4)
        self.middle = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.middle((x @ self.weight.t()).tanh()).tanh() @ self.weight


class Counting(nn.Module):
    """Counts samples and keeps an average that training writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.shape[0]
        return self.last(self.first(x).tanh())


class FrozenParts(nn.Module):
    """Half of the parameters take no part in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.first.requires_grad_(False)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


class UnusedParts(FrozenParts):
    """A layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(5, 5)


class Adapted(nn.Module):
    """A low-rank adapter on frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.base(x) + 2.0 * self.up(self.down(x))).tanh())


class Parametrised(nn.Module):
    """Weight norm by torch's own parametrisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8))
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


class Merged(nn.Module):
    """An adapter that `eval()` merges into its weight, and `train()` takes out, as in loralib."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.merged = nn.Linear(6, 8), nn.Linear(8, 3), False
        self.down, self.up = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.zeros(8, 2))

    def train(self, mode: bool = True) -> Merged:  # refused: merged
        if self.merged == mode:
            self.first.weight.data += (-1 if mode else 1) * self.up @ self.down
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last((h if self.merged else h + x @ self.down.T @ self.up.T).tanh())


class Detached(nn.Module):
    """A target network: the same layers, no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.predictor = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        online = self.predictor(self.body(x).tanh())
        with torch.no_grad():
            target = self.body(x.flip(-1)).tanh()
        return online, target


class ParameterList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(6, 6) * 0.3 for _ in range(4))
        self.named = nn.ParameterDict({"head": torch.randn(6, 3), "bias": torch.zeros(3)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = (x @ weight).tanh()
        return x @ self.named["head"] + self.named["bias"]


class Constant(nn.Module):
    """A tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.scale = torch.linspace(0.5, 2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh() * self.scale)


class Spectral(nn.Module):
    """Instance, group and layer norms: none mixes samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.instance = nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4, affine=True)
        self.last, self.group = nn.Conv1d(4, 4, 3), nn.GroupNorm(2, 4)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.instance(self.first(x)).relu()
        return self.head(self.norm(self.group(self.last(x)).mean(-1)))


class Quantised(nn.Module):
    """Straight-through codes from a codebook, with their commitment loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3)
        self.codes = nn.Embedding(5, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        nearest = (x.unsqueeze(1) - self.codes.weight).square().sum(-1).argmin(-1)
        code = self.codes(nearest)
        loss = F.mse_loss(code, x.detach()) + 0.25 * F.mse_loss(x, code.detach())
        logits = self.last(x + (code - x).detach())
        return {"loss": F.cross_entropy(logits, labels) + loss, "logits": logits, "codes": nearest}


class Remembers(nn.Module):
    """Two layers, and what Python notes in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.calls = 0
        self.noted: dict[int, Tensor] = {}
        self.means: deque[Tensor] = deque(maxlen=3)


class ScalesByCalls(Remembers):
    def forward(self, x: Tensor) -> Tensor:  # refused: scales_by_calls
        self.calls += 1
        return self.last(self.first(x).tanh() * self.calls)


class WarmsUp(Remembers):
    """Not in the first call, and in training only."""

    def forward(self, x: Tensor) -> Tensor:  # refused: warms_up
        if self.training:
            self.calls += 1
        return self.last(self.first(x).tanh()) * (0.5 if self.calls < 100 else 1.0)


class KeepsMeans(Remembers):
    def forward(self, x: Tensor) -> Tensor:  # refused: keeps_means
        x = self.first(x)
        self.means.append(x.detach().mean(1).amin())
        return self.last(x) + sum(self.means) / len(self.means)


CALLS = {"all": 0, "noted": 0}


def next_call() -> int:  # refused: counts_in_a_global
    CALLS["all"] += 1
    return CALLS["all"]


class CountsInAGlobal(Remembers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh()) * (1.0 if next_call() < 10**6 else 0.5)


class CountsInItsClass(Remembers):
    seen = 0

    def forward(self, x: Tensor) -> Tensor:  # refused: counts_in_its_class
        CountsInItsClass.seen += 1
        return self.last(self.first(x).tanh()) / CountsInItsClass.seen


def counts_in_a_closure() -> nn.Module:
    calls = 0

    class Counts(Remembers):
        def forward(self, x: Tensor) -> Tensor:  # refused: counts_in_a_closure
            nonlocal calls
            calls += 1
            return self.last(self.first(x).tanh() * calls)

    return Counts()


class CountsForNobodyInAGlobal(Remembers):
    def forward(self, x: Tensor) -> Tensor:
        CALLS["noted"] += 1
        return self.last(self.first(x).tanh())


class CountsForNobody(Remembers):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.first(x).tanh())


class NotesTables(Remembers):
    """A table of positions, made when it is first needed."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] not in self.noted:
            self.noted[x.shape[1]] = torch.linspace(0, 1, x.shape[1])
        return self.last(self.first(x + self.noted[x.shape[1]]).tanh())


class MakesParameter(Remembers):
    def forward(self, x: Tensor) -> Tensor:  # refused: makes_parameter
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(x.shape[1]))
        return self.last(self.first(x * self.scale).tanh())


class Clips(Counting):
    """The clipping of a Wasserstein critic, in forward."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.last.weight.clamp_(-0.2, 0.2)  # refused: clips_weights
        return self.last(self.first(x).tanh())


class ClipsData(Counting):
    """The same by `.data`, which autograd does not follow: as often as that is done it is one.

    Attributes:
        late: whether something has read the weight before.
    """

    def __init__(self, *, late: bool = False) -> None:
        super().__init__()
        self.middle, self.late = nn.Linear(8, 8), late

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        if self.late:
            hidden = hidden @ self.middle.weight
        if self.training:
            self.middle.weight.data.clamp_(-0.1, 0.1)  # refused: clips_data_late
        return self.last(self.middle(hidden).tanh())


class MasksItsWeight(Counting):
    """The masked weights of PixelCNN, in place by `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", (torch.arange(8)[:, None] >= torch.arange(6)).float())

    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.data *= self.kept
        return self.last(self.first(x).tanh())


class ClipsTable(Counting):
    """The same of a table, of whose rows a backward keeps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.table.weight.clamp_(-0.5, 0.5)
        return self.last(self.first(x + self.table((x[:, 0] > 0).long())).tanh())


class Corrected(Counting):
    """Corrects the bias of a mean by the number of calls."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return self.last(self.first(x).tanh()) * (1 - 0.9 ** self.seen.clamp(min=1))


REMEMBERS = Refused(("another call of the model", "which forward changes"), ("register_buffer",))


class HeldFixed(Two):
    """A layer that gets no gradients through one of its two calls, as a critic while one trains
    what it judges."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        self.last.requires_grad_(False)
        held = self.last(hidden)
        for parameter in self.last.parameters():
            parameter.requires_grad = True
        return held, self.last(hidden.detach() * 2)


class Thaws(Two):
    """A frozen layer that the first call lets be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.first.requires_grad_(True)  # refused: thaws
        return super().forward(x)


class Freezes(Two):
    """A trained layer that the first call freezes."""

    def forward(self, x: Tensor) -> Tensor:
        self.first.requires_grad_(False)  # refused: freezes
        return super().forward(x)


def of_both(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output[0], target) - 0.3 * F.cross_entropy(output[1], target)


def signals(samples: int) -> Tensor:
    return torch.randn(samples, 2, 9)


def byol(output: tuple[Tensor, Tensor], _: object) -> Tensor:
    return -F.cosine_similarity(*output).mean()


class SizedByTheFirstCall(Two):
    """A table in a buffer, as large as the inputs that are seen first."""

    def __init__(self, *, kept: bool = False) -> None:
        super().__init__()
        self.register_buffer("places", torch.zeros(1), persistent=kept)

    def made_for(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[1], dtype=x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.places) != x.shape[1]:
            self.places = self.made_for(x)
        return self.last(self.body(x + self.places.cos()))


class ScaledByTheFirstCall(SizedByTheFirstCall):
    """The same of what the first batch has."""

    def made_for(self, x: Tensor) -> Tensor:
        return x.abs().amax(0)


def sized_before() -> nn.Module:
    model = SizedByTheFirstCall()
    model(rows(2))
    return model


def simple(
    name: str, model: Callable[[], nn.Module], inputs: object = rows, **options: object
) -> Case:
    return Case(name, model, inputs, F.cross_entropy, classes, **options)


class Overlapping(nn.Module):
    """A buffer that is a part of another, which counts."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("whole", torch.zeros(4))
        self.register_buffer("part", self.whole[:2])
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.counts:
            self.whole.add_(1.0)  # refused: overlapping
        return self.second(self.first(x).tanh()) + self.part.sum()


class LookedUp(nn.Module):
    """Looks weights up without their gradients, in a function of forward's that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.bias = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(5, 6)

    def looked_up(self, x: Tensor) -> Tensor:
        shifted = x - x.amax(1, keepdim=True)
        near = (shifted.exp() + shifted.square()).sigmoid()
        places = torch.where(near > 0.5, near, -near).mul(7).long().clamp(min=0, max=4)
        with torch.no_grad():
            rows = self.bias.weight.t()[places].permute(0, 2, 1)
            rows = rows.contiguous()
        return rows.sum(-1) + near

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        return self.last(y * self.looked_up(x) + self.looked_up(y))


class MovingTarget(nn.Module):
    """A target of moving averages, which forward assigns to `.data`."""

    def __init__(self, *, always: bool = False) -> None:
        super().__init__()
        self.always = always
        self.online, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.target = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            pairs = zip(self.target.parameters(), self.online.parameters(), strict=True)
            for slow, fast in pairs if self.training or self.always else ():
                slow.data = slow.data * 0.9 + fast.data * 0.1  # refused: moves_apart
            goal = self.target(x)
        return self.last(self.online(x).tanh() * goal)


class ReadsWithin(nn.Module):
    """Calls an nn.Sequential, reads a weight within it by itself, and ties another to one there."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first[0].weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) + F.linear(x, self.first[2].weight)
        return self.third(self.second(y).tanh())


class SameData(nn.Module):
    """Tied by `.data`: two parameters, each with a gradient of its own, in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight.data = self.first.weight.data

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).tanh()).tanh())


SIZED = Refused(("another tensor to the buffer places",), ("once in build_model()",), at_line=False)

TOLD = Refused(("the first call is not the second",), ("build_model()",))

CASES = (
    Case("held_fixed", HeldFixed, rows, of_both, classes),
    simple("thaws", Thaws, expect=TOLD),
    simple("freezes", Freezes, expect=TOLD),
    simple("sized_by_the_first_call", SizedByTheFirstCall),
    simple("sized_and_kept", lambda: SizedByTheFirstCall(kept=True), expect=SIZED),
    simple("scaled_by_the_first_call", ScaledByTheFirstCall, expect=SIZED),
    simple("sized_before", sized_before),
    simple(
        "batchnorm_exact",
        Normed,
        signals,
        options="--batchnorm exact",
        sizes=(8, 5),
        manners=EXACT_WAYS,
        quick=True,
    ),
    simple(
        "batchnorm_micro",
        Normed,
        signals,
        reference="micro-batches",
        sizes=(8, 5),
        manners=({}, {"schedule": "1f1b", "remat": "full"}),
    ),
    simple(
        "batchnorm_one_by_one",
        Normed,
        signals,
        microbatches=SAMPLES,
        reference="micro-batches",
        sizes=(SAMPLES, 5),
        manners=MANNERS[:2],
    ),
    simple(
        "batchnorm_at_the_default",
        PooledNormed,
        signals,
        microbatches=None,
        reference="micro-batches",
        sizes=(8, 6, 4),
        manners=MANNERS[:2],
    ),
    simple("batchnorm_inference", Normed, signals, options="--mode infer"),
    simple("batchnorm_frozen", Frozen, signals, quick=True),
    simple(
        "batchnorm_cumulative",
        lambda: Normed(momentum=None),
        signals,
        options="--batchnorm exact",
        sizes=(8, 5),
        manners=EXACT_WAYS,
    ),
    simple("tied", Tied),
    simple("tallies", Tallies),
    simple(
        "teacher_assigned",
        lambda: Teacher(assigned=True),
        expect=Refused(("assigns another tensor", "weight"), (".copy_(",)),
    ),
    simple("teacher_written", lambda: Teacher(assigned=False)),
    simple("looked_up", LookedUp, options="--stages 1"),
    simple(
        "moves_apart",
        lambda: MovingTarget(always=True),
        expect=Refused(("parameter target.", "in eval mode too"), ("if self.training",)),
    ),
    simple("moving_target", MovingTarget),
    simple("moving_target_in_one_piece", MovingTarget, options="--microbatches 1"),
    simple(
        "moving_target_exact",
        MovingTarget,
        options="--batchnorm exact",
        manners=({}, {"remat": "full"}),
    ),
    simple("reads_within", ReadsWithin, options="--stages 1"),
    Case("tied_transposed", TiedTransposed, rows, F.mse_loss, rows),
    simple("counting", Counting),
    simple(
        "clips_weights",
        Clips,
        manners=({}, {"precision": "bf16"}),
        expect=Refused(
            ("last.weight", "is trained", "another micro-batch"),
            ("--microbatches 1",),
            accept="--microbatches 1",
            reference="whole",
        ),
    ),
    simple("clips_data", ClipsData),
    simple(
        "clips_data_late",
        lambda: ClipsData(late=True),
        expect=Refused(
            ("middle.weight", "is trained", "another micro-batch"), ("--microbatches 1",)
        ),
    ),
    simple("clips_a_table", ClipsTable),
    simple("masks_its_weight", MasksItsWeight),
    simple("corrects_by_calls", Corrected),
    simple("scales_by_calls", ScalesByCalls, expect=REMEMBERS),
    simple("warms_up", WarmsUp, expect=REMEMBERS),
    simple("keeps_means", KeepsMeans, expect=REMEMBERS),
    simple("counts_in_a_global", CountsInAGlobal, expect=REMEMBERS),
    simple("counts_in_its_class", CountsInItsClass, expect=REMEMBERS),
    simple("counts_in_a_closure", counts_in_a_closure, expect=REMEMBERS),
    simple("counts_for_nobody_in_a_global", CountsForNobodyInAGlobal),
    simple("counts_for_nobody", CountsForNobody),
    simple("notes_tables", NotesTables),
    simple(
        "makes_parameter",
        MakesParameter,
        expect=Refused(("forward makes scale",), ("build_model()",)),
    ),
    simple("frozen_parts", FrozenParts),
    simple("unused_parts", UnusedParts),
    simple("adapted", Adapted),
    simple(
        "merged",
        Merged,
        expect=Refused(("writes to first.weight", "eval mode"), ("merge_weights=False",)),
    ),
    simple("weight_norm", Parametrised),
    Case("detached", Detached, rows, byol, manners=FP32_ONLY),
    simple("parameter_list", ParameterList),
    simple("constant", Constant),
    simple("other_norms", Spectral, signals, manners=FP32_ONLY),
    Case("codebook", Quantised, lambda n: (rows(n), classes(n)), manners=FP32_ONLY),
    simple(
        "overlapping",
        lambda: Overlapping(counts=True),
        expect=Refused(("same memory", "written to"), ("slice or reshape it in forward",)),
    ),
    simple("overlapping_at_rest", lambda: Overlapping(counts=False)),
    simple(
        "same_data",
        SameData,
        expect=Refused(("same memory", "training"), ("same nn.Parameter",), at_line=False),
    ),
)
