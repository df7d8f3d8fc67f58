"""Sequences that are packed by their lengths for recurrent layers of torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from adversary.case import FP32_ONLY, Case, Refused
from adversary.inputs import classes
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

WIDTH, WORDS = 6, 20


class Tagger(nn.Module):
    """Two layers in both directions, then one in another layout, on sequences in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(8, WIDTH)
        self.tags, self.kind = nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(ids)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        packed, (_, state) = self.lstm(packed)
        packed, last = self.gru(packed)
        x, ends = pad_packed_sequence(packed, batch_first=True, total_length=ids.size(1))
        mean = x.sum(1) / ends.to(x.device).unsqueeze(1)
        return self.tags(x), self.kind(mean + last[-1] + state.mean((0, 2)).unsqueeze(1))


class Sorted(nn.Module):
    """The last states of a layer that begins with given ones; what is packed has to be sorted."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH)
        self.begin = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        begin = self.begin(x[:, 0]).tanh().unsqueeze(0)
        states = (begin, begin * 2) if isinstance(self.cell, nn.LSTM) else begin
        _, last = self.cell(packed, states)
        return self.head((last[0] if isinstance(last, tuple) else last)[-1])


class Twice(nn.Module):
    """One layer that is called with packed sequences, and with all steps of them."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.one_hot(ids, WIDTH).float()
        lengths = (ids != 0).sum(1).clamp(min=1).cpu()
        packed = pack_padded_sequence(x, lengths, True, False)
        packed, last = self.cell(packed)
        every, _ = self.cell(x)
        own, _ = pad_packed_sequence(packed, True, total_length=x.shape[1])
        return self.head(every.mean(1) + own.sum(1) + last[0])


class OnlyTrained(nn.Module):
    """Packs in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        if self.training:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            x, _ = pad_packed_sequence(self.cell(packed)[0], True, total_length=x.size(1))
        else:
            x, _ = self.cell(x)
        return self.head(x.sum(1))


class ToTheLongest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed, _ = self.cell(pack_padded_sequence(x, lengths, True, enforce_sorted=False))
        x, _ = pad_packed_sequence(packed, batch_first=True)  # refused: to_the_longest
        return self.head(x.sum(1))


class Filled(nn.Module):
    """Other numbers than a layer's behind the ends: of what it made, and of what was packed."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        own, _ = pad_packed_sequence(packed, True, total_length=x.shape[1])
        made, _ = pad_packed_sequence(self.cell(packed)[0], False, -9.0, x.shape[1])
        return self.head(made.amax(0) + own.sum(1))


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.drop = nn.LSTM(WIDTH, WIDTH), nn.Dropout(0.5)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        rows = self.drop(packed.data)  # refused: rows
        packed = PackedSequence(rows, packed.batch_sizes)
        return self.head(self.cell(packed)[1][0][-1])


class WrittenTo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        lengths.fill_(1)
        return self.head(self.cell(packed)[1][-1])  # refused: written_to


def sequences(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 5, WIDTH), torch.randint(1, 6, (samples,))


def unpadded(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 5, WIDTH), torch.full((samples,), 5)


def in_order(samples: int) -> tuple[Tensor, Tensor]:
    x, lengths = sequences(samples)
    return x, lengths.sort(descending=True).values


def words(samples: int, steps: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randint(WORDS, (samples, steps)), torch.randint(1, steps + 1, (samples,))


def later_words(samples: int) -> tuple[Tensor, Tensor]:
    return words(samples, 3 + samples % 7)


def padded(samples: int) -> Tensor:
    lengths = torch.randint(0, 6, (samples, 1))
    return torch.randint(1, WIDTH, (samples, 5)) * (torch.arange(5) < lengths)


def of_both(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    tags, kind = output
    return F.cross_entropy(kind, target) + tags.logsumexp(-1).sum(1).mean()


def simple(name: str, model: object, **options: object) -> Case:
    given = {"inputs": sequences, "loss": F.cross_entropy, "target": classes} | options
    manners = ({}, {"microbatches": 3}) if "options" in options else FP32_ONLY
    return Case(name, model, manners=manners, **given)


CASES = (
    simple("tagger", Tagger, inputs=words, later_inputs=later_words, loss=of_both, quick=True),
    simple("tagger_remat", Tagger, inputs=words, loss=of_both, options="--remat full"),
    simple("tagger_inference", Tagger, inputs=words, options="--mode infer"),
    simple("sorted", Sorted, inputs=in_order),
    simple("sorted_gru", lambda: Sorted(nn.GRU), inputs=in_order),
    simple("sorted_rnn", lambda: Sorted(nn.RNN), inputs=in_order),
    simple("twice", Twice, inputs=padded),
    simple("only_trained", OnlyTrained),
    simple(
        "to_the_longest",
        ToTheLongest,
        expect=Refused(("longest sequence",), ("total_length=x.shape[1]",)),
    ),
    simple("filled", Filled, inputs=unpadded, later_inputs=sequences),
    simple("rows", Dropped, expect=Refused(("packs sequences",), ("pack_padded_sequence", "mask"))),
    simple(
        "written_to",
        WrittenTo,
        expect=Refused(("writes to what it has packed",), ("before pack_padded_sequence",)),
    ),
)
