"""A hand-written pipeline in which some stages mix samples, in float64; a script under torchrun.

A skip passes by the joint stages; boundary values run along dimension 0, along dimension 1, and
along none: a trained scale, which a joint stage reads and others too, and a mean over the batch,
which a joint stage makes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tiny_pipelines import SAMPLES, WIDTH, cross, spec_of, states
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.errors import PipelineError
from gpipe_compiler.runtime.spec import (
    BatchNorm,
    Input,
    Leaf,
    LossSpec,
    LossTerm,
    Reduction,
    StageSpec,
)

F64 = torch.float64
IGNORED = -100
NORM = ("running_mean", "running_var", "num_batches_tracked")
RATE = 0.05
STEPS = 3


class First(nn.Module):
    normed = False

    def __init__(self):
        super().__init__()
        self.l0 = nn.Linear(WIDTH, WIDTH, dtype=F64)
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=F64))
        self.bn = nn.BatchNorm1d(WIDTH, dtype=F64) if self.normed else nn.Identity()

    def forward(self, x):
        a = torch.tanh(self.bn(self.l0(x)))
        return a, (2 * a).t(), self.scale.exp()


class NormedFirst(First):
    normed = True


class Middle(nn.Module):
    """Always joint: BatchNorm, and in training the mean square over the batch."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(WIDTH, dtype=F64)

    def forward(self, a, across, scale):
        b = self.bn(a * scale + across.t())
        gain = b.square().mean(0) if self.training else self.bn.running_var.clone()
        return b, gain, b.argmax(1, keepdim=True)


class Third(nn.Module):
    """Never joint, unless something is random."""

    def __init__(self):
        super().__init__()
        self.l2 = nn.Linear(WIDTH, WIDTH, dtype=F64)

    def forward(self, a, b, gain, scale, top):
        return (torch.tanh(self.l2(b)) * gain + a * scale).scatter(1, top, 1.0)


class Last(nn.Module):
    normed = False

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(WIDTH, dtype=F64) if self.normed else nn.Identity()
        self.l3 = nn.Linear(WIDTH, WIDTH, dtype=F64)

    def forward(self, a, c):
        return self.l3(self.bn(c)) * a

    def loss(self, y, target):
        return F.cross_entropy(y, target)


class NormedLast(Last):
    normed = True


class SummedLast(Last):
    def loss(self, y, target):
        return F.cross_entropy(y, target, reduction="sum")


class NormedSummedLast(SummedLast):
    normed = True


class Counted(nn.Module):
    """How many labels are not ignored."""

    def forward(self, target):
        return (target != IGNORED).sum()


LAST = {
    (False, Reduction.MEAN): Last,
    (True, Reduction.MEAN): NormedLast,
    (False, Reduction.SUM): SummedLast,
    (True, Reduction.SUM): NormedSummedLast,
}


def stage(index, module, inputs, outputs, loss_inputs=()):
    names = states(module, f"s{index}.")
    writes = tuple(name for name in names if name.rpartition(".")[2] in NORM)
    return StageSpec(module, inputs, outputs, names, loss_inputs, writes=writes, mixes=bool(writes))


def joint_spec(normed=(1,), reduction=Reduction.MEAN, *, ignoring=False, **more):
    """Stage 1 is joint, and of 0 and 3 those in `normed`; the mean leaves out ignored labels."""
    stages = [
        stage(0, NormedFirst if 0 in normed else First, ("x",), ("a", "across", "scale")),
        stage(1, Middle, ("a", "across", "scale"), ("b", "gain", "top")),
        stage(2, Third, ("a", "b", "gain", "scale", "top"), ("c",)),
        stage(3, LAST[3 in normed, reduction], ("a", "c"), ("y",), ("y", "target")),
    ]
    flat = (WIDTH,)
    crossings = [
        cross("a", 0, (1, 2, 3), dtype=F64),
        cross("across", 0, (1,), dtype=F64, shape=(WIDTH, SAMPLES), batch_dim=1),
        cross("scale", 0, (1, 2), dtype=F64, shape=flat, batch_dim=None),
        cross("target", 0, (3,), gradient=False, dtype=torch.int64, shape=(SAMPLES,)),
        cross("b", 1, (2,), dtype=F64),
        cross("gain", 1, (2,), dtype=F64, shape=flat, batch_dim=None),
        cross("top", 1, (2,), gradient=False, dtype=torch.int64, shape=(SAMPLES, 1)),
        cross("c", 2, (3,), dtype=F64),
    ]
    weight = StageSpec(Counted, ("target",), ("count",)) if ignoring else None
    outputs = {"y": Leaf("y"), "rest": (Leaf("across", 1), [Leaf("gain", None), Leaf("b")])}
    loss = LossSpec("loss", (LossTerm(reduction, counted=ignoring),), separate=True, weight=weight)
    inputs = [Input("x", ("args", 0)), Input("target", ("target",))]
    more.setdefault("batchnorm", BatchNorm.EXACT)
    return spec_of(stages, crossings, inputs, outputs, loss, **more)


def joint_data(samples, seed=0, *, ignoring=False):
    """Inputs and labels; all but one of the labels of the first half are ignored."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, WIDTH, generator=generator, dtype=F64)
    target = torch.randint(WIDTH, (samples,), generator=generator)
    if ignoring:
        target[1 : (samples + 1) // 2] = IGNORED
    return x, target


def trained(spec, samples, **choices):
    """What every rank of torchrun, or the only process, comes to; everything on rank 0."""
    found = {}
    with Pipeline(spec, None, seed=6, **choices) as pipe:
        optimizer = torch.optim.SGD(list(pipe.parameters()), lr=RATE)
        found.update({f"before {k}": v.clone() for k, v in pipe.gather_state_dict().items()})
        for step in range(STEPS):
            x, target = joint_data(samples, seed=step) if pipe.rank == 0 else (None, None)
            optimizer.zero_grad()
            loss, outputs = pipe.step_with_outputs(x, target)
            optimizer.step()
            found[f"loss {step}"] = loss
            if pipe.rank == 0:
                across, (gain, b) = outputs["rest"]
                for name, tensor in {"y": outputs["y"], "a": across, "g": gain, "b": b}.items():
                    found[f"{name} {step}"] = tensor
        found["evaluated"] = pipe.evaluate(x, target)
        found.update({k: v.clone() for k, v in pipe.gather_state_dict().items()})
    return found


def differ(directory):
    """One rank forgets to leave training mode; the others lose it, and do not hang."""
    with Pipeline(joint_spec(), None, timeout_s=300) as pipe:
        if pipe.rank == 1:
            pipe.eval()
        try:
            pipe.step(*joint_data(8) if pipe.rank == 0 else (None, None))
        except PipelineError as error:
            (directory / f"differ-{pipe.rank}").write_text(str(error))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    for name, normed in {"middle": (1,), "all": (0, 1, 3)}.items():
        for remat in ("none", "full"):
            found = trained(joint_spec(normed), 11, remat=remat)
            if torch.distributed.get_rank() == 0:
                torch.save(found, Path(sys.argv[1]) / f"{name}-{remat}.pt")
    differ(Path(sys.argv[1]))
    torch.distributed.destroy_process_group()
