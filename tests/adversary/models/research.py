"""Models of research code: metric learning, sets, detectors, weights that are made."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from adversary.case import FP32_ONLY, Case
from adversary.inputs import classes, rows
from torch import Tensor, nn


def steps(samples: int) -> Tensor:
    return torch.randn(samples, 5, 8)


def mask(samples: int) -> Tensor:
    found = torch.rand(samples, 5) > 0.4
    found[:, 0] = True
    return found


def body(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs))


class ArcFace(nn.Module):
    """An angular margin on the class that is right, which only the labels tell."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.weight = body(8), nn.Parameter(torch.randn(3, 8))
        self.margin, self.scale = 0.5, 8.0

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        cosine = F.linear(F.normalize(self.body(x)), F.normalize(self.weight)).clamp(-0.99, 0.99)
        sine = (1 - cosine.square()).sqrt()
        turned = cosine * math.cos(self.margin) - sine * math.sin(self.margin)
        turned = torch.where(cosine > math.cos(math.pi - self.margin), turned, cosine - 0.2)
        right = torch.zeros_like(cosine).scatter_(1, labels[:, None], 1)
        logits = (right * turned + (1 - right) * cosine) * self.scale
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Sets(nn.Module):
    """Points that are learnt ask the set; the mean is over those of its members that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(1, 3, 8))
        self.ask = nn.MultiheadAttention(8, 2, batch_first=True)
        self.answer = nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor, present: Tensor) -> Tensor:
        points = self.points.repeat(x.size(0), 1, 1)
        found, _ = self.ask(points, x, x, key_padding_mask=~present)
        y, _ = self.answer(x, found, found, need_weights=False)
        y = (y * present[..., None]).sum(1) / present.sum(1, keepdim=True).clamp(min=1)
        return self.last(y)


class Pyramid(nn.Module):
    """A detector: the same heads on two levels, each with a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)])
        self.side = nn.ModuleList([nn.Conv2d(4, 4, 1) for _ in range(2)])
        self.classes, self.boxes = nn.Conv2d(4, 1, 1), nn.Conv2d(4, 4, 1)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(())) for _ in range(2)])

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        fine = self.down[0](x).relu()
        coarse = self.down[1](fine).relu()
        top = self.side[1](coarse)
        levels = (self.side[0](fine) + F.interpolate(top, scale_factor=2.0), top)
        return [
            {"classes": self.classes(level), "boxes": (self.boxes(level) * scale).exp()}
            for level, scale in zip(levels, self.scales, strict=True)
        ]


def of_levels(output: Sequence[dict[str, Tensor]], target: dict[str, Tensor]) -> Tensor:
    """Both sums divided by the places that hold something."""
    logits = torch.cat([level["classes"].flatten(1) for level in output], 1)
    boxes = torch.cat([level["boxes"].flatten(2).mT for level in output], 1)
    there = target["classes"] > 0
    number = there.sum().clamp(min=1)
    found = F.binary_cross_entropy_with_logits(
        logits, there.float(), reduction="none", pos_weight=torch.tensor(2.0)
    )
    off = F.smooth_l1_loss(boxes, target["boxes"], reduction="none").sum(-1) * there
    return found.sum() / number + off.sum() / number


def things(samples: int) -> dict[str, Tensor]:
    return {"classes": torch.randint(2, (samples, 20)), "boxes": torch.rand(samples, 20, 4)}


class Waves(nn.Module):
    """Complex weights in the space of frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, 3, dtype=torch.cfloat) / 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.einsum("btc,cdt->btd", torch.fft.rfft(x, dim=1), self.weight)
        return self.last(F.gelu(torch.fft.irfft(mixed, n=x.size(1), dim=1))).mean(1)


class Spectrogram(nn.Module):
    """Sound to a spectrogram, a mask for it, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(16), persistent=False)
        self.mask = nn.Linear(9, 9)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.stft(x, 16, 4, window=self.window, return_complex=True)
        loud = waves.abs().clamp_min(1e-5).log().transpose(1, 2)
        loud = (loud - loud.mean((1, 2), keepdim=True)) / loud.std((1, 2), keepdim=True)
        mask = self.mask(loud).sigmoid().transpose(1, 2)
        return torch.istft(waves * mask, 16, 4, window=self.window, length=x.shape[-1])


