"""What changes how a model is run: torch.func, functions of its own, regions, other layouts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from adversary.case import FP32_ONLY, Case, Refused, RefusedAtStep
from adversary.inputs import classes, rows
from adversary.layers import Two
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Called(Two):
    """A layer with weights that forward makes."""

    def forward(self, x: Tensor) -> Tensor:
        made = {"weight": self.middle.weight * 2, "bias": self.middle.bias - 1}
        x = self.first(x).tanh()
        return self.last(torch.func.functional_call(self.middle, made, (x,)).tanh())


class Hyper(Two):
    """Weights for each sample, made by a network of it."""

    def __init__(self) -> None:
        super().__init__()
        self.makes = nn.Linear(6, 16)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.makes(x).view(-1, 2, 8)
        return self.last(self.body(x)) + torch.einsum("bij,bj->bi", weight, self.first(x)).sum(
            1, keepdim=True
        )


class MaskedByVmap(nn.Module):
    """A mask of attention, written for one pair of places of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value, self.last = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, present: Tensor) -> Tensor:
        def sees(sample: Tensor, place: Tensor, other: Tensor) -> Tensor:
            near = (place - other).abs() < 2
            return (near | (place >= other)) & present[sample, other]

        samples, places = torch.arange(x.shape[0]), torch.arange(x.shape[1])
        pairs = torch.vmap(torch.vmap(sees, (None, None, 0)), (None, 0, None))
        mask = torch.vmap(pairs, (0, None, None))(samples, places, places)
        scores = self.query(x) @ x.new_ones(8, 1) - self.query(x).sum(-1)[:, None]
        weights = scores.masked_fill(~mask, -1e4).softmax(-1)
        return self.last(weights @ self.value(x)).mean(1)


class ExpandedInEval(Two):
    """A mask that is one for all samples in eval mode, and expanded to them where it is not."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(6)[None] > 1
        if self.training:
            mask = mask & (x > -9)
        mask = (~mask).expand(x.shape[0], -1)
        both = torch.cat([mask, x > 0], -1).to(x.dtype)
        return self.last(self.body(x * both[:, :6] + both[:, 6:]))


class Energy(Two):
    """Forces: the gradient of an energy by its input, which training goes through."""

    def forward(self, x: Tensor) -> Tensor:
        energy = self.last(self.body(x)).sum(-1)
        forces = torch.func.grad(lambda y: self.last(self.body(y)).sum())(x)  # refused: by_func
        return forces[:, :3] + energy[:, None]


class Jacobian(Two):
    def forward(self, x: Tensor) -> Tensor:
        out, tangent = torch.func.jvp(super().forward, (x,), (torch.ones_like(x),))  # refused: jvp
        return out + tangent


class Clamped(torch.autograd.Function):
    """Gradients are clipped in the backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor, limit: float) -> Tensor:
        ctx.limit = limit
        ctx.save_for_backward(x)
        return x.clamp(-limit, limit)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 2 * ctx.limit), None


class OwnFunction(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(Clamped.apply(self.body(x), 0.5))


class OwnFunctionInference(OwnFunction):
    pass


class Offloaded(Two):
    """Checkpointed with early stopping, dropout within, keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def part(
        self, x: Tensor, *, scale: float, shift: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        x = self.drop(self.middle(x)) * scale
        return (x if shift is None else x + shift).tanh(), x

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        left, right = checkpoint(self.part, x, scale=2.0, shift=x, use_reentrant=False)
        return self.last(left + right)


class Regions(Two):
    """no_grad, inference of a teacher, and gradients turned on again within."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = self.body(x)
            with torch.enable_grad():
                within = self.middle(teacher)
        return self.last(self.body(x) + teacher) + within.mean(-1, keepdim=True)


class SetGrad(Two):
    @torch.no_grad()
    def statistics(self, x: Tensor) -> Tensor:
        return self.body(x).amax(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x) / (1 + self.statistics(x)))


