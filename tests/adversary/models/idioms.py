"""Idioms of research code: parametrizations, codebooks, `.data`, host draws, checkpoints."""

from __future__ import annotations

import copy
import random

import numpy as np
import torch
import torch.nn.functional as F
from adversary.case import FP32_ONLY, Case, Refused
from adversary.inputs import classes, rows
from adversary.layers import Two
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


def parametrized() -> nn.Module:
    model = Two()
    parametrize.register_parametrization(model.middle, "weight", Symmetric())
    return model


def orthogonal() -> nn.Module:
    model = Two()
    parametrizations.orthogonal(model.middle)
    return model


def weight_normed() -> nn.Module:
    model = Two()
    parametrizations.weight_norm(model.first)
    parametrizations.weight_norm(model.middle)
    return model


class Codebook(nn.Module):
    """VQ with exponential averages of the codes, through .data under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 4), nn.Linear(4, 3)
        self.register_buffer("codes", torch.randn(5, 4))
        self.register_buffer("sizes", torch.ones(5))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(x)
        which = torch.cdist(z, self.codes).argmin(-1)
        codes = F.embedding(which, self.codes)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(which, 5).to(z.dtype)
                self.sizes.data.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.sums.data.mul_(0.9).add_(hot.t() @ z.data, alpha=0.1)
                self.codes.data.copy_(self.sums / (self.sizes[:, None] + 1e-5))
        return self.decode(z + (codes - z).detach()), (codes.detach() - z).square().mean(-1)


class ByType(Two):
    """What a tensor is, beside what else a function may be given."""

    def forward(self, x: Tensor) -> Tensor:
        by_type = {Tensor: self.body, list: lambda parts: torch.cat(parts, 1)}
        assert type(self.first.weight) is nn.Parameter
        assert isinstance(type(x), type)
        hidden = by_type[type(x)](x * 2 if type(x) is Tensor else x)
        return self.last(by_type[type([x])]([hidden[:, :4], hidden[:, 4:]]))


class ByLeaf(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 2 if x.is_leaf and self.first.weight.is_leaf else x
        return self.last(self.body(x))


class Along(Two):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        hidden = torch.take_along_dim(hidden, hidden.argsort(1), 1)
        backwards = torch.arange(7, -1, -1)
        return self.last(hidden.take_along_dim(backwards[None], dim=-1))


class Picks(nn.Module):
    """Features by a mask that is always the same, or by their places."""

    def __init__(self, places: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(4, 3)
        mask = torch.arange(8) % 2 == 0
        self.register_buffer("chosen", mask.nonzero().squeeze(1) if places else mask)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        return self.last(hidden[:, self.chosen])  # refused: picks_by_mask


class DataStops(Two):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return self.last(hidden * hidden.data.abs().amax(-1, keepdim=True))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(dropout)) for _ in range(4)
        )
        self.head, self.reentrant = nn.Linear(6, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=self.reentrant)  # refused: reentrant
        return self.head(x)


class LateBound(Checkpointed):
    """By a lambda that reads the last layer of all when the backward runs."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            again = checkpoint(  # refused: late_bound
                lambda y: layer(y).sin(),  # noqa: B023  # as a user wrote it
                x,
                use_reentrant=False,
            )
            x = x + again
        return self.head(x)


def by_random() -> float:
    return random.random()  # refused: dropped_by_random


def by_numpy() -> float:
    return float(np.random.rand())  # refused: dropped_by_numpy


def by_torch() -> Tensor:
    return torch.rand([])


class Dropped(nn.Module):
    """LayerDrop as wav2vec 2.0 has it."""

    def __init__(self, draw: object) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head, self.draw = nn.Linear(6, 3), draw

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and self.draw() < 0.5:
                continue
            x = x + layer(x).tanh()
        return self.head(x)


class ShowsDropped(Dropped):
    """The same, with what every layer has made, or has been left out of, among the outputs."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        seen = [x]
        for layer in self.layers:
            dropout_probability = torch.rand([])
            skip_the_layer = self.training and dropout_probability < 0.5
            if not skip_the_layer:
                x = x + layer(x).tanh()
            seen.append(x)
        return {"logits": self.head(x), "seen": torch.stack(seen, 1)}


class ChangesDropped(nn.Module):
    """Goes another way where it leaves a layer out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and torch.rand([]) < 0.5:  # refused: changed_by_torch
                x = 0.5 * x
                continue
            x = x + layer(x).tanh()
        return self.head(x)


