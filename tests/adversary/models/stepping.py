"""State that training writes without looking at samples: counters, schedules, averages of weights,
power iterations. A mini-batch changes it once."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from adversary.case import FP32_ONLY, MANNERS, Case, Refused
from adversary.inputs import classes, rows
from adversary.layers import Two
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint


class WarmsUp(Two):
    """A factor that grows over the first five calls, chosen by `torch.where`."""

    def __init__(self, *, assigned: bool = False) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        self.assigned = assigned

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.assigned:
            self.step = self.step + 1
        elif self.training:
            self.step.add_(1)
        factor = torch.where(self.step < 3, self.step / 3, torch.ones(()))
        return self.last(self.body(x) * factor)


class WarmsUpTheLoss(Two):
    """The weight of a second term follows the number of calls, and may be returned."""

    def __init__(self, *, returned: bool = False) -> None:
        super().__init__()
        self.returned = returned
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.step += 1
        hidden = self.body(x)
        logits = self.last(hidden)
        weight = (self.step / 4).clamp(max=1)
        loss = F.cross_entropy(logits, labels) + weight * hidden.square().mean()
        return {"loss": loss, **({"weight": weight} if self.returned else {})}


class Momentum(nn.Module):
    """BYOL: a copy of the encoder follows it in a block without gradients, and encodes there."""

    def __init__(self, *, foreach: bool = False) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 5))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
        self.foreach = foreach

    @torch.no_grad()
    def follow(self) -> None:
        slow, fast = list(self.target.parameters()), list(self.online.parameters())
        if self.foreach:
            torch._foreach_lerp_(slow, fast, 0.1)
            return
        for one, other in zip(slow, fast, strict=True):
            one.data.mul_(0.9).add_(other.data, alpha=0.1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            self.follow()
        with torch.no_grad():
            goal = self.target(x.flip(-1))
        return self.predictor(self.online(x)), goal


class FollowsWithin(nn.Module):
    """The average is taken in the block in which samples are encoded by it."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.target = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.training:
                self.target.weight.lerp_(self.online.weight, 0.2)
            goal = self.target(x)
            spread = goal.view(x.shape[0], 2, 3).amax(1).repeat(1, 2)
        return self.last(self.online(x).tanh() * goal + spread)


