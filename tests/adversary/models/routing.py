"""Ops whose number of elements depends on values: selections, routing, counting."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from adversary.case import FP32_ONLY, Case, Refused
from adversary.inputs import classes, rows
from adversary.layers import Two
from torch import Tensor, nn


class Experts(nn.Module):
    """Routing by index, as Mixtral has it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(6, 3, bias=False), nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def mixed(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 6)
        weights, chosen = self.gate(flat).softmax(-1, dtype=torch.float).topk(2, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(flat.dtype)
        hot = F.one_hot(chosen, 3).permute(2, 1, 0)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            place, row = torch.where(hot[number])
            made = F.gelu(expert(flat[row])) * weights[row, place, None]
            out.index_add_(0, row, made.to(flat.dtype))
        return out.view_as(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.mixed(x))


class Counted(Experts):
    """Rows in the order of their experts, cut by how many each has, as JetMoE has them."""

    def mixed(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 6)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        counts = F.one_hot(chosen, 3).sum((0, 1)).tolist()
        order = chosen.flatten().argsort()
        rows = order.div(2, rounding_mode="trunc")
        made = self.through(self.through(flat[rows], counts).sin(), counts)
        scaled = made * weights.flatten()[order, None]
        return torch.zeros_like(flat).index_add(0, rows, scaled.to(flat.dtype)).view_as(x)

    def through(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Rows through their experts, with how many each of these has in what it gives."""
        parts = zip(self.experts, rows.split(counts), counts, strict=True)
        found = [expert(part) + torch.full((n, 1), 0.1) for expert, part, n in parts]
        return torch.cat([part.reshape(part.shape[0], 6) for part in found])


class Capped(Experts):
    """Writes to the counts after their numbers are read."""

    def mixed(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(-1)
        order = chosen.argsort(stable=True)
        counts = F.one_hot(chosen, 3).sum(0)
        sizes = counts.tolist()
        counts.clamp_(max=6)
        parts = zip(self.experts, x[order].split(sizes), strict=True)
        made = torch.cat([expert(part) for expert, part in parts])
        return torch.zeros_like(made).index_copy(0, order, made)


class Found(nn.Module):
    """Loops over the experts that have tokens, as transformers does; most have none.

    Attributes:
        way: how the loop is written.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.gate, self.head = way, nn.Linear(6, 12, bias=False), nn.Linear(6, 3)
        self.up = nn.Parameter(torch.randn(12, 8, 6) * 0.4)
        self.down = nn.Parameter(torch.randn(12, 6, 8) * 0.4)
        self.biases = nn.ParameterList(torch.randn(6) for _ in range(12))

    def mixed(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        mask = F.one_hot(chosen, 13).permute(2, 1, 0)  # one more, for tokens of other processes
        return getattr(self, self.way)(x, mask, weights, torch.zeros_like(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.mixed(x.tanh()))

    def expert(self, rows: Tensor, number: int | Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(rows, self.up[number])), self.down[number])

    def hit(self, x: Tensor, mask: Tensor, weights: Tensor, out: Tensor) -> Tensor:
        found = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for number in found:
            own = number[0]
            if own == len(self.up):
                continue
            place, row = torch.where(mask[own])
            made = self.expert(x[row], own) * weights[row, place, None]
            out.index_add_(0, row, made.to(out.dtype))
        return out

    def skipped(self, x: Tensor, mask: Tensor, weights: Tensor, out: Tensor) -> Tensor:
        """Numbers of Python's, and a look at what every round has found."""
        for number in mask.flatten(1).any(1).nonzero().squeeze(-1):
            own = int(number)
            place, row = mask[own].nonzero(as_tuple=True)
            if row.numel() == 0:
                continue
            out[row] += (self.expert(x[row], own) * weights[row, place, None]).to(out.dtype)
        return out

    def turned(self, x: Tensor, mask: Tensor, weights: Tensor, out: Tensor) -> Tensor:
        """Experts in the last dimension of the mask, and a new sum in every round."""
        mask = mask.permute(2, 1, 0).bool()
        for number in torch.where(mask.any(1).any(0))[0]:
            row, place = torch.where(mask[:, :, number])
            made = self.expert(x[row], number) * weights[row, place, None]
            out = out.index_add(0, row, made.to(out.dtype))
        return out

    def counted_rounds(self, x: Tensor, mask: Tensor, weights: Tensor, out: Tensor) -> Tensor:
        for rank, number in enumerate(mask.sum((1, 2)).nonzero()):  # refused: counted_rounds
            row = torch.where(mask[number[0]])[1]
            out.index_add_(0, row, self.expert(x[row], number[0]) / (rank + 1))
        return out

    def numbered(self, x: Tensor, mask: Tensor, weights: Tensor, out: Tensor) -> Tensor:
        rank = 0
        for number in mask.sum((1, 2)).nonzero():  # refused: numbered
            row = torch.where(mask[number[0]])[1]
            rank = rank + 1
            out.index_add_(0, row, self.expert(x[row], number[0]) / rank)
        return out

    def added(self, x: Tensor, mask: Tensor, weights: Tensor, out: Tensor) -> Tensor:
        for number in mask.sum((1, 2)).nonzero():  # refused: added
            out = out + self.up[number[0]].sum(0)
        return out

    def apart(self, x: Tensor, mask: Tensor, weights: Tensor, out: Tensor) -> Tensor:
        """A weight for each expert, which has no gradient where it has no tokens."""
        for number in mask.sum((1, 2)).nonzero():  # refused: apart
            row = torch.where(mask[number[0]])[1]
            out.index_add_(0, row, self.expert(x[row], number[0]) + self.biases[int(number)])
        return out

    def elsewhere(self, x: Tensor, mask: Tensor, weights: Tensor, out: Tensor) -> Tensor:
        """Rows of another mask."""
        for number in mask[:, :1].sum((1, 2)).nonzero():  # refused: elsewhere
            row = torch.where(mask[number[0]])[1]
            out.index_add_(0, row, self.expert(x[row], number[0]))
        return out

    def ended(self, x: Tensor, mask: Tensor, weights: Tensor, out: Tensor) -> Tensor:
        """Those before one that counts among those that are there."""
        for number in mask.sum((1, 2)).nonzero():  # refused: ended
            row = torch.where(mask[number[0]])[1]
            out.index_add_(0, row, self.expert(x[row], number[0]))
            if number > 5:
                break
        return out


class Layers(nn.Module):
    """Several of them, so that a cut lies between."""

    def __init__(self, kind: type[Experts]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer.mixed(norm(x))
        return self.head(x)


class Selected(Two):
    """Computes only the rows that a mask selects, and puts them back."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        mask = x[:, 0] > 0
        out = hidden.clone()
        out[mask] = self.middle(hidden[mask]).tanh()
        return self.last(out)


class NonZero(Two):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        rows = (x[:, 0] > 0).nonzero().squeeze(-1)
        part = self.middle(hidden.index_select(0, rows)).tanh()
        return self.last(hidden.index_copy(0, rows, part))


class Early(Two):
    """The selection is made at the beginning, and used at the end."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nonzero(x[:, 0] > 0, as_tuple=True)[0]
        hidden = self.body(x)
        return self.last(hidden.index_add(0, rows, hidden[rows] * 0.5))


class Scattered(Two):
    """masked_select, masked_scatter, repeat_interleave by a tensor, unique."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        mask = hidden > 0
        hidden = hidden.masked_scatter(mask, hidden.masked_select(mask).square())
        counts = (x[:, :1] > 0).long() + 1
        spread = hidden.flatten().repeat_interleave(counts.expand(-1, 8).flatten())
        which = torch.arange(hidden.numel()).repeat_interleave(counts.expand(-1, 8).flatten())
        summed = torch.zeros(hidden.numel()).index_add(0, which, spread.float())
        _, inverse = torch.unique(x.round().long(), return_inverse=True)
        return self.last(hidden + summed.view_as(hidden)) + 0 * inverse.sum(-1, keepdim=True)


class Crossing(Two):
    """What is selected is all that goes on."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = (x[:, 0] > 0).nonzero().squeeze(-1)  # refused: crossing
        hidden = self.body(x.index_select(0, rows))
        return self.last(hidden), rows


def of_masked(output: Tensor, target: Tensor) -> Tensor:
    """The mean over tokens that count."""
    mask = target != 2
    return F.cross_entropy(output[mask], target[mask])


def of_chosen(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    logits, which = output
    return F.cross_entropy(logits, target[which], reduction="sum")


def simple(name: str, model: object, **options: object) -> Case:
    return Case(name, model, rows, F.cross_entropy, classes, **options)


def layers(name: str, kind: type[Experts]) -> Case:
    return Case(
        name,
        lambda: Layers(kind),
        lambda n: torch.randn(n, 4, 6),
        lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()),
        lambda n: torch.randint(3, (n, 4)),
        manners=FP32_ONLY,
    )


class Gated(Two):
    """What a number, or a sum over the batch decides, far from where examples lie.

    Attributes:
        rule: what is done to the samples.
    """

    def __init__(self, rule: str) -> None:
        super().__init__()
        self.rule = rule

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return self.last(getattr(self, self.rule)(x, hidden))

    def capacity(self, x: Tensor, hidden: Tensor) -> Tensor:
        """An expert that takes 64 samples at most."""
        kept = (x[:, 0] > 0).nonzero().squeeze(1)[:64]  # refused: capacity
        return hidden.index_add(0, kept, self.middle(hidden[kept]))

    def best(self, x: Tensor, hidden: Tensor) -> Tensor:
        best = x[:, 0].topk(min(64, len(x))).indices  # refused: best
        return hidden.index_add(0, best, self.middle(hidden[best]))

    def rank(self, x: Tensor, hidden: Tensor) -> Tensor:
        before = (x[:, 0] > 0).long().cumsum(0)
        return hidden * (before <= 3000)[:, None]  # refused: rank

    def count(self, x: Tensor, hidden: Tensor) -> Tensor:
        many = (x[:, 0] > 0).sum() > 1000  # refused: count
        return hidden * torch.where(many, 0.5, 1.0)

    def mean(self, x: Tensor, hidden: Tensor) -> Tensor:
        return hidden + (hidden.mean() > 50).float()  # refused: mean

    def largest(self, x: Tensor, hidden: Tensor) -> Tensor:
        return hidden.clamp(max=100 * hidden.max())  # refused: largest

    def norm(self, x: Tensor, hidden: Tensor) -> Tensor:
        return hidden / hidden.norm().clamp(min=1e3)  # refused: norm

    def any(self, x: Tensor, hidden: Tensor) -> Tensor:
        return hidden * (x[:, 0] < 9).any()  # refused: any

    def floored(self, x: Tensor, hidden: Tensor) -> Tensor:
        return hidden + x.amax() // 30  # refused: floored

    def binned(self, x: Tensor, hidden: Tensor) -> Tensor:
        return hidden + torch.bucketize(x.amax(), torch.tensor([30.0, 60.0]))  # refused: binned

    def shrunk(self, x: Tensor, hidden: Tensor) -> Tensor:
        return hidden + F.hardshrink(x.mean(0).sum(), 8.0)  # refused: shrunk

    def above(self, x: Tensor, hidden: Tensor) -> Tensor:
        return hidden + F.threshold(x.mean(0).sum(), 50.0, 0.0)  # refused: above

    def saturated(self, x: Tensor, hidden: Tensor) -> Tensor:
        return hidden * torch.sigmoid(1e3 * (60 - x.amax()))  # refused: saturated

    def number(self, x: Tensor, hidden: Tensor) -> Tensor:
        number = torch.tensor(float(len(x)))  # refused: number
        return hidden * (number.clamp(max=3000) / number)

    def each(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Bounds of each sample by itself, and along the others of its dimensions."""
        before = (hidden > 0).long().cumsum(1)
        scale = hidden.norm(dim=1, keepdim=True).clamp(min=1e3)
        return hidden * (before <= 3000) / scale * (hidden.mean(1, keepdim=True) < 50)

    def lengths(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Places that are never beyond the longest."""
        lengths = (x[:, 0] > 0).long() + 2
        places = torch.minimum(lengths - 1, lengths.max())
        return hidden.gather(1, places[:, None]).expand_as(hidden) + hidden

    def places(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Places that are below the longest, and below its own length too."""
        lengths, place = (x[:, 0] > 0).long() + 2, torch.arange(hidden.shape[1])
        kept = (place < lengths.max()) & (place < lengths[:, None])
        weight = (place <= lengths.max())[None].float() * (place < lengths[:, None]).float()
        return hidden * kept + hidden.sin() * weight

    def filled(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Asks whether there is anything to fill."""
        pad = hidden > 0.8
        return torch.where(pad.any(), hidden.masked_fill(pad, 0.1), hidden)

    def filled_elsewhere(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Asks whether there is anything, and fills something else."""
        some = (x[:, 0] < 9).any()  # refused: filled_elsewhere
        return torch.where(some, hidden.masked_fill(hidden > 0.8, 0.1), hidden)

    def finite(self, x: Tensor, hidden: Tensor) -> Tensor:
        """A guard against what is no number."""
        return torch.where(hidden.isfinite().all(), hidden, hidden.nan_to_num())


def gated(rule: str, cause: str) -> Case:
    return Case(
        rule,
        lambda: Gated(rule),
        rows,
        F.cross_entropy,
        classes,
        sizes=(8,),
        manners=FP32_ONLY,
        expect=Refused(
            (cause,), ("--per-microbatch", "--microbatches 1"), accept="--per-microbatch"
        ),
    )


FOUND = Refused(("how many rounds the loop has",), ("loop over all of them",))
TOGETHER = "takes the samples of a batch together"
BOUND = "sets a bound to what is taken over the samples"

CASES = (
    simple("experts", Experts, quick=True),
    layers("layers", Experts),
    simple("counted", Counted, manners=FP32_ONLY),
    layers("counted_layers", Counted),
    simple("capped", Capped, manners=FP32_ONLY),
    *(simple(way, lambda way=way: Found(way), manners=FP32_ONLY) for way in ("hit", "skipped")),
    simple("turned", lambda: Found("turned"), manners=FP32_ONLY),
    *(
        simple(way, lambda way=way: Found(way), expect=FOUND)
        for way in ("counted_rounds", "numbered", "added", "apart", "elsewhere", "ended")
    ),
    simple("selected", Selected, manners=FP32_ONLY),
    simple("nonzero", NonZero, manners=FP32_ONLY),
    simple("early", Early, manners=FP32_ONLY),
    simple("scattered", Scattered, manners=FP32_ONLY),
    Case("masked_loss", Two, rows, of_masked, classes, manners=FP32_ONLY),
    Case(
        "crossing",
        Crossing,
        rows,
        of_chosen,
        classes,
        manners=FP32_ONLY,
        expect=Refused(("depends on the values", "nonzero"), ("--microbatches 1", "mask")),
    ),
    gated("capacity", TOGETHER),
    gated("best", TOGETHER),
    simple(
        "number",
        lambda: Gated("number"),
        expect=Refused(("takes the samples of a batch together",), ("--microbatches 1",)),
    ),
    *(gated(rule, BOUND) for rule in ("rank", "count", "mean", "largest", "norm", "any")),
    *(gated(r, BOUND) for r in ("floored", "binned", "shrunk", "above", "saturated")),
    gated("filled_elsewhere", BOUND),
    *(simple(rule, lambda rule=rule: Gated(rule)) for rule in ("each", "lengths", "finite")),
    *(simple(rule, lambda rule=rule: Gated(rule)) for rule in ("places", "filled")),
)