class MakesWeights(nn.Module):
    """A layer whose weights another one makes for every sample, and one with those it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.maker, self.last = nn.Linear(6, 6), nn.Linear(6, 28), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        normed = {"weight": F.normalize(self.base.weight, dim=1), "bias": 2 * self.base.bias}
        x = torch.func.functional_call(self.base, normed, (x,)).relu()
        made = self.maker(x)
        y = torch.baddbmm(made[:, 24:, None], made[:, :24].view(-1, 4, 6), x[:, :, None])
        return self.last(y.squeeze(-1).tanh())


class Gathers(nn.Module):
    """Members put into bins of their sample, the best of them, and what came before each."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.first, self.last = nn.Linear(8, 1), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, bins: Tensor) -> tuple[Tensor, Tensor]:
        h, where = self.first(x), bins[..., None].expand(-1, -1, 8)
        summed = h.new_zeros(x.size(0), 4, 8).scatter_add_(1, where, h)
        largest = h.new_zeros(x.size(0), 4, 8).scatter_reduce(1, where, h, "amax")
        score, best = self.score(x).squeeze(-1).topk(2, 1)
        picked = h.gather(1, best[..., None].expand(-1, -1, 8)) * score.sigmoid()[..., None]
        passed = h.cumsum(1) / torch.arange(1, x.size(1) + 1)[:, None]
        return self.last((summed.tanh() + largest).sum(1) + picked.mean(1) + passed[:, -1]), best


class TargetNetwork(nn.Module):
    """What it learns from is made by a copy that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = body(3), body(3).requires_grad_(False)

    def forward(
        self, state: Tensor, action: Tensor, reward: Tensor, after: Tensor, ends: Tensor
    ) -> dict[str, Tensor]:
        value = self.online(state).gather(1, action[:, None]).squeeze(1)
        with torch.no_grad():
            wanted = reward + 0.9 * self.target(after).max(1).values * ~ends
        return {"loss": F.smooth_l1_loss(value, wanted), "value": value}


def transitions(samples: int) -> dict[str, Tensor]:
    return {
        "state": rows(samples),
        "action": classes(samples),
        "reward": torch.randn(samples),
        "after": rows(samples),
        "ends": torch.rand(samples) > 0.7,
    }


class Mixes(nn.Module):
    """A density of several normal ones."""

    def __init__(self) -> None:
        super().__init__()
        self.body = body(9)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        share, middle, width = self.body(x).chunk(3, -1)
        return share.log_softmax(-1), middle, F.softplus(width) + 0.1


def unlikely(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    share, middle, width = output
    normal = torch.distributions.Normal(middle, width, validate_args=False)
    return -torch.logsumexp(share + normal.log_prob(target[:, None]), -1).mean()


class Averaged(nn.Module):
    """Weights of which a buffer keeps a mean over the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("kept", self.last.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.kept.lerp_(self.last.weight, 0.1)
        x = self.first(x).tanh()
        return self.last(x) + F.linear(x, self.kept)


class SelfDistilled(nn.Module):
    """Views of pictures in a list; a teacher, which follows the weights, sees the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = body(8), body(8)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            own.data.mul_(0.9).add_(other.data, alpha=0.1)

    def forward(self, views: list[Tensor]) -> Tensor:
        if self.training:
            self.follow()
        with torch.no_grad():
            wanted = [(self.teacher(view) / 0.1).softmax(-1) for view in views[:2]]
        found = [(self.student(view) / 0.5).log_softmax(-1) for view in views]
        pairs = [
            (want * find).sum(-1)
            for i, want in enumerate(wanted)
            for j, find in enumerate(found)
            if i != j
        ]
        return -torch.stack(pairs).mean(0)


class Field(nn.Module):
    """Conditional random field: the scores of all ways, step by step, beside that of the tags."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.emit = nn.Linear(8, 6), nn.Linear(6, 4)
        self.moves, self.begin = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, tags: Tensor, mask: Tensor) -> dict[str, Tensor]:
        emitted, batch = self.emit(self.inside(x).tanh()), torch.arange(len(x))
        own = self.begin[tags[:, 0]] + emitted[batch, 0, tags[:, 0]]
        ways = self.begin + emitted[:, 0]
        for time in range(1, x.shape[1]):
            move = self.moves[tags[:, time - 1], tags[:, time]]
            own = own + (move + emitted[batch, time, tags[:, time]]) * mask[:, time]
            onward = (ways.unsqueeze(2) + self.moves + emitted[:, time].unsqueeze(1)).logsumexp(1)
            ways = torch.where(mask[:, time].unsqueeze(1), onward, ways)
        return {"emitted": emitted, "loss": (ways.logsumexp(1) - own).sum() / mask.sum()}


def tagged(samples: int) -> dict[str, Tensor]:
    lengths = torch.randint(1, 6, (samples, 1))
    return {
        "x": steps(samples),
        "tags": torch.randint(4, (samples, 5)),
        "mask": torch.arange(5) < lengths,
    }