class Decays(nn.Module):
    """The decay of the average follows from a counter; both are read in the same stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("average", torch.zeros(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            decay = torch.minimum(torch.tensor(0.9), (1 + self.calls) / (10 + self.calls))
            self.average.mul_(decay).add_(self.first.weight.detach() * (1 - decay))
        return self.last(self.first(x).tanh() + x @ self.average)


class Scheduled(Two):
    """A counter says the place in a table, of the middle dimension too, and where to write."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.linspace(0, 2, 40).view(5, 8))
        self.register_buffer("norms", torch.zeros(2, 4))
        self.register_buffer("last_ones", torch.zeros(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.norms[1, self.step % 4] = self.middle.weight.detach().norm()
            self.last_ones[self.step % 4] = self.middle.bias.detach()
            self.norms[:, self.step % 4] += torch.ones(2)
            self.step += 1
        hidden = (
            self.body(x) * self.table[self.step.clamp(max=4)] + self.last_ones[-1 - self.step % 4]
        )
        return self.last(hidden + self.table[:, self.step % 8].sum()) + self.norms.mean()


class CountsInTheLoss(nn.Module):
    """A loss that warms up by its own calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:  # refused: counts_in_the_loss
        self.step += 1
        return F.cross_entropy(output, target) * (self.step / 4).clamp(max=1)


class Checkpointed(Decays):
    """What reads the average runs again in the backward."""

    def mixed(self, x: Tensor) -> Tensor:
        return self.last((self.first(x) + x @ self.average).tanh())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average.lerp_(self.first.weight.detach(), 0.1)
        return checkpoint(self.mixed, x, use_reentrant=False).tanh() * self.last(x)


class CountsAlways(Two):
    """A counter that evaluations move too, and that is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        return {"logits": self.last(self.body(x) / self.calls.sqrt()), "calls": self.calls.clone()}


class BesideSamples(Two):
    """A counter of calls beside one of samples, and an average that only the first one decides."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.seen += x.shape[0]
        return self.last(self.body(x) / (1 + self.calls))


class OfSamplesSeen(Two):
    """A warm-up by how many samples were seen, which micro-batches see one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.shape[0]  # refused: of_samples_seen
        return self.last(self.body(x) * (self.seen / 64).clamp(max=1))


class Averaged(Two):
    """The average of weights that torch has: it copies the first ones, and asks for gradients."""

    def __init__(self, *, multi: bool = False) -> None:
        super().__init__()
        means = swa_utils.get_ema_multi_avg_fn(0.8) if multi else None
        self.mean = swa_utils.AveragedModel(self.middle, multi_avg_fn=means)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            self.mean.update_parameters(self.middle)
        with torch.no_grad():
            goal = self.last(self.mean(self.first(x).tanh()).tanh())
        return self.last(self.body(x)), goal


class MixesLater(Two):
    """A step from which on samples meet: the first calls do not show it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        hidden = self.body(x)
        centred = hidden - hidden.mean(0) * (self.calls > 500)  # refused: mixes_later
        return self.last(centred)


class MixesLaterInEval(MixesLater):
    """The same in eval mode alone, by what keeps the number of samples."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        if self.training:
            self.calls += 1
            return self.last(hidden)
        shares = hidden.softmax(0)  # refused: mixes_later_in_eval
        return self.last(torch.where(self.calls > 2, shares, hidden))


class MixesForAWhile(MixesLater):
    """Samples that meet in some calls only, far from the first and not for long."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        hidden = self.body(x)
        while_ = (self.calls > 200) & (self.calls < 300)
        centred = torch.where(while_, hidden - hidden.mean(0), hidden)  # refused: mixes_for_a_while
        return self.last(centred)


class MixesOnceTold(Two):
    """Samples that meet once a flag is set, between steps, that forward only reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("told", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        centred = hidden - hidden.mean(0)  # refused: mixes_once_told
        return self.last(torch.where(self.told, centred, hidden))


class ScalesForAWhile(MixesLater):
    """A window of calls in which something else is done, of each sample by itself."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        hidden = self.body(x)
        while_ = (self.calls > 200) & (self.calls < 300)
        return self.last(torch.where(while_, hidden - hidden.mean(1, keepdim=True), hidden))


class FollowsLater(Two):
    """A mean over samples that is followed after a few calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        if self.training:
            with torch.no_grad():
                self.calls += 1
                mean = self.average.lerp(hidden.mean(0), 0.1)  # refused: follows_later
                self.average.copy_(torch.where(self.calls > 3, mean, self.average))
        return self.last(hidden + self.average)


class DecaysLater(Two):
    """A trained bias that every forward makes smaller, after the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.calls += 1
                smaller = self.last.bias * torch.where(self.calls > 1, 0.9, 1.0)
                self.last.bias.copy_(smaller)  # refused: decays_later
        return self.last(self.body(x))


class Noisy(Two):
    """A noise for all samples that goes on from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.zeros(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            self.noise.mul_(0.5).add_(torch.randn(8))
        return self.last(self.body(x) + self.noise), self.noise.clone()


class SpectralDropped(nn.Module):
    """Dropout between layers of a spectral norm."""

    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        self.first = parametrizations.spectral_norm(nn.Linear(6, 8))
        self.drop, self.last = nn.Dropout(share), nn.utils.spectral_norm(nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.first(x).tanh()))


class Critic(nn.Module):
    """The same weight with a spectral norm in two layers, and a norm that goes over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.utils.spectral_norm(nn.Linear(6, 6)), nn.BatchNorm1d(6)
        self.last = parametrizations.spectral_norm(nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())


def byol(output: tuple[Tensor, Tensor], _: object) -> Tensor:
    return -F.cosine_similarity(*output).mean()


def distilled(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output[0], target) + F.mse_loss(*output)


def simple(name: str, model: Callable[[], nn.Module], **options: object) -> Case:
    return Case(name, model, rows, F.cross_entropy, classes, **options)


CASES = (
    simple("warms_up", WarmsUp, quick=True),
    simple("warms_up_assigned", lambda: WarmsUp(assigned=True)),
    Case("warms_up_the_loss", WarmsUpTheLoss, lambda n: (rows(n), classes(n))),
    Case(
        "returns_its_weight",
        lambda: WarmsUpTheLoss(returned=True),
        lambda n: (rows(n), classes(n)),
    ),
    Case("momentum", Momentum, rows, byol),
    Case("momentum_remat", Momentum, rows, byol, options="--remat full", manners=FP32_ONLY),
    Case("momentum_foreach", lambda: Momentum(foreach=True), rows, byol),
    Case("averaged", Averaged, rows, distilled, classes),
    Case(
        "averaged_in_every_manner",
        lambda: Averaged(multi=True),
        rows,
        distilled,
        classes,
        manners=MANNERS,
    ),
    simple("follows_within", FollowsWithin),
    simple("decays", Decays),
    simple("decays_in_every_manner", Decays, manners=MANNERS),
    simple("checkpointed", Checkpointed, manners=MANNERS),
    Case("counts_always", CountsAlways, rows, options="--mode infer"),
    simple("scheduled", Scheduled),
    Case(
        "counts_in_the_loss",
        Two,
        rows,
        CountsInTheLoss(),
        classes,
        expect=Refused(("loss_fn.step", "forward changes"), ("a buffer of the model",)),
    ),
    simple("beside_samples", BesideSamples),
    simple(
        "of_samples_seen",
        OfSamplesSeen,
        expect=Refused(("writes to seen for each micro-batch",), ("--microbatches 1",)),
    ),
    simple(
        "mixes_later",
        MixesLater,
        expect=Refused(("mean takes the samples of a batch together",), ("--microbatches 1",)),
    ),
    simple(
        "mixes_for_a_while",
        MixesForAWhile,
        expect=Refused(("mean takes the samples of a batch together",), ("--microbatches 1",)),
    ),
    simple(
        "mixes_once_told",
        MixesOnceTold,
        expect=Refused(("mean takes the samples of a batch together",), ("--microbatches 1",)),
    ),
    simple("scales_for_a_while", ScalesForAWhile),
    simple(
        "mixes_later_in_eval",
        MixesLaterInEval,
        expect=Refused(("softmax gives another result",), ("--microbatches 1",)),
    ),
    simple(
        "follows_later",
        FollowsLater,
        expect=Refused(("gives another result for a micro-batch",), ("--microbatches 1",)),
    ),
    simple(
        "decays_later",
        DecaysLater,
        expect=Refused(("writes to last.bias for each micro-batch",), ("--microbatches 1",)),
    ),
    Case(
        "spectral_in_every_manner",
        lambda: SpectralDropped(0.0),
        rows,
        F.cross_entropy,
        classes,
        manners=MANNERS,
    ),
    Case("noisy", Noisy, rows, lambda y, t: F.cross_entropy(y[0], t), classes, random=True),
    simple("spectral_dropped", SpectralDropped, random=True),
    simple(
        "critic",
        Critic,
        options="--batchnorm exact",
        sizes=(8, 6),
        manners=({}, {"remat": "full"}, {"microbatches": 3}),
    ),
)
