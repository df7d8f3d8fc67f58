"""Which dimension is the batch: of inputs, targets and outputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from adversary.case import FP32_ONLY, Case, Refused
from adversary.inputs import classes, rows
from torch import Tensor, nn


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def mlp(inputs: int = 6, outputs: int = 3) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, outputs)
    )


class ChannelsFirst(nn.Module):
    """A mean over what stands before the batch is one of parts of it as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh().mean(0))


class TimeFirst(nn.Module):
    """An LSTM in torch's default layout, every step classified."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0])


class LastStep(TimeFirst):
    """The last step alone, so that the output is batch-first again."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][-1])


class BothStates(TimeFirst):
    """Returns hidden states of shape (layers, samples, features)."""

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        found, (hidden, cell) = self.cell(x)
        return self.head(found), (hidden, cell)


class Given(nn.Module):
    """Takes an initial hidden state of shape (layers, samples, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(4, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return self.head(self.cell(x, hidden)[0][:, -1])


class LastIsBatch(nn.Module):
    """Features first, samples last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(8, 6) * 0.3)
        self.second = nn.Parameter(torch.randn(3, 8) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second @ (self.first @ x).tanh()


class TwoTables(nn.Module):
    """One batched input, and one table that every sample shares, with as many rows as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(6, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.body(x) @ self.head(table).t()


class Folded(nn.Module):
    """Folds time into the batch and back."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        samples, time = x.shape[:2]
        return self.body(x.reshape(samples * time, -1)).reshape(samples, time, -1)


class StaysFolded(Folded):
    """Returns samples times time in one dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.flatten(0, 1))


class Unbatched(nn.Module):
    """Squeezes every dimension of size one: with one sample, the batch too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).squeeze(-1)


class Transposed(nn.Module):
    """Batch-first in, features-first out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).t()


class Shifted(nn.Module):
    """Every sample sees the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        x = x + x.roll(1, 0)  # refused: shifted
        return self.last(x)


class FirstEight(nn.Module):
    """A rule that shows in batches alone that are larger than the example."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(6, 8), nn.Linear(8, 3), how

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        match self.how:
            case "mask":
                kept = torch.arange(len(x)) < 8  # refused: first_eight_masked
                x = x * kept[:, None]  # refused: first_eight_masked
            case "slice":
                x = torch.cat([x[:8] * 2, x[8:]])  # refused: first_eight_sliced
            case "number":
                x = x * (1 + x.shape[0] // 16)  # refused: scaled_by_sixteens
            case "far mask":
                kept = torch.arange(len(x)) < 500
                x = x * kept[:, None]  # refused: first_five_hundred_masked
            case "far slice":
                x = x.clone()  # refused: last_ones_cleared
                x[500:] = 0
            case "bound":
                x = x * (min(len(x), 300) / len(x))  # refused: scaled_beyond_300
            case "row":
                x = x[torch.arange(len(x)), :] + 0 * max(len(x), 4)
        return self.last(x)


class Softmaxed(nn.Module):
    """A softmax over the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.last(x).softmax(0)  # refused: softmaxed


class Centred(nn.Module):
    """Subtracts the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.last(x - x.mean(0))  # refused: centred


class InPieces(Centred):
    """To save memory, as people do who have not yet seen a pipeline."""

    def forward(self, x: Tensor) -> Tensor:
        pieces = x.split(4)  # refused: in_pieces
        return torch.cat([self.last(self.first(piece).tanh()) for piece in pieces])


class OneByOne(Centred):
    def forward(self, x: Tensor) -> Tensor:
        made = [self.last(self.first(row).tanh()) for row in x]  # refused: one_by_one
        return torch.stack(made)


class Images(nn.Module):
    """Channels-last memory, channels-first shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu().mean((2, 3)))


def steps(samples: int) -> Tensor:
    return torch.randn(5, samples, 4)


MIXES = Refused(("together",), ("--per-microbatch", "--microbatches 1"), accept="--per-microbatch")

BENDS = Refused(
    ("takes the samples of a batch together",),
    ("--microbatches 1", "--per-microbatch"),
    accept="--microbatches 1",
    reference="whole",
)


