"""Control flow: loops, branches on shapes and modes, early exits, assertions."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from adversary.case import FP32_ONLY, Case, Refused, RefusedAtStep
from adversary.inputs import classes, rows, steps
from torch import Tensor, nn
from torch._higher_order_ops import map as map_over
from torch._higher_order_ops import scan, while_loop


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def head(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


class Loops(Two):
    """The same layer many times."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for step in range(4):
            x = x + self.again(x).tanh() / (step + 1)
        return self.head(x)


class Shapes(Two):
    """Branches on what no batch changes."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3 and x.size(-1) > 4:
            x = x.mean(1)
        assert x.shape[-1] == 6, "six features"
        return self.head(x)


class OverTime(Two):
    """A Python loop over time, with what it gathers stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        state, seen = torch.zeros_like(x[:, 0]), []
        for step in x.unbind(1):
            state = self.cell(step, state)
            seen.append(state)
        return self.head(torch.stack(seen, 1))


class TakesLength(Two):
    """len() and unpacking."""

    def forward(self, x: Tensor) -> Tensor:
        samples, time, _ = x.shape
        return self.head(x.sum(1) / time).view(len(x), -1)[:samples]


class ByMode(Two):
    """Does something else in training."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x * 1.5
        return self.head(x)


class NoGrad(Two):
    """A part without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.first(x).abs().mean(-1, keepdim=True)
        return self.head(x / (scale + 1))


class Where(Two):
    """A choice by values that stays a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.where(x > 0, x, 0.1 * x))


class DataDependent(Two):
    """As many rows as there are positive ones."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x[x[:, 0] > 0]  # refused: rows_by_value
        return self.head(kept)


class Item(Two):
    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().max().item()  # refused: item
        return self.head(x * scale)


class Cond(Two):
    """One of two ways, as torch's own operator takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("flag", torch.tensor(True))

    def not_taken(self, x: Tensor) -> Tensor:
        return x * 3

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cond(self.flag, lambda x: self.turn(x) * 2, self.not_taken, (x,))
        return self.head(x)


class CondOfLayers(Cond):
    """The other way has weights, whose gradients are zeros in plain PyTorch."""

    def not_taken(self, x: Tensor) -> Tensor:
        return self.other(x) * 3


class CondTheOtherWay(CondOfLayers):
    """The condition does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.flag = ~self.flag


class CondOnData(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))  # refused: cond_on_data
        return self.head(x)


class WhileLoop(Two):
    """Goes around so often, as a buffer says; the loop reads a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.round = nn.Linear(6, 6)
        self.register_buffer("rounds", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        def more(done: Tensor, _: Tensor) -> Tensor:
            return done < self.rounds

        def once(done: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return done + 1, x + self.round(x).tanh()

        _, x = while_loop(more, once, (torch.tensor(0), x))  # refused: while_loop_in_training
        return self.head(x)


class Scanned(Two):
    """A recurrent network by torch's own scan, forwards and backwards, of several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        def step(state: Tensor, now: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            state = self.step(torch.cat([state, now["x"]], -1)).tanh() * now["gate"]
            return state, {"state": state.clone(), "norm": state.square().sum(-1)}

        begin, taken = x.new_zeros(x.shape[0], 6), {"x": x, "gate": x.sigmoid()}
        last, there = scan(step, begin, taken, dim=1)
        _, back = scan(step, last, taken, dim=-2, reverse=True)
        return self.head(last + back["state"].mean(1) + there["norm"].mean(1)[:, None])


class Mapped(Two):
    """Torch's own map over steps that come first."""

    def forward(self, x: Tensor) -> Tensor:
        rows = map_over(
            lambda row, scale: (row * scale).sin(), x.transpose(0, 1), self.first.bias[0]
        )
        return self.head(rows.mean(0))


class WhileOnData(Two):
    def forward(self, x: Tensor) -> Tensor:
        while x.norm() > 1:  # refused: while_on_data
            x = x / 2
        return self.head(x)


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Parameter(torch.randn(6, 4, 5) * 0.3)
        self.head = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.einsum("bi,ijk->bjk", x, self.core).tanh().flatten(1))


class Sorting(Two):
    def forward(self, x: Tensor) -> Tensor:
        values, order = x.sort(-1, descending=True)
        return self.head(values + torch.gather(x, 1, order.flip(1)) + x.cummax(-1).values)


