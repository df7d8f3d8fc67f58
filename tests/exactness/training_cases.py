"""Models in which pipelines go wrong, each with the plain loop that says what is right.

The loops know nothing of stages. Where a model mixes no samples they take the mini-batch whole;
BatchNorm, dropout and 16-bit gradients depend on how it is split, so theirs go micro-batch by
micro-batch. Everything but the 16-bit case is in double precision.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.runtime.core.random import SeededRandom

WIDTH = 8
WORDS = 11
LENGTH = 3
BATCH = 16
MICROBATCHES = 4
STEPS = 5
RATE = 0.1
MOMENTUM = 0.9
SEED = 3


class Block(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(torch.tanh(self.wide(x)))


class Blocks(nn.Module):
    """Four blocks; how they are joined is up to subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.block0 = Block()
        self.block1 = Block()
        self.block2 = Block()
        self.block3 = Block()


class Tied(Blocks):
    """One table of words at the start, in the middle and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.block1(self.block0(self.words(tokens)))
        h = self.block2(h + self.words.weight.mean(0))
        return self.head(self.block3(h))


class SkipToTwo(Blocks):
    """One value is used by two later stages."""

    def forward(self, x: Tensor) -> Tensor:
        a = self.block0(x)
        b = self.block1(a)
        c = self.block2(b) + a
        return self.block3(c) * a


class FarSkip(Blocks):
    """The first value is used again at the end only."""

    def forward(self, x: Tensor) -> Tensor:
        a = self.block0(x)
        return self.block3(self.block2(self.block1(a))) + a


class Normalised(Blocks):
    """BatchNorm after every block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm0 = nn.BatchNorm1d(WIDTH)
        self.norm1 = nn.BatchNorm1d(WIDTH, momentum=0.3)
        self.norm2 = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm0(self.block0(x))
        x = self.norm1(self.block1(x))
        return self.block3(self.norm2(self.block2(x)))


class Dropped(Blocks):
    """Dropout after every block."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.block0(x))
        x = F.dropout(self.block1(x), 0.3, self.training)
        return self.block3(self.drop(self.block2(x)))


class Frozen(Blocks):
    """Frozen blocks with small adapters beside them, and a frozen stage in front."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block1(self.block0(x))
        x = self.block2(x) + self.up(self.down(x))
        return self.last(self.block3(x))


class Residual(Blocks):
    """Residual blocks with layer norms: under autocast, values of two types are added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.block0(self.norm(x))
        x = x + self.block1(self.norm(x))
        x = x + self.block2(x)
        return self.block3(self.norm(x))


@dataclass(frozen=True)
class Case:
    """A model, its data, and what belongs to a step.

    Attributes:
        split: whether the plain loop goes micro-batch by micro-batch.
        sizes: samples of every step's mini-batch.
        half: train in fp16 by autocast, with a gradient scaler that begins too high.
        clip: the norm that gradients are clipped to.
        tolerance: the largest difference that may be left after the steps.
    """

    name: str
    model: type[nn.Module]
    split: bool = False
    sizes: tuple[int, ...] = (BATCH,) * STEPS
    half: bool = False
    clip: float | None = None
    tolerance: float = 1e-12

    @property
    def tokens(self) -> bool:
        return self.model is Tied

    def build(self) -> nn.Module:
        """The model with its first weights."""
        torch.manual_seed(SEED)
        return self.model().to(torch.float32 if self.half else torch.float64)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """What is minimised: a mean."""
        if self.tokens:
            return F.cross_entropy(output.flatten(0, 1), target.flatten())
        return F.mse_loss(output.float() if self.half else output, target)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """The mini-batch of every step."""
        generator = torch.Generator().manual_seed(SEED)
        return [self._batch(size, generator) for size in self.sizes]

    def _batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if self.tokens:
            words = [torch.randint(WORDS, (size, LENGTH), generator=generator) for _ in range(2)]
            return words[0], words[1]
        dtype = torch.float32 if self.half else torch.float64
        values = [torch.randn(size, WIDTH, generator=generator, dtype=dtype) for _ in range(2)]
        return values[0], values[1]


CASES = (
    Case("tied", Tied),
    Case("skip to two stages", SkipToTwo),
    Case("far skip", FarSkip),
    Case("BatchNorm", Normalised, split=True, tolerance=1e-10),
    Case("dropout", Dropped, split=True),
    Case("uneven batch", FarSkip, sizes=(16, 15, 9, 3, 1)),
    Case("frozen", Frozen),
    Case("fp16 scaler", Residual, split=True, half=True, tolerance=1e-6),
    Case("clipping", Tied, clip=0.05),
)

FIRST_SCALE = 2.0**21
"""Of the gradient scaler: so high that the first steps overflow and are skipped."""


@dataclass(frozen=True)
class Trained:
    """What training leaves: a loss per step, the final state, and how many steps were skipped."""

    losses: list[float]
    state: dict[str, Tensor]
    skipped: int = 0


def optimizer_of(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """The same for the plain model and the pipeline."""
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM, weight_decay=0.01)


def train_plain(case: Case) -> Trained:
    """The plain loop."""
    model = case.build().train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer_of(iter(parameters))
    scaler = torch.amp.GradScaler("cpu", init_scale=FIRST_SCALE, enabled=case.half)
    losses, skipped = [], 0
    for step, batch in enumerate(case.batches()):
        optimizer.zero_grad()
        total = 0.0
        for number, (inputs, target, weight) in enumerate(_parts(case, *batch)):
            with _half(case), SeededRandom(SEED, step, number, ()):
                loss = case.loss(model(inputs), target) * weight
            scaler.scale(loss).backward()
            total += float(loss.detach())
        scaler.unscale_(optimizer)
        if case.clip is not None:
            nn.utils.clip_grad_norm_(parameters, case.clip)
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < before
        losses.append(total)
    return Trained(losses, copy.deepcopy(model.state_dict()), skipped)


@contextmanager
def _half(case: Case) -> Iterator[None]:
    with torch.autocast("cpu", torch.float16) if case.half else nullcontext():
        yield


def _parts(case: Case, inputs: Tensor, target: Tensor) -> list[tuple[Tensor, Tensor, float]]:
    if not case.split:
        return [(inputs, target, 1.0)]
    pairs = zip(inputs.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
    return [(x, y, 1 / MICROBATCHES) for x, y in pairs]