class Windows(nn.Module):
    """Images in windows and back; how many there are is taken from the windows, as Swin does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mix, self.last = nn.Linear(3, 8), nn.Linear(16, 16), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h, w = int(x.shape[1]), int(x.shape[2])
        x = self.first(x).view(-1, h // 4, 4, w // 4, 4, 8)
        x = x.permute(0, 1, 3, 5, 2, 4).reshape(-1, 8, 16)
        x = self.mix(x).softmax(-1)
        b = int(x.shape[0] / (h * w / 4 / 4))
        x = x.view(b, h // 4, w // 4, 8, 4, 4).permute(0, 1, 4, 2, 5, 3)
        return self.last(x.reshape(b, int(h * w), 8))


def over_samples(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum() / float(output.shape[0])


CASES = (
    Case(
        "windows",
        Windows,
        lambda n: torch.randn(n, 8, 12, 3),
        over_samples,
        lambda n: torch.randn(n, 96, 2),
    ),
    Case("channels_first", ChannelsFirst, steps, F.cross_entropy, classes),
    Case("time_first", TimeFirst, steps, square, lambda n: torch.randn(5, n, 3), quick=True),
    Case(
        "time_first_batchmean",  # which divides by the steps
        TimeFirst,
        steps,
        lambda y, t: F.kl_div(y.log_softmax(-1), t, reduction="batchmean"),
        lambda n: torch.randn(5, n, 3).softmax(-1),
    ),
    Case("time_first_inference", TimeFirst, steps, options="--mode infer"),
    Case("last_step", LastStep, steps, F.cross_entropy, classes),
    Case("last_step_inference", LastStep, steps, options="--mode infer"),
    Case(
        "both_states",
        BothStates,
        steps,
        lambda y, t: square(y[0], t),
        lambda n: torch.randn(5, n, 3),
    ),
    Case("both_states_inference", BothStates, steps, options="--mode infer"),
    Case(
        "time_as_long_as_the_batch",
        TimeFirst,
        lambda n: torch.randn(8, n, 4),
        square,
        lambda n: torch.randn(8, n, 3),
    ),
    Case(
        "hidden_given",
        Given,
        lambda n: (torch.randn(n, 5, 4), torch.randn(1, n, 6)),
        F.cross_entropy,
        classes,
    ),
    Case(
        "last_is_batch",
        LastIsBatch,
        lambda n: torch.randn(6, n),
        square,
        lambda n: torch.randn(3, n),
    ),
    Case(
        "last_is_batch_inference", LastIsBatch, lambda n: torch.randn(6, n), options="--mode infer"
    ),
    Case(
        "shared_table",
        TwoTables,
        lambda n: (rows(n), torch.randn(7, 4)),
        F.cross_entropy,
        lambda n: torch.randint(7, (n,)),
    ),
    Case("folded", Folded, lambda n: torch.randn(n, 5, 6), square, lambda n: torch.randn(n, 5, 3)),
    Case(
        "stays_folded",
        StaysFolded,
        lambda n: torch.randn(n, 5, 6),
        lambda y, t: F.cross_entropy(y, t.flatten()),
        lambda n: torch.randint(3, (n, 5)),
    ),
    Case(
        "stays_folded_inference",
        StaysFolded,
        lambda n: torch.randn(n, 5, 6),
        options="--mode infer",
    ),
    Case("one_number_each", Unbatched, rows, square, torch.randn),
    Case(
        "transposed_out",
        Transposed,
        rows,
        lambda y, t: square(y.t(), t),
        lambda n: torch.randn(n, 3),
    ),
    Case("transposed_out_inference", Transposed, rows, options="--mode infer"),
    Case(
        "shifted",
        Shifted,
        rows,
        F.cross_entropy,
        classes,
        sizes=(8,),
        manners=FP32_ONLY,
        expect=MIXES,
    ),
    *(
        Case(
            name,
            lambda how=how: FirstEight(how),  # type: ignore[misc]  # bound at once
            rows,
            F.cross_entropy,
            classes,
            sizes=(8, 40),
            manners=FP32_ONLY,
            expect=BENDS,
        )
        for name, how in (
            ("first_eight_masked", "mask"),
            ("first_eight_sliced", "slice"),
            ("scaled_by_sixteens", "number"),
            ("first_five_hundred_masked", "far mask"),
            ("last_ones_cleared", "far slice"),
            ("scaled_beyond_300", "bound"),
        )
    ),
    Case("by_row_numbers", lambda: FirstEight("row"), rows, F.cross_entropy, classes),
    Case(
        "softmaxed",
        Softmaxed,
        rows,
        F.cross_entropy,
        classes,
        sizes=(8,),
        manners=FP32_ONLY,
        expect=MIXES,
    ),
    Case(
        "centred",
        Centred,
        rows,
        F.cross_entropy,
        classes,
        sizes=(8,),
        manners=FP32_ONLY,
        expect=MIXES,
    ),
    Case(
        "in_pieces",
        InPieces,
        rows,
        F.cross_entropy,
        classes,
        expect=Refused(("into pieces",), ("all samples at once",)),
    ),
    Case(
        "one_by_one",
        OneByOne,
        rows,
        F.cross_entropy,
        classes,
        expect=Refused(("a batch of 8 only",), ("all samples at once",)),
    ),
    Case(
        "channels_last",
        Images,
        lambda n: torch.randn(n, 3, 6, 6).to(memory_format=torch.channels_last),
        F.cross_entropy,
        classes,
    ),
)
