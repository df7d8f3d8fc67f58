"""Layers of torch.nn that are seldom met, shared and parametrised ones, and what a model keeps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from adversary.case import FP32_ONLY, Case, Refused
from adversary.inputs import classes, rows
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize


class Pyramid(nn.Module):
    """One head for maps of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(c, 4, 3, stride=2, padding=1) for c in (2, 4, 4))
        self.head, self.score = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for layer in self.down:
            x = layer(x).relu()
            found.append(self.head(x).tanh().mean((2, 3)))
        return self.score(sum(found))


class SharedLinear(nn.Module):
    """One layer for two dimensions and two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x).tanh()
        x = self.shared(x.mT).tanh().mT + self.shared(x.mean(1)).unsqueeze(1)
        return self.head(x.sum(1))


class TiedByView(nn.Module):
    """The head is a part of the embedding's table, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.body(self.table(ids).mean(1))
        return x @ self.table.weight[:3].t() + self.table.weight[3:6, 0]


class TiedModules(nn.Module):
    """One module under two names, one parameter under three."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again = self.first
        self.middle, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.other.weight = self.middle.weight
        self.head = nn.Linear(6, 3)
        self.bias = self.head.bias

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.first(x).tanh()).tanh()
        return self.head(self.other(self.again(x)).tanh()) + self.bias


class Averaging(nn.Module):
    """A moving average of activations of a batch, written in training, subtracted always."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(0.1 * x.mean(0))  # refused: averaging
        return self.last(x - self.average)


class Queue(nn.Module):
    """MoCo's queue of keys: the newest batch replaces the oldest."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("queue", torch.randn(16, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        scores = x @ self.queue.clone().t()
        if self.training:
            self.queue.copy_(torch.cat((x.detach(), self.queue[: -len(x)])))  # refused: queue
        return self.last(x) * scores.mean(1, keepdim=True)


class Steps(nn.Module):
    """Counts its calls and warms up by them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.last(self.first(x).tanh() * (1 + self.calls).rsqrt())


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def parametrised() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    return model


def orthogonal() -> nn.Module:
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3))


def spectral() -> nn.Module:
    """Its power iteration writes buffers in training."""
    return nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3)
    )


def old_spectral() -> nn.Module:
    """By hooks, with two steps of the iteration in each call."""
    layers = nn.utils.spectral_norm(nn.Linear(6, 6), n_power_iterations=2), nn.Tanh()
    return nn.Sequential(*layers, nn.utils.spectral_norm(nn.Linear(6, 3)))


class SpectralConvs(nn.Module):
    """A critic, with a convolution of a spectral norm that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.spectral_norm(nn.Conv2d(2, 2, 3, padding=1))
        self.head = nn.utils.spectral_norm(nn.Linear(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.first(x).relu()).relu()
        return self.head(x.mean((2, 3)))


def old_weight_norm() -> nn.Module:
    """By hooks, as before parametrisations."""
    return nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3))


def pruned() -> nn.Module:
    from torch.nn.utils import prune

    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    prune.random_unstructured(model[0], "weight", 0.5)
    return model


def lazy() -> nn.Module:
    """Without sizes until the first call, which build_model() makes."""
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3))
    model(torch.zeros(2, 6))
    return model


def still_lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3))


class Bidirectional(nn.Module):
    """Sequence-first, two layers, both directions, projected."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 6, num_layers=2, bidirectional=True, proj_size=3)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found, (hidden, _) = self.cell(x)
        return self.head(found) + hidden.mean(0).mean(-1, keepdim=True)


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.lstm = nn.GRUCell(4, 6), nn.LSTMCell(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden, state = x.new_zeros(x.shape[0], 6), None
        for step in x.unbind(1):
            hidden = self.gru(step, hidden)
            state = self.lstm(hidden, state)
        return self.head(state[0])


class Attends(nn.Module):
    """nn.MultiheadAttention with what it may be asked for."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        found, weights = self.attention(
            x, x, x, attn_mask=causal, is_causal=True, need_weights=True, average_attn_weights=False
        )
        return self.last(found), weights


class AttendsFirst(nn.Module):
    """The same in torch's default layout, with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(6, 2), nn.Linear(6, 3)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        found, _ = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)
        return self.last(found).masked_fill(padding.t().unsqueeze(-1), 0.0)


class Seq2Seq(nn.Module):
    """nn.Transformer, whole."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(6, 2, 1, 1, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.body(source, target, tgt_mask=mask))


class GroupNormed(nn.Module):
    """Group, instance (with running statistics) and local response norms."""

    def __init__(self, track: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3)
        self.norms = nn.ModuleList(
            (nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True, track_running_stats=track))
        )
        self.response, self.head = nn.LocalResponseNorm(2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.first(x)).relu()
        x = self.norms[1](self.last(x)).relu()
        return self.head(self.response(x).mean((2, 3)))


class Bilinear(nn.Module):
    """Layers of two inputs, and activations with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.join, self.slope, self.head = nn.Bilinear(6, 6, 5), nn.PReLU(5), nn.Linear(5, 3)
        self.similar, self.distant = nn.CosineSimilarity(), nn.PairwiseDistance()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.head(self.slope(self.join(x, y)))
        return out * self.similar(x, y).unsqueeze(1) + self.distant(x, y).unsqueeze(1)


class Upscaled(nn.Module):
    """Folds, unfolds, shuffles pixels, interpolates, samples by a grid."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shuffle = nn.Conv2d(2, 8, 1), nn.PixelShuffle(2)
        self.unfold = nn.Unfold(3, padding=1)
        self.where = nn.Linear(18, 6)
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shuffle(self.first(x))
        x = F.interpolate(x, scale_factor=0.5, mode="bilinear", align_corners=False)
        theta = self.where(self.unfold(x).mean(-1)).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return self.head(F.grid_sample(x, grid, align_corners=False).mean((2, 3)))


class SequenceOfModules(nn.Module):
    """Modules in dicts, chosen by name; an Identity; a module that is called by a method."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"a": nn.Linear(6, 3), "b": nn.Linear(6, 3)})
        self.nothing = nn.Identity()
        self.order = ("b", "a", "b")

    def one(self, x: Tensor, which: str) -> Tensor:
        return self.nothing(self.heads[which](x))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.one(x, which) for which in self.order]).sum(0)