class Policy(nn.Module):
    """A policy that learns from texts with advantages, and is held near the one that wrote them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11))

    def forward(
        self, texts: Tensor, mask: Tensor, old: Tensor, advantage: Tensor
    ) -> dict[str, Tensor]:
        chances = self.body(texts[:, :-1]).log_softmax(-1)
        chosen = chances.gather(-1, texts[:, 1:, None]).squeeze(-1)
        ratio, gain = (chosen - old).exp(), advantage[:, None]
        lost = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        far = (old - chosen).exp() - (old - chosen) - 1
        number = mask.sum().clamp(min=1)
        of_texts = (far * mask).sum(1) / mask.sum(1).clamp(min=1)
        loss = ((lost + 0.04 * far) * mask).sum() / number
        return {"loss": loss, "far": of_texts.detach()}


def written(samples: int) -> dict[str, Tensor]:
    return {
        "texts": torch.randint(11, (samples, 5)),
        "mask": (torch.rand(samples, 4) > 0.3).float(),
        "old": -torch.rand(samples, 4),
        "advantage": torch.randn(samples),
    }


class Depths(nn.Module):
    """A layer for the steps of every sample that a router ranks first; the others go past it."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.layer = nn.Linear(8, 1, bias=False), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        score, places = self.router(x).squeeze(-1).topk(2, dim=1, sorted=False)
        places, order = places.sort(1)
        where = places[..., None].expand(-1, -1, x.size(-1))
        made = self.layer(x.gather(1, where)).tanh() * score.gather(1, order).sigmoid()[..., None]
        return x.scatter_add(1, where, made)


class Chain(nn.Module):
    """Scores of whole sequences of tags, against those of all, which are summed step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.emit = nn.Linear(8, 4)
        self.change = nn.Parameter(torch.randn(4, 4) / 8)

    def forward(self, x: Tensor, tags: Tensor, there: Tensor) -> dict[str, Tensor]:
        emitted = self.emit(x)
        found = all_of_them = emitted[:, 0]
        score = found.gather(1, tags[:, :1]).squeeze(1)
        for step in range(1, 5):
            held, tag = there[:, step], tags[:, step : step + 1]
            change = self.change[tags[:, step - 1], tags[:, step]]
            score = score + (change + emitted[:, step].gather(1, tag).squeeze(1)) * held
            on = all_of_them[:, :, None] + self.change + emitted[:, step, None]
            all_of_them = torch.where(held[:, None], on.logsumexp(1), all_of_them)
        return {"loss": (all_of_them.logsumexp(1) - score).sum() / there.sum()}


def chains(samples: int) -> dict[str, Tensor]:
    return {"x": steps(samples), "tags": torch.randint(4, (samples, 5)), "there": mask(samples)}


CASES = (
    Case("policy", Policy, written),
    Case(
        "depths",
        lambda: nn.Sequential(Depths(), Depths(), nn.Flatten(), nn.Linear(40, 3)),
        steps,
        F.cross_entropy,
        classes,
        manners=FP32_ONLY,
    ),
    Case("chain", Chain, chains),
    Case(
        "self_distilled",
        SelfDistilled,
        lambda n: ([rows(n) for _ in range(4)],),
        lambda output, _: output.mean(),
        lambda _: None,
    ),
    Case("field", Field, tagged, manners=FP32_ONLY),
    Case("arc_face", ArcFace, lambda n: {"x": rows(n), "labels": classes(n)}, quick=True),
    Case("sets", Sets, lambda n: (steps(n), mask(n)), F.cross_entropy, classes),
    Case("pyramid", Pyramid, lambda n: torch.randn(n, 3, 8, 8), of_levels, things),
    Case("waves", Waves, steps, F.cross_entropy, classes),
    Case(
        "spectrogram",
        Spectrogram,
        lambda n: torch.randn(n, 64),
        F.l1_loss,
        lambda n: torch.randn(n, 64),
        manners=FP32_ONLY,
    ),
    Case("makes_weights", MakesWeights, rows, F.cross_entropy, classes),
    Case(
        "gathers",
        Gathers,
        lambda n: (steps(n), torch.randint(4, (n, 5))),
        lambda output, target: F.cross_entropy(output[0], target),
        classes,
    ),
    Case("target_network", TargetNetwork, transitions),
    Case("mixes", Mixes, rows, unlikely, torch.randn, manners=FP32_ONLY),
    Case(
        "averaged",
        Averaged,
        rows,
        F.cross_entropy,
        classes,
    ),
)
