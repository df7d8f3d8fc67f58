"""Random models: nn.Modules that read a recipe, and cuts nobody would choose.

A recipe is a list of steps. Each step takes values from pools (the newest first: features,
sequences, indices, masks), does something that a pipeline could get wrong, and puts its results
back. A pick of 0 is always possible, so that hypothesis shrinks towards short chains.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

from gpipe_compiler.cluster import Link
from gpipe_compiler.passes.cut import Cut, StepKind
from gpipe_compiler.passes.cut_contract import contract
from gpipe_compiler.passes.cut_problem import CutProblem
from gpipe_compiler.simulate import StageTimes

WIDTH = 4
TIME = 3
CLASSES = 5


@dataclass(frozen=True)
class Step:
    """One line of a recipe: what is done, and to which of the values there are."""

    kind: str
    first: int = 0
    second: int = 0
    third: int = 0


@dataclass(frozen=True)
class Recipe:
    """A model, its call and its loss.

    Attributes:
        seed: of the weights and the inputs.
        output: how the results are returned.
        loss: "none", "function" (with a target) or "own".
        call: which optional inputs there are.
    """

    steps: tuple[Step, ...]
    output: str = "tuple"
    loss: str = "none"
    call: str = "plain"
    seed: int = 0


@dataclass
class Pools:
    """The values a step can choose from: features (B, WIDTH), sequences (B, TIME, WIDTH), class
    indices (B), masks (B, WIDTH)."""

    features: list[torch.Tensor] = field(default_factory=list)
    sequences: list[torch.Tensor] = field(default_factory=list)
    indices: list[torch.Tensor] = field(default_factory=list)
    masks: list[torch.Tensor] = field(default_factory=list)
    early: list[torch.Tensor] = field(default_factory=list)

    def feature(self, pick: int) -> torch.Tensor:
        return self.features[-1 - pick % len(self.features)]

    def sequence(self, pick: int) -> torch.Tensor:
        return self.sequences[-1 - pick % len(self.sequences)]

    def index(self, pick: int) -> torch.Tensor:
        return self.indices[-1 - pick % len(self.indices)]

    def mask(self, pick: int) -> torch.Tensor:
        return self.masks[-1 - pick % len(self.masks)]


class RandomModel(nn.Module):
    """Runs its recipe."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.parts = nn.ModuleDict()
        self.steps = [(number, step) for number, step in enumerate(recipe.steps)]
        for number, step in self.steps:
            if step.kind in PREPARE:
                PREPARE[step.kind](self, number, step)

    def forward(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        extra: dict[str, torch.Tensor] | None = None,
        *,
        bias: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> object:
        pools = Pools([x], [x.unsqueeze(1).expand(-1, TIME, -1)], [ids], [x > 0])
        if extra is not None:
            pools.features.append(extra["more"])
            pools.sequences.append(extra["seq"])
        if bias is not None:
            pools.features.append(bias + x)
        if mask is not None:
            pools.masks.append(mask)
        for number, step in self.steps:
            RUN[step.kind](self, number, step, pools)
        return self._returned(x, pools)

    def _returned(self, x: torch.Tensor, pools: Pools) -> object:
        last = pools.feature(0)
        seq = pools.sequence(0)
        match self.recipe.output:
            case "tensor":
                found: object = last
            case "tuple":
                found = (last, *pools.early)
            case "dict":
                found = {
                    "last": last,
                    "nested": {"early": tuple(pools.early), "none": None},
                    "seq": seq,
                    "index": pools.index(0),
                }
            case "input":
                found = (last, x)
            case "twice":
                found = [last, {"again": last}, pools.mask(0), None]
            case kind:
                raise ValueError(kind)
        if self.recipe.loss != "own":
            return found
        loss = last.square().mean() + seq.tanh().mean()
        return {"loss": loss, "found": found}


Prepare = Callable[[RandomModel, int, Step], None]
Run = Callable[[RandomModel, int, Step, Pools], None]
PREPARE: dict[str, Prepare] = {}
RUN: dict[str, Run] = {}
REGIONS = frozenset({"no_grad", "autocast"})
"""Steps that only torch.export can trace."""


def prepares(kind: str) -> Callable[[Prepare], Prepare]:
    def keep(function: Prepare) -> Prepare:
        PREPARE[kind] = function
        return function

    return keep


def runs(kind: str) -> Callable[[Run], Run]:
    def keep(function: Run) -> Run:
        RUN[kind] = function
        return function

    return keep


def module(kind: str, make: Callable[[], nn.Module]) -> None:
    """A step whose module turns features into features."""

    @prepares(kind)
    def prepare(model: RandomModel, number: int, step: Step) -> None:
        del step
        model.parts[f"{kind}_{number}"] = make()

    @runs(kind)
    def run(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
        pools.features.append(model.parts[f"{kind}_{number}"](pools.feature(step.first)))


module("linear", lambda: nn.Linear(WIDTH, WIDTH))
module("batch_norm", lambda: nn.BatchNorm1d(WIDTH, eps=0.1))
module("layer_norm", lambda: nn.LayerNorm(WIDTH))
module("dropout", lambda: nn.Dropout(0.3))
module("relu_inplace", lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)))
module("frozen", lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False))