class QuantStubs(nn.Module):
    """Stubs of quantisation, which are identities until it is converted."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = (
            torch.ao.quantization.QuantStub(),
            torch.ao.quantization.DeQuantStub(),
        )
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.add = torch.ao.nn.quantized.FloatFunctional()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.quant(x)).relu()
        return self.dequant(self.last(self.add.add(x, x)))


def pictures(samples: int) -> Tensor:
    return torch.randn(samples, 2, 8, 8)


def steps(samples: int) -> Tensor:
    return torch.randn(samples, 5, 4)


def tokens(samples: int) -> Tensor:
    return torch.randint(3, (samples, 5))


def of_tokens(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def of_first(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return of_tokens(output[0], target) + 0.1 * output[1].square().mean()


def padding(samples: int) -> Tensor:
    return torch.arange(5) >= torch.randint(1, 6, (samples, 1))


def parted(cause: str, *, at_line: bool = True) -> Refused:
    """What goes on with every micro-batch."""
    ways = ("--per-microbatch", "--microbatches 1", "--batchnorm exact")
    return Refused((cause,), ways, accept="--per-microbatch", at_line=at_line)


def simple(name: str, model: object, inputs: object = rows, **options: object) -> Case:
    return Case(name, model, inputs, F.cross_entropy, classes, **options)


CASES = (
    simple("pyramid", Pyramid, pictures, quick=True),
    simple("two_ranks", SharedLinear, lambda n: torch.randn(n, 6, 6)),
    simple("tied_by_view", TiedByView, lambda n: torch.randint(9, (n, 4))),
    simple("tied_modules", TiedModules),
    simple("averaging", Averaging, sizes=(8,), manners=FP32_ONLY, expect=parted("mul")),
    simple("averaging_inference", Averaging, options="--mode infer"),
    simple("queue", Queue, sizes=(8,), manners=FP32_ONLY, expect=parted("writes to queue")),
    simple("steps", Steps),
    simple("symmetric", parametrised),
    simple("orthogonal", orthogonal, manners=FP32_ONLY),
    simple("spectral", spectral),
    simple("old_spectral", old_spectral),
    simple("spectral_convs", SpectralConvs, pictures, manners=FP32_ONLY),
    simple("spectral_in_one_piece", spectral, microbatches=1, sizes=(8,), manners=({},)),
    simple("spectral_inference", spectral, options="--mode infer"),
    simple("old_weight_norm", old_weight_norm),
    simple("pruned", pruned),
    simple("lazy", lazy),
    simple(
        "still_lazy",
        still_lazy,
        expect=Refused(("lazy",), ("once in build_model()",), at_line=False),
    ),
    Case(
        "bidirectional",
        Bidirectional,
        lambda n: torch.randn(5, n, 4),
        lambda y, t: F.cross_entropy(y.permute(1, 2, 0), t),
        tokens,
        manners=FP32_ONLY,
    ),
    simple("cells", Cells, steps),
    Case("attends", Attends, lambda n: torch.randn(n, 5, 6), of_first, tokens, manners=FP32_ONLY),
    Case(
        "attends_with_extras",
        lambda: Attends(add_bias_kv=False, bias=False),
        lambda n: torch.randn(n, 5, 6),
        of_first,
        tokens,
        manners=FP32_ONLY,
    ),
    Case(
        "attends_first",
        AttendsFirst,
        lambda n: (torch.randn(5, n, 6), padding(n)),
        lambda y, t: F.cross_entropy(y.permute(1, 2, 0), t),
        tokens,
        manners=FP32_ONLY,
    ),
    Case(
        "seq2seq",
        Seq2Seq,
        lambda n: (torch.randn(n, 4, 6), torch.randn(n, 5, 6)),
        of_tokens,
        tokens,
        manners=FP32_ONLY,
    ),
    simple("group_normed", lambda: GroupNormed(False), pictures, manners=FP32_ONLY),
    simple(
        "instance_statistics",
        lambda: GroupNormed(True),
        pictures,
        sizes=(8,),
        manners=FP32_ONLY,
        reference="micro-batches",
    ),
    simple("bilinear", Bilinear, lambda n: (rows(n), rows(n)), manners=FP32_ONLY),
    simple("upscaled", Upscaled, pictures, manners=FP32_ONLY),
    simple("modules_by_name", SequenceOfModules),
    simple("stubs", QuantStubs),
)
