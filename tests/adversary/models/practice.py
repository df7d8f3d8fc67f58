"""Small models with the losses that people train such models with."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from adversary.case import FP32_ONLY, Case, Refused
from adversary.inputs import classes, rows
from adversary.layers import Two
from torch import Tensor, nn


class Packed(nn.Module):
    """Several documents in a row: positions begin anew, and none sees another."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 12), nn.Embedding(8, 12)
        self.attend, self.project, self.out = (
            nn.Linear(12, 36),
            nn.Linear(12, 12),
            nn.Linear(12, 11),
        )

    def forward(self, ids: Tensor, document: Tensor) -> Tensor:
        batch, length = ids.shape
        begins = torch.ones_like(document, dtype=torch.bool)
        begins[:, 1:] = document[:, 1:] != document[:, :-1]
        index = torch.arange(length).expand(batch, length)
        x = self.words(ids) + self.places(index - torch.where(begins, index, 0).cummax(1).values)
        heads = [
            part.view(batch, length, 3, 4).transpose(1, 2)
            for part in self.attend(x).split(12, dim=-1)
        ]
        own = document[:, :, None] == document[:, None, :]
        mask = own & torch.tril(torch.ones(length, length, dtype=torch.bool))
        found = F.scaled_dot_product_attention(*heads, attn_mask=mask[:, None])
        return self.out(x + self.project(found.transpose(1, 2).reshape(batch, length, 12)))


class Denoiser(nn.Module):
    """Velocities of a diffusion, its schedule in 64 bits, weighed by the share of the signal."""

    def __init__(self) -> None:
        super().__init__()
        betas = torch.linspace(1e-4, 0.02, 50, dtype=torch.float64)
        self.register_buffer("kept", torch.cumprod(1 - betas, 0))
        self.enter, self.middle, self.time = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.leave = nn.Linear(8, 6)

    def forward(self, x: Tensor, step: Tensor, noise: Tensor) -> dict[str, Tensor]:
        signal = self.kept[step].float().sqrt()[:, None]
        spread = (1 - self.kept[step]).float().sqrt()[:, None]
        waves = step[:, None].float() * torch.exp(-math.log(10000) * torch.arange(4) / 4)
        time = self.time(torch.cat([waves.sin(), waves.cos()], -1))
        hidden = self.middle(self.enter(signal * x + spread * noise)) + time
        found, wanted = self.leave(F.silu(hidden)), signal * noise - spread * x
        ratio = (self.kept / (1 - self.kept))[step].float()
        weight = ratio.clamp(max=5) / (ratio + 1)
        return {"loss": (weight * (found - wanted).square().mean(-1)).mean(), "found": found}


class Preferred(nn.Module):
    """Two answers under a model and a frozen one (DPO), each over its own tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = (
            nn.Sequential(nn.Embedding(9, 12), nn.Linear(12, 12), nn.SiLU(), nn.Linear(12, 9))
            for _ in range(2)
        )
        self.reference.requires_grad_(False)

    def chances(self, model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
        found = model(ids)[:, :-1].log_softmax(-1)
        return (found.gather(-1, ids[:, 1:, None]).squeeze(-1) * mask[:, 1:]).sum(-1)

    def forward(self, better: Tensor, worse: Tensor, masks: tuple[Tensor, Tensor]) -> dict:
        pairs = list(zip((better, worse), masks, strict=True))
        own = [self.chances(self.policy, *pair) for pair in pairs]
        with torch.no_grad():
            before = [self.chances(self.reference, *pair) for pair in pairs]
        margin = 0.1 * ((own[0] - own[1]) - (before[0] - before[1]))
        return {"loss": -F.logsigmoid(margin).mean(), "margin": margin.detach()}


class Quantiles(nn.Module):
    """A critic that learns quantiles by those of a frozen one, as weighed by its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.frozen = (
            nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 12)) for _ in range(2)
        )
        self.frozen.requires_grad_(False)
        self.register_buffer("levels", (torch.arange(4) + 0.5) / 4)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        rows = torch.arange(len(batch["action"]))
        found = self.net(batch["state"]).view(-1, 3, 4)[rows, batch["action"]]
        with torch.no_grad():
            later = self.frozen(batch["next"]).view(-1, 3, 4)
            best = self.net(batch["next"]).view(-1, 3, 4).mean(-1).argmax(-1)
            more = 0.9 * ~batch["done"][:, None] * later[rows, best]
            wanted = batch["reward"][:, None] + more
        pairs = found[..., None].expand(-1, 4, 4), wanted[:, None].expand(-1, 4, 4)
        below = (pairs[1] < pairs[0]).float().detach()
        losses = F.huber_loss(*pairs, reduction="none")
        each = ((self.levels[None, :, None] - below).abs() * losses).sum(1).mean(1)
        return {"loss": (each * batch["weight"]).mean(), "priority": each.detach()}


