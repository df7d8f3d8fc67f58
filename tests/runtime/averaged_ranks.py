"""Training with averages of the weights, of a pipeline and in plain PyTorch: what ranks run."""

from __future__ import annotations

import contextlib
import copy
import sys
from pathlib import Path

import torch
from tiny_pipelines import cross, data_for, skip_spec, spec_of
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.spec import Input, Leaf, LossSpec, LossTerm, Reduction, StageSpec

STEPS = 20
SIZES = (10, 6)
F64 = torch.float64


class Plain(nn.Module):
    """A model with tied weights and BatchNorm, and parts that are called as a pipeline's are."""

    def __init__(self):
        super().__init__()
        self.stages = nn.Embedding(*SIZES, dtype=F64)
        self.seed = nn.Module()
        self.seed.norm = nn.BatchNorm1d(SIZES[1], dtype=F64)
        self.head = nn.Linear(SIZES[1], SIZES[0], bias=False, dtype=F64)
        self.head.weight = self.stages.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.seed.norm(self.stages(tokens))))


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(*SIZES, dtype=F64)

    def forward(self, tokens):
        return self.embedding(tokens)


class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(SIZES[1], dtype=F64)
        self.head = nn.Parameter(torch.zeros(SIZES, dtype=F64))

    def forward(self, h):
        return F.linear(torch.tanh(self.norm(h)), self.head)

    def loss(self, logits, target):
        return F.cross_entropy(logits, target)


def tied_norm_spec():
    """The same in two stages, for mini-batches in one piece, as BatchNorm sees them."""
    norm = (*nn.BatchNorm1d(1).state_dict(),)
    stages = [
        StageSpec(First, ("tokens",), ("h",), {"embedding.weight": "stages.weight"}),
        StageSpec(
            Second,
            ("h",),
            ("logits",),
            {"head": "stages.weight", **{f"norm.{own}": f"seed.norm.{own}" for own in norm}},
            ("logits", "target"),
            writes=tuple(f"norm.{own}" for own in norm[2:]),
            mixes=True,
        ),
    ]
    crossings = [
        cross("h", 0, (1,), dtype=F64),
        cross("target", 0, (1,), gradient=False, dtype=torch.int64, shape=(2,)),
    ]
    inputs = [Input("tokens", ("args", 0), dtype=torch.int64), Input("target", ("target",))]
    loss = LossSpec("loss", (LossTerm(Reduction.MEAN),), separate=True)
    aliases = {"head.weight": "stages.weight"}
    return spec_of(stages, crossings, inputs, Leaf("logits"), loss, microbatches=1, aliases=aliases)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(SIZES[0], (8,), generator=generator)
    return tokens, (3 * tokens + 1) % SIZES[0]


def averages_of(model):
    """What averages a model, by name: it, how it is told of a step, and the module in it."""
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    mean = AveragedModel(model)
    found = {"ema": (ema, ema.update_parameters), "mean": (mean, mean.update_parameters)}
    try:
        from timm.utils import ModelEmaV3
    except ImportError:
        return found
    timm = ModelEmaV3(model, decay=0.9)
    return {**found, "timm": (timm, timm.update)}


def train(model, loss_of, between=lambda: None):
    """The averages after all steps.

    Args:
        loss_of: a loss with a `backward()`.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    averages = averages_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        (loss_of(step) / 2).backward()
        optimizer.step()
        between()
        for _, update in averages.values():
            update(model)
    return {name: average for name, (average, _) in averages.items()}


def plain_run(state):
    """The states of all averages, and their losses in evaluation."""
    model = Plain()
    model.load_state_dict(state)
    averages = train(model, lambda step: F.cross_entropy(model(batch(step)[0]), batch(step)[1]))
    tokens, target = batch(STEPS)
    found = {}
    for name, average in averages.items():
        found[name] = {**average.module.state_dict()}
        found[name]["loss"] = F.cross_entropy(average.eval()(tokens), target).detach()
    return found


def main(file):
    torch.manual_seed(1)
    start = {name: tensor.clone() for name, tensor in Plain().state_dict().items()}
    with Pipeline(tied_norm_spec(), None) as pipe:
        pipe.load_state_dict(start)

        def loss_of(step):
            return pipe.loss(*pipe.shard(*(batch(step) if pipe.feeds else (None, None))))

        averages = train(pipe, loss_of)
        found = {}
        for name, average in averages.items():
            average.eval()
            copied = copy.deepcopy(average)  # as it is kept while training goes on
            loss = average.module.evaluate(*pipe.shard(*batch(STEPS)))
            found[name] = {**copied.module.gather_state_dict(), "loss": loss}
            copied.module.close()
            average.module.close()
        if pipe.rank == 0:
            torch.save((start, found), file)


def accumulate(file):
    """Gradients of two replicas, accumulated by losses and by steps."""
    found = []
    with Pipeline(skip_spec(), None, data_parallel=2) as pipe:
        for by_loss in (True, False):
            pipe.zero_grad()
            for number in range(3):
                (x,), target, _ = data_for("skip", 8, number)
                call = pipe.shard((x,), target) if pipe.feeds else ()
                with pipe.no_sync() if number < 2 else contextlib.nullcontext():
                    if by_loss:
                        (pipe.loss(*call) / 4).backward()
                    else:
                        pipe.step(*call, weight=0.25)
            found.append({name: p.grad for name, p in pipe.named_parameters()})
        torch.save(found, file.with_name(f"{pipe.rank}.pt"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "accumulate":
        accumulate(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[2]))