def without_dropped(
    model: nn.Module, inputs: Tensor, output: dict[str, Tensor]
) -> dict[str, Tensor]:
    """With the layers that have changed something."""
    seen, x = [inputs], inputs
    for number, layer in enumerate(model.layers):
        before, after = output["seen"].detach()[:, number : number + 2].unbind(1)
        if not torch.equal(before, after):
            x = x + layer(x).tanh()
        seen.append(x)
    return {"logits": model.head(x), "seen": torch.stack(seen, 1)}


def of_logits(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output["logits"], target)


class Penalises(Two):
    """Hands its penalty out beside its output."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        penalty = sum(p.abs().sum() for p in self.parameters())
        return super().forward(x), penalty


class Aligns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0]).log_softmax(-1)


def aligned(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    labels, lengths = target
    frames = torch.full((output.shape[0],), output.shape[1], dtype=torch.long)
    return F.ctc_loss(output.transpose(0, 1), labels, frames, lengths)


class OfArrays(Two):
    """Tables and numbers of NumPy's, in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = np.linspace(0, 1, 6).astype(np.float32)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.from_numpy(np.linspace(1, 2, 60, dtype=np.float32))[:6]
        scale += torch.from_numpy(self.table)
        x = x * np.float32(1.5) + scale + np.sqrt(x.shape[-1])
        picked = x[:, np.array([1, 0, 2, 5, 4, 3])] + x[:, np.int64(2), None]
        return super().forward(picked + x[:, torch.tensor(1), None])


class CountsInTensors(Two):
    """Sizes and a divisor that torch makes of numbers, as long transformers count their chunks."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        pieces = torch.div(h.shape[-1], 4, rounding_mode="trunc") - 1
        room = h.new_zeros((h.shape[0], pieces + 1, 4))
        room[:, -1] = h[:, :4]
        h = h.reshape(h.shape[0], pieces + 1, 4) + room
        h = h.contiguous().as_strided(size=(len(h), pieces, 8), stride=(8, 8, 1))
        return self.last(self.middle(h.flatten(1) / torch.div(7, 2)).relu())


class EarlyDays(Two):
    """Tensors as torch's first years made them, which no function of torch makes."""

    def forward(self, x: Tensor) -> Tensor:
        order = Variable(torch.LongTensor([1, 0, 2, 3, 4, 5]))
        scale = Variable(torch.Tensor([0.5, 2.0]), requires_grad=False).repeat(3)
        h = self.first(x[:, order] * scale + torch.FloatTensor([[1.0] * 6]))
        filled = Variable(torch.FloatTensor(x.size(0), 3, 8))
        for number in range(3):
            filled[:, number] = h * number
        zeros = torch.Tensor(x.size(0), 8).zero_() + x.new(x.size(0), 8).fill_(0.5)
        h = torch.max(filled.sum(1), zeros) + Variable(h.data).abs() + x.data.new(8).fill_(1)
        return self.last(self.middle(h).tanh())


class OldLanguageModel(nn.Module):
    """torch's own first example of a language model: states out of a weight's `new`."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.rnn, self.decoder = (
            nn.Embedding(11, 8),
            nn.LSTM(8, 8, 2),
            nn.Linear(8, 11),
        )
        self.decoder.weight = self.encoder.weight

    def forward(self, ids: Tensor) -> Tensor:
        weight = next(self.parameters()).data
        state = [Variable(weight.new(2, ids.size(1), 8).zero_()) for _ in range(2)]
        output, _ = self.rnn(self.encoder(ids), tuple(state))
        flat = self.decoder(output.view(output.size(0) * output.size(1), output.size(2)))
        return flat.view(output.size(0), output.size(1), flat.size(1))


class WritesOut(Two):
    """Into tensors that it has made, by `out=`."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            sums, scaled = torch.empty(0), torch.empty_like(x)
            torch.cumsum(x, 1, out=sums)
            torch.mul(x, 2.0, out=scaled)
        return super().forward(x + sums + scaled)


class Infers(Two):
    """A part that autograd is not to see at all."""

    @torch.inference_mode()
    def scale(self, x: Tensor) -> Tensor:
        return self.first(x).abs().mean(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / (self.scale(x).clone() + 1))


class ShowsInferred(Infers):
    """And returns what that made, whose versions torch does not count."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.scale(x)


class Compiles(Two):
    """What torch.compile has compiled, or is to."""

    def __init__(self) -> None:
        super().__init__()
        self.act = torch.compile(lambda x: x.sin() * 2, backend="eager")
        self.extra = torch.compile(nn.Linear(6, 6), backend="eager")
        self.middle.compile(backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.extra(self.act(x)))


class FreezesNorm(Two):
    """A BatchNorm that forward itself sets to eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        self.norm.eval()
        return super().forward(self.norm(x))


