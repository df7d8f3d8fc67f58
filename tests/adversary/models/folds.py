"""Reshapes that merge the batch with another dimension, and Python's own sums on shapes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from adversary.case import FP32_ONLY, Case, Refused
from adversary.inputs import classes, rows, steps, tokens
from torch import Tensor, nn


def mlp(inputs: int = 6, outputs: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = mlp(), mlp(6, 3)


class Frames(Two):
    """Video: frames go through an encoder of images, B*T at once, and are pooled by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3)

    def forward(self, video: Tensor) -> Tensor:
        b, t, c, h, w = video.shape
        found = self.conv(video.view(b * t, c, h, w)).relu().mean((2, 3))
        return self.last(self.first(found).view(b, t, -1).mean(1))


class Axial(Two):
    """Mixes rows, then columns: the batch is folded with another dimension each time."""

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        rows = x.reshape(b * h, w, c)
        rows = rows + self.first(rows).softmax(1)
        columns = rows.reshape(b, h, w, c).permute(0, 2, 1, 3).reshape(b * w, h, c)
        columns = self.first(columns).cumsum(1)
        return self.last(columns.reshape(b, w, h, c).transpose(1, 2))


class TimeOuter(Two):
    """(b t) and (t b): the batch is the inner one of two."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        inner = x.transpose(0, 1).reshape(t * b, c)
        return self.last(self.first(inner).reshape(t, b, c).transpose(0, 1))


class Windows(Two):
    """Swin's windows, with a cyclic shift in between."""

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        x = torch.roll(x, (-1, -1), (1, 2))
        windows = x.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
        scores = (windows @ windows.transpose(1, 2)).softmax(-1)
        windows = self.first(scores @ windows)
        back = windows.view(b, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5)
        return self.last(torch.roll(back.reshape(b, h, w, c), (1, 1), (1, 2)))


class Beams(Two):
    """Every sample repeated three times, the best of its copies kept."""

    def forward(self, x: Tensor) -> Tensor:
        shift = torch.linspace(-1, 1, 3).repeat(x.shape[0]).unsqueeze(1)
        many = self.last(self.first(x.repeat_interleave(3, dim=0) + shift))
        return many.view(-1, 3, 3).amax(1)


class Tiled(Two):
    """The whole batch repeated, so that copies of one sample lie far apart."""

    def forward(self, x: Tensor) -> Tensor:
        many = self.last(self.first(torch.cat([x, -x])))
        return (many[: len(x)] - many[len(x) :]) / 2


class TwoViews(Two):
    """Two inputs through one tower at once, as siamese networks do."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        both = self.first(torch.cat((left, right), 0))
        left, right = both.chunk(2, 0)
        return self.last(left * right)


class Stacked(Two):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        both = self.last(self.first(torch.stack((left, right), 0)))
        return both[0] - both.flip(0)[0]


class Folded(Two):
    """Heads in the batch, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 18)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            y.view(b, t, 2, 3).transpose(1, 2).reshape(b * 2, t, 3)
            for y in self.qkv(x).split(6, -1)
        )
        found = torch.bmm(torch.baddbmm(torch.zeros(b * 2, t, t), q, k.mT).softmax(-1), v)
        return self.last(found.view(b, 2, t, 3).transpose(1, 2).reshape(b, t, 6))


class Nearest(Two):
    """A table of pairs of points in each sample: (b, n, n, features)."""

    def forward(self, x: Tensor) -> Tensor:
        pairs = (x[:, :, None] - x[:, None]).flatten(0, 2)
        weight = self.first(pairs).view(*x.shape[:2], x.shape[1], -1).softmax(2)
        return self.last((weight * x[:, None]).sum(2))


class PadsToEven(Two):
    """Pads what is odd, by Python's arithmetic."""

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        padded = F.pad(x, (0, 0, 0, -t % 4))
        pooled = self.first(padded).unflatten(1, (-1, 4)).mean(2)
        return self.last(pooled.repeat_interleave(4, 1)[:, :t])


class Unrolled(Two):
    """A list that grows, over as many steps as the input has."""

    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        for step in range(x.size(1) - 1, -1, -2):
            found.insert(0, self.first(x[:, step]) + (found[0] if found else 0))
        return self.last(torch.stack(found, dim=1).sum(1))


class GroupsOfSamples(Two):
    """Ghost batches: statistics over pairs of samples."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        pairs = x.view(-1, 2, 6)
        return self.last((pairs - pairs.mean(1, keepdim=True)).view(-1, 6))  # refused: ghosts


class MeanOverAll(Two):
    """Normalises by a number of the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x / x.norm())  # refused: normed_by_all


class RunningSum(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x.cumsum(0))  # refused: running_sum


class Index(Two):
    """Positions of the samples in their batch."""

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[0]).unsqueeze(1)
        return self.last(self.first(x) + place)  # refused: positions


