"""Modules whose backwards are split: what they do to their parameters, each in its own way."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 8
WORDS = 5


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Twice(Layers):
    """A layer used two times: its matrix is transposed anew, its bias is not."""

    def forward(self, x):
        return self.b(torch.tanh(self.a(torch.tanh(self.a(x)))))


class SameMatrix(Layers):
    def forward(self, x):
        return torch.tanh(x @ self.a.weight) @ self.a.weight + self.b(x)


class SideBySide(Layers):
    def forward(self, x):
        q = self.a(x)
        return q * self.a(2 * x), q


class Overlapping(Layers):
    """One way to a matrix leads through the beginning of the other."""

    def forward(self, x):
        turned = self.a.weight.t()
        return torch.tanh(x @ turned) @ (turned * 2) + self.b(x)


class InPlace(Layers):
    def forward(self, x):
        h = self.a(x)
        h[:, :4] *= 2
        h = torch.tanh(h) * 1
        h[1] = self.b.bias
        return self.b(h)


class Handed(Layers):
    """Outputs that are inputs, parameters, made of parameters alone, and no one's."""

    def forward(self, x):
        y = self.b(x)
        return x, self.a.weight * 2, self.a.weight, y, y, y.detach()


class SeveralResults(Layers):
    def forward(self, x):
        a, b = self.a(x).chunk(2, 1)
        normed = F.layer_norm(torch.cat([a * b, b], 1), (WIDTH,), self.b.weight[0])
        return normed.max(0)[0] + self.b.bias, normed.unbind(0)[1]


class Scaled(torch.autograd.Function):
    """Counts how often its backward runs."""

    runs = 0

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        Scaled.runs += 1
        x, w = ctx.saved_tensors
        return gradient * w, (gradient * x).sum(0)


class Custom(Layers):
    def forward(self, x):
        return self.b(Scaled.apply(self.a(x), self.b.bias))


class Parametrized(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.b = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv1d(1, 4, 3)
        self.norm = nn.BatchNorm1d(4)
        self.b = nn.Conv1d(4, 4, 3)

    def forward(self, x):
        return self.b(torch.relu_(self.norm(self.a(x[:, None]))))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x):
        return self.cells(x[None].expand(3, -1, -1).contiguous())[0]


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)

    def forward(self, x):
        return self.layer(x[None])


class Frozen(Layers):
    def __init__(self):
        super().__init__()
        self.a.requires_grad_(False)
        self.b.weight.requires_grad_(False)


class Adapted(Layers):
    """A frozen layer with an adapter beside it."""

    def __init__(self):
        super().__init__()
        self.a.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return self.b(self.a(x) + self.up(self.down(x)))


class Words(nn.Module):
    def __init__(self, *, sparse=False):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.inner = Layers()

    def forward(self, x):
        return self.inner(self.words(x.abs().long() % WORDS) + x[..., None])


class TiedWords(Words):
    """The table of words is used at both ends."""

    def forward(self, x):
        return F.linear(super().forward(x), self.words.weight)


class SparseWords(Words):
    def __init__(self):
        super().__init__(sparse=True)


class OnlyWords(Words):
    def forward(self, x):
        return self.words(x.detach().abs().long() % WORDS)


class Nothing(nn.Module):
    def forward(self, x):
        return torch.tanh(x) * 2


MODULES = [
    *(Layers, Twice, SameMatrix, SideBySide, Overlapping, InPlace, Handed, SeveralResults, Custom),
    *(Parametrized, Convolved, Recurrent, Attending, Frozen, Adapted),
    *(Words, TiedWords, SparseWords, OnlyWords, Nothing),
]