class Copies(Two):
    def forward(self, x: Tensor) -> Tensor:
        kept = copy.deepcopy({"x": x})
        kept["x"] += 1
        return super().forward(x * kept["x"])


class LearnsSteps(nn.Module):
    """Quantisation-aware, with steps that are trained (LSQ), of rows and of weights by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 16), nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.tensor([0.05]))
        self.scales = nn.Parameter(torch.full((4,), 0.01))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.one(x))
        zero, zeros = torch.zeros(1), torch.zeros(4)
        h = torch._fake_quantize_learnable_per_tensor_affine(h, self.scale, zero, 0, 255, 1.0)
        weight = torch._fake_quantize_learnable_per_channel_affine(
            self.two.weight, self.scales, zeros, 0, -128, 127, 1.0
        )
        return F.linear(h, weight, self.two.bias)


def simple(name: str, model: object, **options: object) -> Case:
    return Case(name, model, rows, F.cross_entropy, classes, **options)


HOST = Refused(("Python's or NumPy's",), ("torch.rand", "torch.where"))
CASES = (
    simple("parametrized", parametrized),
    simple("orthogonal", orthogonal, manners=FP32_ONLY),
    simple("weight_norm", weight_normed),
    Case(
        "codebook",
        Codebook,
        rows,
        lambda o, t: F.cross_entropy(o[0], t) + o[1].mean(),
        classes,
        options="--batchnorm exact",
        manners=({}, {"microbatches": 3}, {"remat": "full"}),
        sizes=(8, 5),
        quick=True,
    ),
    simple("of_arrays", OfArrays),
    simple("counts_in_tensors", CountsInTensors),
    simple("early_days", EarlyDays),
    Case(
        "old_language_model",
        OldLanguageModel,
        lambda n: torch.randint(11, (5, n)),
        lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()),
        lambda n: torch.randint(11, (5, n)),
        manners=FP32_ONLY,
    ),
    simple("writes_out", WritesOut),
    simple("infers", Infers),
    Case("shows_inferred", ShowsInferred, rows, lambda o, t: F.cross_entropy(o[0], t), classes),
    simple("compiles", Compiles),
    simple("freezes_norm", FreezesNorm),
    simple("copies", Copies),
    simple("by_type", ByType),
    simple("by_leaf", ByLeaf),
    simple("picks_by_places", lambda: Picks(True)),
    simple(
        "picks_by_mask",
        lambda: Picks(False),
        expect=Refused(("depends on the values of a mask",), ("nonzero().squeeze(1)",)),
    ),
    simple("along", Along),
    simple("data_stops", DataStops),
    simple("checkpoint", lambda: Checkpointed(False)),
    simple("checkpoint_dropout", lambda: Checkpointed(False, 0.3), random=True),
    simple(
        "reentrant",
        lambda: Checkpointed(True),
        expect=Refused(("reentrant checkpoint",), ("use_reentrant=False",)),
    ),
    simple(
        "late_bound",
        lambda: LateBound(False, 0.3),
        expect=Refused(("recomputes something else",), ("layer=layer",)),
    ),
    simple("late_bound_inference", lambda: LateBound(False), options="--mode infer"),
    simple("reentrant_inference", lambda: Checkpointed(True), options="--mode infer"),
    simple("dropped_by_random", lambda: Dropped(by_random), expect=HOST),
    simple("dropped_by_numpy", lambda: Dropped(by_numpy), expect=HOST),
    Case(
        "dropped_by_torch",
        lambda: ShowsDropped(by_torch),
        rows,
        of_logits,
        classes,
        replay=without_dropped,
        manners=FP32_ONLY,
    ),
    simple(
        "changed_by_torch",
        ChangesDropped,
        expect=Refused(("by torch to decide in Python", "LayerDrop"), ("layerdrop=0.0",)),
    ),
    simple("dropped_unseen", lambda: Dropped(by_torch), random=True),
    simple("dropped_inference", lambda: Dropped(by_torch), options="--mode infer"),
    simple("never_dropped", lambda: Dropped(lambda: 0.5 + random.random())),
    Case(
        "penalises",
        Penalises,
        rows,
        lambda o, t: F.cross_entropy(o[0], t) + 0.01 * o[1],
        classes,
    ),
    Case("learns_its_steps", LearnsSteps, rows, F.cross_entropy, classes, manners=FP32_ONLY),
    Case(
        "ctc_of_lengths",
        Aligns,
        lambda n: torch.randn(n, 7, 4),
        aligned,
        lambda n: (torch.randint(1, 5, (n, 3)), torch.randint(1, 4, (n,))),
        manners=FP32_ONLY,
    ),
)
