"""Recurrent networks and scans."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from adversary.case import FP32_ONLY, Case
from adversary.inputs import classes
from torch import Tensor, nn


class Recurrent(nn.Module):
    """One of torch's own, batch-first."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, **options: object) -> None:
        super().__init__()
        self.cell = kind(6, 5, batch_first=True, **options)
        width = 5 * (2 if self.cell.bidirectional else 1)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class OwnLSTM(nn.LSTM):
    """A class of the user's, whose kernel is called by its op."""


class OwnGRU(nn.GRU):
    """A class of the user's, which is computed step by step."""


class Stacked(nn.Module):
    """Two LSTMs, the second one starting from the states of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(6, 5, batch_first=True)
        self.decoder = nn.LSTM(6, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        _, states = self.encoder(x)
        return self.head(self.decoder(x.flip(1), states)[0])


class Cells(nn.Module):
    """A loop over two cells, which begin with one and the same state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GRUCell(6, 5), nn.LSTMCell(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.size(0), 5)
        states = h, h
        for time in range(x.size(1)):
            h = self.first(x[:, time], h)
            states = self.second(h, states)
        return self.head(states[0])


class Selective(nn.Module):
    """A selective state space, its scan written as a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.step = nn.Linear(6, 8), nn.Linear(8, 8)
        self.decay = nn.Parameter(torch.randn(8, 2))
        self.mix, self.head = nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.inside(x))
        size = F.softplus(self.step(x))
        b, c = self.mix(x).chunk(2, -1)
        keep = torch.exp(-size.unsqueeze(-1) * self.decay.exp())
        put = (size * x).unsqueeze(-1) * b.unsqueeze(2)
        state, found = torch.zeros_like(put[:, 0]), []
        for time in range(x.shape[1]):
            state = keep[:, time] * state + put[:, time]
            found.append((state * c[:, time].unsqueeze(1)).sum(-1))
        return self.head(torch.stack(found, 1))


class Packed(nn.Module):
    """Sequences of unequal lengths, masked."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        found = self.cell(x)[0]
        last = found[torch.arange(len(x)), lengths - 1]
        return self.head(last)


class Convolved(nn.Module):
    """A long convolution by FFT."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.head = nn.Linear(6, 4), nn.Linear(4, 3)
        self.kernel = nn.Parameter(torch.randn(4, 5) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x).transpose(1, 2)
        size = 2 * x.shape[-1]
        found = torch.fft.irfft(torch.fft.rfft(x, size) * torch.fft.rfft(self.kernel, size), size)
        return self.head(found[..., : x.shape[-1]].transpose(1, 2).mean(1))


class OfAnyLength(nn.Module):
    """A network of two layers, then one both ways that is given what the first remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.RNN(6, 5, 2, nonlinearity="tanh", batch_first=True)
        self.second = nn.GRU(5, 5, batch_first=True, bidirectional=True)
        self.asks, self.head = nn.Linear(10, 1), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        found, last = self.first(x)
        found, _ = self.second(found, last)
        shares = self.asks(found).softmax(1)
        return self.head((shares * found).sum(1))


def of_other_lengths(samples: int) -> Tensor:
    return torch.randn(samples, 2 + samples % 7, 6)


def steps(samples: int) -> Tensor:
    return torch.randn(samples, 5, 6)


def of_steps(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.mean(1), target)


def simple(name: str, model: type[nn.Module], **options: object) -> Case:
    manners = ({}, {"microbatches": 3}) if "options" in options else FP32_ONLY
    return Case(name, model, steps, F.cross_entropy, classes, manners=manners, **options)


CASES = (
    simple("lstm", Recurrent, quick=True),
    simple("lstm_inference", Recurrent, options="--mode infer"),
    simple("gru", lambda: Recurrent(nn.GRU)),
    simple("rnn", lambda: Recurrent(nn.RNN, nonlinearity="relu")),
    simple("both_ways", lambda: Recurrent(nn.LSTM, bidirectional=True, num_layers=2)),
    simple("cells", Cells),
    Case("stacked", Stacked, steps, of_steps, classes, manners=FP32_ONLY),
    Case("selective", Selective, steps, of_steps, classes),
    Case(
        "lengths",
        Packed,
        lambda n: (steps(n), torch.randint(1, 6, (n,))),
        F.cross_entropy,
        classes,
        manners=FP32_ONLY,
    ),
    simple("by_fft", Convolved),
    simple("of_any_length", OfAnyLength, later_inputs=of_other_lengths),
    simple("lstm_of_any_length", Recurrent, later_inputs=of_other_lengths),
    simple("own_lstm", lambda: Recurrent(OwnLSTM), later_inputs=of_other_lengths),
    simple("own_gru", lambda: Recurrent(OwnGRU)),
)