class Spare(nn.Module):
    """Holds a parameter and buffers that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("table", torch.randn(2))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()


module("unused_state", Spare)


@runs("add")
def add(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    pools.features.append(pools.feature(step.first) + pools.feature(step.second))


@runs("multiply")
def multiply(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    pools.features.append(pools.feature(step.first) * pools.feature(step.second).sigmoid())


@runs("early")
def early(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    pools.early.append(pools.feature(step.first))


@runs("split")
def split(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    one, two = pools.feature(step.first).chunk(2, dim=1)
    rest, three = torch.split(pools.feature(step.second), [1, WIDTH - 1], dim=-1)
    pools.features.append(torch.cat([two, one], dim=1))
    pools.features.append(torch.cat([three, rest], dim=1))


@runs("unbind")
def unbind(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    a, b, c = pools.sequence(step.first).unbind(1)
    pools.features.extend([a * b, c])


@runs("top")
def top(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    values, where = pools.feature(step.first).topk(2, dim=1)
    largest, index = pools.feature(step.second).max(dim=1)
    pools.features.append(torch.cat([values, values * largest.unsqueeze(1)], dim=1))
    pools.indices.append(index)
    pools.indices.append(where[:, 0])


@runs("argmax")
def argmax(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    pools.indices.append(pools.feature(step.first).argmax(-1))


@runs("threshold")
def threshold(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    pools.masks.append(pools.feature(step.first) > pools.feature(step.second).mean(1, keepdim=True))


@runs("where")
def where(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    mask = pools.mask(step.third)
    pools.features.append(torch.where(mask, pools.feature(step.first), pools.feature(step.second)))


@runs("gather")
def gather(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    index = pools.index(step.second).clamp(0, WIDTH - 1).unsqueeze(1)
    pools.features.append(pools.feature(step.first) + pools.feature(step.first).gather(1, index))


@prepares("embedding")
def prepare_embedding(model: RandomModel, number: int, step: Step) -> None:
    model.parts[f"embedding_{number}"] = nn.Embedding(CLASSES, WIDTH)


@runs("embedding")
def embedding(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    pools.features.append(model.parts[f"embedding_{number}"](pools.index(step.first)))


@prepares("tied")
def prepare_tied(model: RandomModel, number: int, step: Step) -> None:
    """Takes the weight of an earlier module: a linear one's, or an embedding's."""
    made = nn.Linear(WIDTH, WIDTH)
    donors = [
        part
        for part in model.parts.values()
        if isinstance(part, nn.Linear) and part.out_features == WIDTH
    ]
    if donors:
        made.weight = donors[-1 - step.second % len(donors)].weight
    model.parts[f"tied_{number}"] = made


@runs("tied")
def tied(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    pools.features.append(model.parts[f"tied_{number}"](pools.feature(step.first)))


@prepares("head")
def prepare_head(model: RandomModel, number: int, step: Step) -> None:
    donors = [part for part in model.parts.values() if isinstance(part, nn.Embedding)]
    made = nn.Linear(WIDTH, CLASSES, bias=False)
    if donors:
        made.weight = donors[-1 - step.second % len(donors)].weight
    model.parts[f"head_{number}"] = made


@runs("head")
def head(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    """Logits, of which one feature is kept and the classes chosen go on."""
    logits = model.parts[f"head_{number}"](pools.feature(step.first))
    pools.indices.append(logits.argmax(dim=-1))
    pools.features.append(logits[:, 1:])


@runs("shared")
def shared(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    """Calls an earlier module once more."""
    kinds = nn.Linear | nn.BatchNorm1d | nn.Dropout | nn.LayerNorm
    names = [
        name
        for name, part in model.parts.items()
        if isinstance(part, kinds) and not name.startswith("head")
    ]
    x = pools.feature(step.first)
    pools.features.append(model.parts[names[step.second % len(names)]](x) if names else x.cos())


@prepares("recurrent")
def prepare_recurrent(model: RandomModel, number: int, step: Step) -> None:
    kind = nn.GRU if step.third % 2 else nn.LSTM
    model.parts[f"recurrent_{number}"] = kind(WIDTH, WIDTH, batch_first=True)


@runs("recurrent")
def recurrent(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    out, state = model.parts[f"recurrent_{number}"](pools.sequence(step.first))
    hidden = state if step.third % 2 else state[1]
    pools.sequences.append(out)
    pools.features.append(hidden[-1])


@runs("stack")
def stack(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    x, y = pools.feature(step.first), pools.feature(step.second)
    pools.sequences.append(torch.stack([x, y, x - y], dim=1))


@runs("flatten")
def flatten(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    """Arithmetic with the batch size."""
    x = pools.sequence(step.first)
    batch, time = x.shape[0], x.shape[1]
    flat = x.reshape(batch * time, -1).tanh()
    positions = torch.arange(time, device=x.device).unsqueeze(0).expand(batch, -1)
    pools.sequences.append(flat.view(batch, time, -1) * positions.unsqueeze(-1))
    pools.features.append(flat.view(batch, -1)[:, :WIDTH] / x.shape[0])


@runs("zeros")
def zeros(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    """A fresh tensor of the batch's size, filled in place from several sides."""
    x = pools.feature(step.first)
    fresh = torch.zeros(x.shape[0], WIDTH, dtype=x.dtype, device=x.device)
    fresh[:, 0] = x[:, 1]
    fresh[:, 1:3] += pools.feature(step.second)[:, 1:3]
    pools.features.append(fresh)