class Recursive(nn.Module):
    """A tree of modules that call themselves."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.left = Recursive(depth - 1) if depth else nn.Identity()
        self.right = Recursive(depth - 1) if depth else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).tanh()
        return self.left(x) + self.right(-x)


class Subclassed(Two):
    """A context manager of the user's own, a lambda and a closure."""

    def forward(self, x: Tensor) -> Tensor:
        double = lambda item: item * 2  # noqa: E731  # as users write
        with contextlib.suppress(KeyError):
            x = double(x)
        return self.head(x)


class NestedGradient(Two):
    """The gradient of an energy is the output."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.sin() * x.cos())


class Skips(nn.Module):
    """A U-Net of linear layers: every value crosses several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(a, b) for a, b in ((6, 5), (5, 4), (4, 3)))
        self.up = nn.ModuleList(nn.Linear(a, b) for a, b in ((3, 4), (8, 5), (10, 6)))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = layer(x).tanh()
            kept.append(x)
        x = self.up[0](kept[2]).tanh()
        x = self.up[1](torch.cat([x, kept[1]], -1)).tanh()
        return self.up[2](torch.cat([x, kept[0]], -1))


class InPieces(Two):
    """Takes samples in pieces of sixteen, and treats each by its number."""

    def forward(self, x: Tensor) -> Tensor:
        pieces = enumerate(self.first(x).split(16))
        return self.last(torch.cat([(1 + number) * piece.tanh() for number, piece in pieces]))


def of_steps(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.mean(1), target)


def simple(name: str, model: type[nn.Module], inputs: object = rows, **options: object) -> Case:
    return Case(name, model, inputs, F.cross_entropy, classes, **options)


class Asserts(nn.Module):
    """Checks what it takes: parts that have to hold, and parts that may not."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        assert x.isfinite().all() and not (x > 100).any()  # noqa: PT018  # as users write it
        assert not (x > 100).all() or x.numel() == 0
        if x.max() > 1e6 or not (x.abs() < 1e6).all():
            raise ValueError("too large")
        return self.last(self.body(x).tanh())


CASES = (
    Case(
        "in_pieces",
        InPieces,
        rows,
        F.cross_entropy,
        classes,
        expect=RefusedAtStep(
            lambda: rows(40), ("up to 16 samples", "split(16)"), lambda: classes(40)
        ),
    ),
    Case(
        "asserts",
        Asserts,
        lambda n: torch.randn(n, 6),
        F.mse_loss,
        lambda n: torch.randn(n, 3),
        manners=FP32_ONLY,
    ),
    simple("loops", Loops),
    simple("branches_on_shapes", Shapes, steps),
    Case("over_time", OverTime, steps, of_steps, classes),
    simple("lengths", TakesLength, steps),
    simple("by_mode", ByMode),
    simple("no_grad", NoGrad),
    simple("where", Where),
    simple("einsum", Einsum),
    simple("sorting", Sorting),
    Case("recursive", Recursive, rows, F.mse_loss, rows),
    simple("closures", Subclassed),
    simple("products", NestedGradient),
    Case("skips", Skips, rows, F.mse_loss, rows, options="--stages 4"),
    Case(
        "skips_interleaved",
        Skips,
        rows,
        F.mse_loss,
        rows,
        options="--stages 4 --schedule interleaved --devices 2xV100",
    ),
    Case(
        "skips_zbv",
        Skips,
        rows,
        F.mse_loss,
        rows,
        options="--stages 4 --schedule zbv --devices 2xV100",
        quick=True,
    ),
    simple(
        "rows_by_value",
        DataDependent,
        options="--mode infer",
        expect=Refused(("depends on the values",), ("torch.where(mask, x, 0)",)),
    ),
    simple("item", Item, expect=Refused(("max_ takes the samples",), ("--microbatches 1",))),
    simple("cond", Cond, sizes=(8, 5), manners=FP32_ONLY),
    simple("cond_of_layers", CondOfLayers, sizes=(8, 5), manners=FP32_ONLY),
    simple("cond_the_other_way", CondTheOtherWay, sizes=(8, 5), manners=FP32_ONLY),
    simple("cond_on_data", CondOnData, expect=Refused(("values of a tensor",), ("torch.where",))),
    simple("while_loop", WhileLoop, options="--mode infer"),
    simple(
        "while_loop_in_training",
        WhileLoop,
        expect=Refused(("trains through torch's while_loop",), ("a Python loop",)),
    ),
    simple("scan", Scanned, steps),
    simple("map", Mapped, steps, manners=FP32_ONLY),
    simple(
        "while_on_data",
        WhileOnData,
        expect=Refused(("values of a tensor",), ("torch.where",)),
    ),
)
