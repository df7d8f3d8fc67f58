"""What the steps of a recipe do: each something that a pipeline could get wrong."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from random_models import CLASSES, WIDTH, Pools, RandomModel, Step, module, prepares, runs
from torch import nn

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
    x = pools.feature(step.first)
    wide = x.to(torch.float64 if step.third % 2 else torch.bfloat16)
    pools.features.append((wide * 2).to(x.dtype) + pools.mask(step.second).to(x.dtype))


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
    x = pools.feature(step.first)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = model.parts[f"autocast_{number}"](x)
    pools.features.append(half.to(x.dtype))