@runs("write_clone")
def write_clone(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    """In-place ops on a fresh value, with a reader of the value before."""
    fresh = pools.feature(step.first).clone()
    before = fresh * 2
    fresh.add_(pools.feature(step.second)).mul_(0.5)
    pools.features.extend([before, fresh])


@runs("write_view")
def write_view(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    """Writes through a view; the base is read afterwards."""
    fresh = pools.feature(step.first) + 1
    view = fresh[:, 1:]
    view.mul_(2.0)
    row = fresh.t()
    row[0] = 0.5
    pools.features.append(fresh)


@runs("write_old")
def write_old(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    """Writes a value that others may have read or may read later, an input perhaps."""
    x = pools.feature(step.first)
    target = x if step.third % 2 else pools.features[0]
    target.masked_fill_(pools.mask(step.second), 0.25)


@runs("write_alone")
def write_alone(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    """Appends a value of its own and writes it; later steps read what was written."""
    fresh = pools.feature(step.first).sin()
    pools.features.append(fresh)
    fresh[:, 0] = pools.feature(step.second)[:, 3]


@runs("view")
def view(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    """Values that share memory, for others to write."""
    x = pools.sequence(step.first)
    pools.features.append(x[:, 0])
    pools.features.append(x.select(1, 1))


@runs("mask_logic")
def mask_logic(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    pools.masks.append(pools.mask(step.first) ^ ~pools.mask(step.second))


@runs("index_math")
def index_math(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    pools.indices.append((pools.index(step.first) + pools.index(step.second)) % WIDTH)


@runs("cast")
def cast(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    """Another dtype on the way: a boundary of half precision, or of doubles."""
    wide = pools.feature(step.first).to(torch.float64 if step.third % 2 else torch.bfloat16)
    pools.features.append((wide * 2).float() + pools.mask(step.second).float())


@runs("detach")
def detach(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    pools.features.append(pools.feature(step.first).detach() * pools.feature(step.second))


@runs("functional_dropout")
def functional_dropout(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    pools.features.append(F.dropout(pools.feature(step.first), 0.4, training=model.training))


@runs("drop_path")
def drop_path(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    x = pools.feature(step.first)
    if model.training:
        keep = torch.rand(x.shape[0], 1, device=x.device) > 0.3
        x = x * keep / 0.7
    pools.features.append(x + pools.feature(step.second))


@runs("by_mode")
def by_mode(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    x, y = pools.feature(step.first), pools.feature(step.second)
    pools.features.append(x * 2 + y if model.training else x - 1)


@prepares("running")
def prepare_running(model: RandomModel, number: int, step: Step) -> None:
    model.register_buffer(f"mean_{number}", torch.zeros(WIDTH))
    model.register_buffer(f"count_{number}", torch.zeros((), dtype=torch.long))


@runs("running")
def running(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    """A running mean of one's own, read before and after it is written."""
    x, mean = pools.feature(step.first), getattr(model, f"mean_{number}")
    if step.third % 2:
        pools.features.append(x - mean.clone())
    if model.training or step.third == 2:
        mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        getattr(model, f"count_{number}").add_(1)
    pools.features.append(x - mean)


@prepares("lookup")
def prepare_lookup(model: RandomModel, number: int, step: Step) -> None:
    model.register_buffer(f"lookup_{number}", torch.randn(WIDTH), persistent=bool(step.third % 2))
    model.register_parameter(f"gain_{number}", nn.Parameter(torch.randn(WIDTH)))


@runs("lookup")
def lookup(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    """A buffer and a parameter of the model's own, read twice."""
    gain, table = getattr(model, f"gain_{number}"), getattr(model, f"lookup_{number}")
    pools.features.append(pools.feature(step.first) * gain + table)
    pools.features.append(pools.feature(step.second) + gain)


@prepares("attention")
def prepare_attention(model: RandomModel, number: int, step: Step) -> None:
    model.parts[f"attention_{number}"] = nn.MultiheadAttention(WIDTH, 2, batch_first=True)


@runs("attention")
def attention(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    x = pools.sequence(step.first)
    mixed, _ = model.parts[f"attention_{number}"](x, x, x, need_weights=False)
    pools.sequences.append(mixed + x)


@runs("causal")
def causal(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    """A mask made of nothing but sizes."""
    x = pools.sequence(step.first)
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
    scores = (x @ x.transpose(1, 2)).masked_fill(~mask, -1e9)
    pools.sequences.append(scores.softmax(-1) @ x)


@runs("no_grad")
def no_grad(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    with torch.no_grad():
        held = pools.feature(step.first) * 2
    pools.features.append(held + pools.feature(step.second))


@prepares("autocast")
def prepare_autocast(model: RandomModel, number: int, step: Step) -> None:
    model.parts[f"autocast_{number}"] = nn.Linear(WIDTH, WIDTH)


@runs("autocast")
def autocast(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = model.parts[f"autocast_{number}"](pools.feature(step.first))
    pools.features.append(half.float())


def mean_square(output: object, target: torch.Tensor) -> torch.Tensor:
    """The distance of the first feature of an output from a target; most outputs go unused."""
    if isinstance(output, dict):
        output = output["last"]
    if isinstance(output, tuple | list):
        output = output[0]
    return (output - target).square().mean()  # type: ignore[operator]  # a tensor


@dataclass(frozen=True)
class Call:
    """Arguments of a model."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    target: torch.Tensor | None


def call_of(recipe: Recipe, batch: int) -> Call:
    """The example call of a recipe."""
    generator = torch.Generator().manual_seed(recipe.seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    x = normal(batch, WIDTH)
    ids = torch.randint(0, WIDTH, (batch,), generator=generator)
    target = normal(batch, WIDTH) if recipe.loss == "function" else None
    extra = {"more": normal(batch, WIDTH), "seq": normal(batch, TIME, WIDTH)}
    args: tuple[object, ...] = (x, ids)
    kwargs: dict[str, object] = {}
    match recipe.call:
        case "plain":
            pass
        case "extra":
            args = (x, ids, extra)
        case "keywords":
            args, kwargs = (x,), {"ids": ids, "mask": normal(batch, WIDTH) > 0}
        case "none":
            args, kwargs = (x, ids, None), {"bias": normal(1, WIDTH), "mask": None}
        case kind:
            raise ValueError(kind)
    return Call(args, kwargs, target)


OUTPUTS = ("tensor", "tuple", "dict", "input", "twice")
LOSSES = ("none", "function", "own")
CALLS = ("plain", "extra", "keywords", "none")


def recipes(kinds: Sequence[str], most: int) -> st.SearchStrategy[Recipe]:
    """Recipes of these steps between two linear layers, so that there is something to train."""
    picks = st.integers(0, 5)
    steps = st.lists(st.builds(Step, st.sampled_from(kinds), picks, picks, picks), max_size=most)
    return st.builds(
        Recipe,
        steps.map(lambda found: (Step("linear"), *found, Step("linear"))),
        st.sampled_from(OUTPUTS),
        st.sampled_from(LOSSES),
        st.sampled_from(CALLS),
        st.integers(0, 3),
    )


def random_cut(seed: int) -> Callable[..., Cut]:
    """In the place of `passes.cut.cut`: a random chain of down-sets, legal and no more."""

    def cut(
        problem: CutProblem,
        *,
        stages: int,
        microbatches: int,
        step: StepKind,
        link: Link,
        most_down_sets: int,
    ) -> Cut:
        del microbatches, step, most_down_sets
        draw = random.Random(seed)
        graph = contract(problem.check(), link, keep=len(problem.nodes) + 1)
        assert graph.parts >= stages, "ask for fewer stages"
        last = graph.size - 1 if graph.last else None
        order: list[int] = []
        while len(order) < graph.size:
            ready = [
                node
                for node in range(graph.size)
                if node not in order
                and graph.before[node] <= set(order)
                and (node != last or len(order) == graph.size - 1)
            ]
            order.append(draw.choice(ready))
        places = range(1, graph.parts)
        ends = sorted(draw.sample(places, stages - 1))
        stage_of = [0] * len(problem.nodes)
        for position, node in enumerate(order):
            for member in graph.members[node]:
                stage_of[member] = sum(end <= position for end in ends)
        times = (StageTimes(1.0, 2.0),) * stages
        return Cut(tuple(stage_of), times, 1.0, 1.0, False, 1)

    return cut


def most_stages(problem: CutProblem, link: Link) -> int:
    """How many stages a problem can be cut into."""
    return contract(problem.check(), link, keep=len(problem.nodes) + 1).parts