class Mixed(Two):
    """Autocast regions of two types, nested."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.first(x).tanh()
            with torch.autocast("cpu", enabled=False):
                x = self.middle(x.float()).tanh()
        return self.last(x)


class Fourier(nn.Module):
    """Mixes by FFT over time and features, as FNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.filter = nn.Parameter(torch.randn(4, 6, 2) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.fft.fft2(self.first(x), dim=(-2, -1)).real
        spectrum = torch.fft.rfft(x, dim=1, norm="ortho")[:, :4]
        spectrum = spectrum * torch.view_as_complex(self.filter)[: spectrum.shape[1]]
        return self.last(torch.fft.irfft(spectrum, n=x.shape[1], dim=1, norm="ortho"))


class FourierOfSamples(Fourier):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.fft.fft(x, dim=0).real  # refused: fourier_of_samples
        return self.last(x)


class ComplexLayers(nn.Module):
    """Complex weights, magnitude and angle."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, dtype=torch.complex64)
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(torch.complex(x, x.flip(-1)))
        x = x * torch.polar(torch.ones(8), torch.linspace(0, 3, 8))
        return self.last(torch.cat((x.abs(), torch.view_as_real(x).sum(-1)), -1))


class SafeWhere(Two):
    """A branch of torch.where that is NaN where it is not taken, made safe."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        positive = x > 0
        return self.last(torch.where(positive, torch.where(positive, x, 1.0).log(), x))


class UnsafeWhere(Two):
    """The same without: its gradients are NaN in plain PyTorch too."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.last(torch.where(x > 0, x.log(), x))


class Sparse(Two):
    """A sparse adjacency, kept as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graph", (torch.rand(5, 5) > 0.5).float().to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        mixed = [torch.sparse.mm(self.graph, one) for one in x.unbind(0)]  # refused: sparse
        return self.last(torch.stack(mixed)).mean(1)


class SparseBeside(Two):
    """Sparse weights of the graph, held beside the model's state."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = (torch.rand(6, 6) > 0.5).float().to_sparse_csr()

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.sparse.mm(self.graph, x.T).T  # refused: sparse_beside
        return super().forward(mixed)


class MadeSparse(Two):
    """A weight that is made sparse in forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return torch.sparse.mm(self.last.weight.to_sparse(), x.T).T  # refused: made_sparse


class SparseRows(Two):
    """The same as coordinates, multiplied with what is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("where", torch.randint(5, (2, 9)))
        self.values = nn.Parameter(torch.rand(9))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        moved = x[:, self.where[1]] * self.values[:, None]
        return self.last(torch.zeros_like(x).index_add(1, self.where[0], moved)).mean(1)


class Jagged(Two):
    """Nested tensors of unequal lengths."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        parts = [row[: 1 + n % 4] for n, row in enumerate(x)]  # refused: jagged
        nested = torch.nested.nested_tensor(parts, layout=torch.jagged)  # refused: jagged
        return self.last(torch.nested.to_padded_tensor(self.middle(nested), 0.0).sum(1))


class Routed(nn.Module):
    """Top two of the experts for every token, by gathering their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(6, 4), nn.Linear(6, 3)
        self.experts = nn.Parameter(torch.randn(4, 6, 6) * 0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chances, which = self.gate(x).softmax(-1).topk(2, -1)
        found = torch.einsum("bti,btkij->btkj", x, self.experts[which])
        found = (found * chances.unsqueeze(-1)).sum(-2)
        return self.head(found), which


class Capacity(Routed):
    """Experts take a limited number of tokens, the first of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = F.one_hot(self.gate(x).argmax(-1), 4).flatten(0, 1)
        place = chosen.cumsum(0) * chosen  # refused: capacity
        kept = ((place > 0) & (place <= 3)).float().view(*x.shape[:2], 4)
        found = torch.einsum("bti,eij,bte->btj", x, self.experts, kept)
        return self.head(x + found)


class ExpertsChoose(Routed):
    """Experts choose the tokens that they like most, of all samples."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        chances = self.gate(flat).softmax(0)  # refused: experts_choose
        scores, who = chances.topk(6, 0)
        found = torch.zeros_like(flat)
        for e in range(4):
            found = found.index_add(
                0, who[:, e], scores[:, e, None] * (flat[who[:, e]] @ self.experts[e])
            )
        return self.head((flat + found).view_as(x))


class Sorting(Two):
    """Sorts features, picks quantiles, counts, and searches."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        ordered, order = x.sort(-1, descending=True)
        ranks = order.argsort(-1).to(x.dtype) / 8
        bins = torch.bucketize(x, torch.linspace(-1, 1, 5)).to(x.dtype)
        return self.last(
            ordered * ranks + bins + x.median(-1, keepdim=True).values + x.kthvalue(2, -1, True)[0]
        )


class OneHots(nn.Module):
    """Integers in; an embedding, a one-hot and their differences."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 6, max_norm=None), nn.Linear(13, 3)

    def forward(self, ids: Tensor) -> Tensor:
        hot = F.one_hot(ids, 7).to(self.table.weight.dtype)
        return self.head(torch.cat((self.table(ids), hot), -1).mean(1))


class Slices(Two):
    """Writes to slices, adds to them, swaps them."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).clone()
        x[:, ::2] *= 2
        x[..., 1:3] += x[..., 5:7].detach()
        x[:, [0, 7]] = x[:, [7, 0]]
        x[x < 0] = 0.0
        return self.last(x)


class Solves(Two):
    """Linear algebra for every sample."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        matrix = x[:, :4, None] * x[:, None, :4] + 2 * torch.eye(4)
        found = torch.linalg.solve(matrix, x[:, 4:])
        lower = torch.linalg.cholesky(matrix)
        return (
            self.last(torch.cat((found, lower.diagonal(dim1=1, dim2=2)), 1))
            + matrix.logdet()[:, None]
        )


class Scanned(Two):
    """Products and maxima that run along the features."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.last(x.cumsum(1) + x.cummax(1).values + x.cumprod(1) + x.logcumsumexp(1))


class Assertive(Two):
    """Checks its input as careful people do, prints nothing."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.dim() == 2, "rows, please"
        torch._assert(x.shape[1] == 6, "six features")
        if not isinstance(x, Tensor) or x.is_sparse or x.device.type not in ("cpu", "cuda"):
            raise TypeError("a dense tensor, please")
        return super().forward(x.contiguous().to(self.first.weight.device, non_blocking=True))


class ChecksValues(Two):
    """Looks for NaN, as careful people do: a branch that only raises stands in no package."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.isnan(x).any():
            raise ValueError("not a number")
        return super().forward(x)


class Generates(nn.Module):
    """Greedy decoding: every step looks up what the one before chose."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell, self.head = nn.Embedding(5, 6), nn.GRUCell(6, 6), nn.Linear(6, 5)

    def forward(self, start: Tensor) -> tuple[Tensor, Tensor]:
        state, chosen, found = torch.zeros(start.shape[0], 6), start, []
        for _ in range(4):
            state = self.cell(self.table(chosen), state)
            logits = self.head(state)
            chosen = logits.argmax(-1)
            found.append(logits)
        return torch.stack(found, 1), chosen


class Ponders(Two):
    """Halts when all samples are done: a loop that looks at values."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(5):
            x = self.middle(x).tanh()
            if bool((x.abs() < 0.9).all()):
                break
        return self.last(x)


def steps(samples: int) -> Tensor:
    return torch.randn(samples, 5, 6)


def masked(samples: int) -> tuple[Tensor, Tensor]:
    x = steps(samples)
    return x, torch.cat([torch.ones(samples, 1), torch.rand(samples, x.shape[1] - 1)], 1) > 0.3


def tokens(samples: int) -> Tensor:
    return torch.randint(3, (samples, 5))


def of_tokens(output: object, target: Tensor) -> Tensor:
    logits = output[0] if isinstance(output, tuple) else output
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


TRANSFORMED = Refused(("torch.func",), ("whole batch",))
MIXES = Refused(("together",), ("--per-microbatch", "--microbatches 1"), accept="--per-microbatch")


def simple(name: str, model: object, inputs: object = rows, **options: object) -> Case:
    return Case(name, model, inputs, F.cross_entropy, classes, **options)


def of_steps(name: str, model: object, **options: object) -> Case:
    return Case(name, model, steps, of_tokens, tokens, **options)


OF_SPARSE = Refused(("computes with a sparse tensor",), ("indices and values", "index_add"))

CASES = (
    simple("functional_call", Called, quick=True),
    simple("hyper", Hyper),
    Case("masked_by_vmap", MaskedByVmap, masked, F.cross_entropy, classes),
    simple("expanded_in_eval", ExpandedInEval),
    simple("by_func", Energy, expect=TRANSFORMED),
    simple("jvp", Jacobian, expect=TRANSFORMED),
    simple("function_with_context", OwnFunction),
    simple("function_inference", OwnFunctionInference, options="--mode infer"),
    simple("checkpoint_of_keywords", Offloaded),
    simple("regions", Regions),
    simple("no_grad_method", SetGrad),
    simple("nested_autocast", Mixed, manners=({"microbatches": 1},)),
    of_steps("fourier", Fourier, manners=FP32_ONLY),
    simple("fourier_of_samples", FourierOfSamples, manners=FP32_ONLY, sizes=(8,), expect=MIXES),
    simple("complex_layers", ComplexLayers, manners=FP32_ONLY),
    simple("safe_where", SafeWhere, manners=FP32_ONLY),
    simple("unsafe_where", UnsafeWhere, manners=FP32_ONLY),
    simple("unsafe_where_inference", UnsafeWhere, options="--mode infer"),
    simple("sparse", Sparse, steps, expect=OF_SPARSE),
    simple("sparse_beside", SparseBeside, expect=OF_SPARSE),
    simple("made_sparse", MadeSparse, expect=OF_SPARSE),
    simple("sparse_by_hand", SparseRows, steps, manners=FP32_ONLY),
    simple("jagged", Jagged, steps, expect=Refused(("nested_tensor",), ("pad", "mask"))),
    of_steps("routed", Routed, manners=FP32_ONLY),
    of_steps("capacity", Capacity, manners=FP32_ONLY, sizes=(8,), expect=MIXES),
    of_steps("experts_choose", ExpertsChoose, manners=FP32_ONLY, sizes=(8,), expect=MIXES),
    simple("sorting", Sorting, manners=FP32_ONLY),
    simple("one_hots", OneHots, lambda n: torch.randint(7, (n, 4))),
    simple("slices", Slices),
    simple("solves", Solves, manners=FP32_ONLY),
    simple("scanned", Scanned, manners=FP32_ONLY),
    simple("assertive", Assertive),
    simple("checks_values", ChecksValues),
    Case(
        "generates",
        Generates,
        lambda n: torch.randint(5, (n,)),
        lambda y, t: F.cross_entropy(y[0].flatten(0, 1), t.flatten()),
        lambda n: torch.randint(5, (n, 4)),
        manners=FP32_ONLY,
    ),
    simple(
        "ponders",
        Ponders,
        expect=RefusedAtStep(
            lambda: 100 * rows(6),
            ("transforms.py", "if bool((x.abs() < 0.9).all())", "another way"),
            lambda: classes(6),
            ("torch.where",),
        ),
    ),
)