def transitions(samples: int) -> tuple[dict[str, Tensor]]:
    return (
        {
            "state": rows(samples),
            "action": classes(samples),
            "reward": torch.randn(samples),
            "next": rows(samples),
            "done": torch.rand(samples) < 0.2,
            "weight": torch.rand(samples),
        },
    )


class Flow(nn.Module):
    """Couplings whose determinants are added up, as chances of a distribution of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(4)
        )
        self.register_buffer("turned", torch.tensor([3, 4, 5, 0, 1, 2]))
        self.register_buffer("centre", torch.zeros(6))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        grown = x.new_zeros(x.shape[0])
        for net in self.nets:
            kept, changed = x.chunk(2, -1)
            scale, shift = net(kept).chunk(2, -1)
            scale = scale.tanh()
            x = torch.cat([kept, changed * scale.exp() + shift], -1)[:, self.turned]
            grown = grown + scale.sum(-1)
        normal = torch.distributions.Normal(self.centre, torch.ones_like(self.centre))
        chance = torch.distributions.Independent(normal, 1).log_prob(x)
        return {"loss": -(chance + grown).mean() / (6 * math.log(2)), "x": x}


class Detector(nn.Module):
    """Focal losses, boxes and centres of two levels, over as many as are positive in all."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, 1)
        self.heads = nn.ModuleList(nn.Conv2d(8, size, 1) for size in (3, 4, 1))
        self.scales = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, targets: dict[str, Tensor]) -> dict[str, Tensor]:
        fine = self.fine(x).relu()
        levels = []
        for scale, level in zip(self.scales, (fine, self.coarse(fine).relu()), strict=True):
            labels, boxes, centres = (head(level).flatten(2).mT for head in self.heads)
            levels.append((labels, (boxes * scale).exp(), centres.squeeze(-1)))
        labels, boxes, centres = (torch.cat(parts, 1) for parts in zip(*levels, strict=True))
        positive = targets["labels"] >= 0
        number = positive.sum().clamp(min=1)
        wanted = F.one_hot(targets["labels"].clamp(min=0), 3) * positive[..., None]
        each = F.binary_cross_entropy_with_logits(labels, wanted.to(labels), reduction="none")
        missed = (labels.sigmoid() - wanted).abs()
        least, most = (f(boxes, targets["boxes"]).prod(-1) for f in (torch.min, torch.max))
        central = targets["centres"][positive]
        of_boxes = ((1 - least / most)[positive] * central).sum() / central.sum().clamp(min=1e-6)
        of_centres = F.binary_cross_entropy_with_logits(centres[positive], central, reduction="sum")
        loss = (each * missed**2).sum() / number + of_boxes + of_centres / number
        return {"loss": loss, "labels": labels}


def pictures_with_boxes(samples: int) -> dict[str, object]:
    labels = torch.randint(-3, 3, (samples, 80))
    labels[:, 0] = 1
    targets = {
        "labels": labels,
        "boxes": torch.rand(samples, 80, 4) + 0.1,
        "centres": torch.rand(samples, 80),
    }
    return {"x": torch.randn(samples, 3, 8, 8), "targets": targets}