class ByNumber(Two):
    """Divides by the number of samples."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x / x.shape[0])  # refused: by_number


class Sorted(Two):
    """The samples in another order."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        order = x[:, 0].argsort()  # refused: reordered
        return self.last(x[order])


class ThereAndBack(Two):
    """Sorts the samples by length, and puts them back."""

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return self.last(self.first(x[order]))[order.argsort()]


class Mixed(Two):
    """Mixup with the batch turned round."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(0.7 * x + 0.3 * x.flip(0))  # refused: mixup


class Rolled(Two):
    """Contrasts every sample with the one before."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x - 0.3 * x.roll(1, 0))  # refused: rolled


class Exchanged(Two):
    """The halves of a batch, exchanged."""

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.first(x).chunk(2)
        return self.last(torch.cat([left + 0.1 * right, right + 0.1 * left]))  # refused: exchanged


class MixupInTraining(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            x = 0.7 * x + 0.3 * x.flip(0)  # refused: mixup_in_training
        return self.last(x)


class ScaledInTraining(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            x = x / x.abs().max()  # refused: scaled_in_training
        return self.last(x)


class BesideBatchNorm(Two):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        if self.training:
            x = x + 0.2 * x.flip(0)  # refused: beside_batchnorm
        return self.last(x)


class Gated(Two):
    """What mixes samples begins behind a gate of zero, as residual branches do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + self.gate * x.mean(0))  # refused: behind_a_gate


class GatedFeatures(Gated):
    """The same gate before what does not."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + self.gate * x.mean(1, keepdim=True))


def maps(samples: int) -> Tensor:
    return torch.randn(samples, 4, 6, 6)


def of_places(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def of_map(samples: int) -> Tensor:
    return torch.randint(3, (samples, 4, 6))


def pair(samples: int) -> tuple[Tensor, Tensor]:
    return rows(samples), rows(samples)


MIXES = Refused(("together",), ("--per-microbatch", "--microbatches 1"), accept="--per-microbatch")


def mixes(name: str, model: type[nn.Module], *, quick: bool = False) -> Case:
    return Case(
        name,
        model,
        rows,
        F.cross_entropy,
        classes,
        sizes=(8,),
        manners=FP32_ONLY,
        expect=MIXES,
        quick=quick,
    )


CASES = (
    Case(
        "frames", Frames, lambda n: torch.randn(n, 3, 2, 5, 5), F.cross_entropy, classes, quick=True
    ),
    Case("axial", Axial, maps, of_places, of_map, manners=FP32_ONLY),
    Case("time_outer", TimeOuter, steps, of_places, tokens),
    Case("time_outer_inference", TimeOuter, steps, options="--mode infer"),
    Case("windows", Windows, maps, of_places, of_map, manners=FP32_ONLY),
    Case("beams", Beams, rows, F.cross_entropy, classes),
    Case("beams_inference", Beams, rows, options="--mode infer"),
    Case("tiled", Tiled, rows, F.cross_entropy, classes),
    Case("two_views", TwoViews, pair, F.cross_entropy, classes),
    Case("two_views_stacked", Stacked, pair, F.cross_entropy, classes),
    Case("heads", Folded, steps, of_places, tokens, manners=FP32_ONLY),
    Case("pairs_of_points", Nearest, steps, of_places, tokens),
    Case(
        "pads_to_even",
        PadsToEven,
        lambda n: torch.randn(n, 6, 6),
        of_places,
        lambda n: torch.randint(3, (n, 6)),
    ),
    Case("unrolled", Unrolled, lambda n: torch.randn(n, 5, 6), F.cross_entropy, classes),
    Case("there_and_back", ThereAndBack, rows, F.cross_entropy, classes),
    mixes("ghosts", GroupsOfSamples),
    mixes("normed_by_all", MeanOverAll),
    mixes("running_sum", RunningSum),
    mixes("positions", Index),
    mixes("by_number", ByNumber),
    mixes("reordered", Sorted),
    mixes("mixup", Mixed),
    mixes("rolled", Rolled),
    mixes("exchanged", Exchanged),
    mixes("mixup_in_training", MixupInTraining),
    mixes("scaled_in_training", ScaledInTraining),
    Case(
        "beside_batchnorm",
        BesideBatchNorm,
        rows,
        F.cross_entropy,
        classes,
        sizes=(8,),
        manners=FP32_ONLY,
        expect=Refused(
            ("flip takes the samples", "BatchNorm apart"),
            ("--per-microbatch", "--microbatches 1"),
            accept="--per-microbatch",
        ),
    ),
    mixes("behind_a_gate", Gated, quick=True),
    Case("gate_of_nothing", GatedFeatures, rows, F.cross_entropy, classes),
)