class Speech(nn.Module):
    """Fewer frames than it is given, and how many of these count."""

    def __init__(self) -> None:
        super().__init__()
        self.fold, self.out = nn.Conv1d(6, 12, 3, stride=2, padding=1), nn.Linear(24, 7)
        self.steps = nn.GRU(12, 12, batch_first=True, bidirectional=True)

    def forward(self, frames: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        hidden, _ = self.steps(self.fold(frames.mT).relu().mT)
        return self.out(hidden).log_softmax(-1), (lengths + 1) // 2


def spoken(output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    chances, lengths = output
    words, numbers = target
    return F.ctc_loss(chances.transpose(0, 1), words, lengths, numbers, zero_infinity=True)


class Tasks(nn.Module):
    """Heads and learned variances by name, of targets by name."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())
        sizes = {"kind": 3, "place": 2, "there": 1}
        self.heads = nn.ModuleDict({name: nn.Linear(8, size) for name, size in sizes.items()})
        self.logs = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in sizes})

    def forward(self, x: Tensor, targets: dict[str, Tensor]) -> dict[str, object]:
        hidden = self.body(x)
        found = {name: head(hidden) for name, head in self.heads.items()}
        losses = {
            "kind": F.cross_entropy(found["kind"], targets["kind"]),
            "place": F.smooth_l1_loss(found["place"], targets["place"]),
            "there": F.binary_cross_entropy_with_logits(
                found["there"].squeeze(-1), targets["there"]
            ),
        }
        loss = sum(torch.exp(-self.logs[n]) * item + self.logs[n] for n, item in losses.items())
        notes = {f"loss_{name}": item.detach() for name, item in losses.items()}
        return {"loss": loss, "found": found, **notes}


def tasks(samples: int) -> dict[str, object]:
    there = torch.randint(2, (samples,)).float()
    targets = {"kind": classes(samples), "place": torch.randn(samples, 2), "there": there}
    return {"x": rows(samples), "targets": targets}


class Frames(nn.Module):
    """Pictures of films in a row, four of each."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.over, self.out = (
            nn.Linear(6, 8),
            nn.Conv1d(8, 8, 3, padding=1),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enter(x).relu()
        films = hidden.view(x.shape[0] // 4, 4, -1)  # refused: frames
        return self.out(self.over(films.mT).mean(-1))


class Spread(Two):
    """Returns a distribution of torch's."""

    def forward(self, x: Tensor) -> torch.distributions.Normal:  # refused: spread
        scores = super().forward(x)
        return torch.distributions.Normal(scores, F.softplus(scores) + 0.1)


class Guesses(nn.Module):
    """Tokens are hidden in forward: how many of them is known in the step alone."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.middle, self.out = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 9)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        hidden = torch.rand(ids.shape) < 0.4
        scores = self.out(self.middle(self.words(ids.masked_fill(hidden, 9))).relu())
        labels = ids.masked_fill(~hidden, -100)
        loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten())  # refused: guesses
        return {"loss": loss, "scores": scores}


def of_each_class(output: Tensor, target: Tensor) -> Tensor:
    each = F.one_hot(target, 3).float()
    losses = (each * F.cross_entropy(output, target, reduction="none")[:, None]).sum(0)
    return (losses / each.sum(0).clamp(min=1)).mean()  # refused: of_each_class


def ids(samples: int) -> Tensor:
    return torch.randint(9, (samples, 5))


def parted(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randint(11, (samples, 8)), torch.randint(2, (samples, 8)).cumsum(1)


def of_tokens(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def masks(samples: int) -> tuple[Tensor, Tensor]:
    return torch.rand(samples, 5) > 0.3, torch.rand(samples, 5) > 0.3


CASES = (
    Case("packed", Packed, parted, of_tokens, lambda n: torch.randint(11, (n, 8))),
    Case("denoiser", Denoiser, lambda n: (rows(n), torch.randint(50, (n,)), rows(n))),
    Case("preferred", Preferred, lambda n: (ids(n), ids(n), masks(n))),
    Case("quantiles", Quantiles, transitions, quick=True),
    Case("flow", Flow, rows),
    Case("detector", Detector, pictures_with_boxes),
    Case(
        "speech",
        Speech,
        lambda n: (torch.randn(n, 16, 6), torch.randint(10, 17, (n,))),
        spoken,
        lambda n: (torch.randint(1, 7, (n, 3)), torch.randint(1, 4, (n,))),
        manners=FP32_ONLY,
    ),
    Case("tasks", Tasks, tasks),
    Case(
        "frames",
        Frames,
        lambda n: torch.randn(4 * n, 6),
        options="--mode infer",
        expect=Refused(("2 samples made from the example",), ("a dimension of their own",)),
    ),
    Case(
        "spread",
        Spread,
        rows,
        lambda output, target: -output.log_prob(target).mean(),
        lambda n: torch.randn(n, 3),
        expect=Refused(("returns Normal",), ("the tensors that it is made of",)),
    ),
    Case(
        "guesses",
        Guesses,
        ids,
        expect=Refused(("as many as are drawn in the step",), ("--loss-over batch",)),
    ),
    Case(
        "of_each_class",
        Two,
        rows,
        of_each_class,
        classes,
        manners=({}, {"remat": "full"}),
        expect=Refused(
            ("divides each of several sums",),
            ("--loss-over batch",),
            accept="--loss-over batch",
            reference="whole",
        ),
    ),
)
