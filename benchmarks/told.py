"""The memory that plans tell of an H100, over what was measured on one.

    python benchmarks/told.py [resnet50|vit|gpt2 ...]
    python benchmarks/told.py --host [NAME ...]       # of this machine instead: told_on_host.py

`h100_memory.json` has the bytes that four stages took there, each in a process of its own, in the
third step of training: the most allocated (`torch.cuda.max_memory_allocated`) and the most
reserved. They were measured with torch 2.11 for CUDA 13, a model of each of three libraries, in
three ways to train. No GPU is needed here: the plans are made anew, which takes minutes. The script
fails where what is allocated is off by more than `WORST` in a stage, or `MEDIAN` in the median.

Needs `pip install --no-deps torchvision timm transformers`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import foreign  # noqa: F401  # makes torchvision load beside a torch for the processor
import told_on_host
import torch
from tables import markdown
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe_compiler as gpc
from gpipe_compiler.cluster import Cluster, built_in
from gpipe_compiler.cluster.catalogue import NVLINK4
from gpipe_compiler.options import Policy, RematChoice
from gpipe_compiler.plan.memory_curve import DeviceMemory
from gpipe_compiler.runtime.spec import OptimizerKind, Precision, ScheduleKind

MEASURED = Path(__file__).with_name("h100_memory.json")
MEDIAN, WORST = 0.05, 0.15
STAGES, MICROBATCHES = 4, 8


@dataclass(frozen=True)
class Model:
    """A model as it was measured: how it is built, a batch of it, and its loss."""

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[..., Tensor]


def resnet50() -> nn.Module:
    """Of torchvision."""
    import torchvision

    return torchvision.models.resnet50(weights=None)  # type: ignore[no-any-return]  # untyped


def vit() -> nn.Module:
    """Of timm."""
    import timm

    return timm.create_model("vit_base_patch16_224")  # type: ignore[no-any-return]  # untyped


def gpt2() -> nn.Module:
    """Of transformers, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return GPT2LMHeadModel(config)


def images(count: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """So many images, with classes."""
    return lambda: (torch.randn(count, 3, 224, 224), torch.randint(1000, (count,)))


def texts() -> tuple[Tensor, Tensor]:
    """Sixteen texts of 512 tokens, with those that follow."""
    return torch.randint(50257, (16, 512)), torch.randint(50257, (16, 512))


def of_tokens(output: object, target: Tensor) -> Tensor:
    """The loss of a language model."""
    logits: Tensor = output.logits if hasattr(output, "logits") else output[0]  # type: ignore[index]
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


MODELS = {
    "resnet50": Model(resnet50, images(64), F.cross_entropy),
    "vit": Model(vit, images(32), F.cross_entropy),
    "gpt2": Model(gpt2, texts, of_tokens),
}
VARIANTS = {
    "fp32": Policy(cut_inside=0.0),
    "remat": Policy(
        schedule=ScheduleKind.ONE_F_ONE_B,
        remat=RematChoice.FULL,
        optimizer=OptimizerKind.MOMENTUM,
        cut_inside=0.0,
    ),
    "bf16": Policy(
        schedule=ScheduleKind.ONE_F_ONE_B,
        optimizer=OptimizerKind.ADAMW,
        precision=Precision.BF16,
        cut_inside=0.0,
    ),
}
"""How the packages were compiled that were measured; cuts were made anywhere."""


def told(name: str) -> dict[str, list[DeviceMemory]]:
    """What the plan of each variant tells of every stage."""
    torch.manual_seed(0)
    model = MODELS[name]
    inputs, target = model.batch()
    graph = gpc.trace(model.build(), inputs, target=target, loss_fn=model.loss)
    cluster = Cluster((built_in("H100").device,) * STAGES, NVLINK4)
    found = {}
    for variant, policy in VARIANTS.items():
        plan = gpc.plan(
            graph, stages=STAGES, microbatches=MICROBATCHES, cluster=cluster, policy=policy
        )
        found[variant] = list(plan.prediction.memory)
    return found


def main() -> int:
    """Prints the table; 1 where a figure is further off than it may be."""
    if "--host" in sys.argv[1:]:
        return told_on_host.main([word for word in sys.argv[1:] if word != "--host"])
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[[], *MODELS], metavar="NAME")
    names = parser.parse_args().names or list(MODELS)
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    rows: list[tuple[str, ...]] = []
    ratios: list[tuple[float, float]] = []
    for name in names:
        plans = told(name)
        for row in (row for row in measured if row["model"] == name):
            memory = plans[row["variant"]][row["stage"]]
            allocated, reserved = row["allocated"], row["reserved"]
            ratios.append((memory.peak / allocated, memory.reserved / reserved))
            sizes = (memory.peak, allocated, memory.reserved, reserved)
            told_peak, peak, told_reserved, kept = (f"{size / 1e6:,.0f}" for size in sizes)
            one, other = (f"{ratio:.3f}" for ratio in ratios[-1])
            rows.append(
                (
                    name,
                    row["variant"],
                    str(row["stage"]),
                    told_peak,
                    peak,
                    one,
                    told_reserved,
                    kept,
                    other,
                )
            )
            print("  ".join(rows[-1]), file=sys.stderr, flush=True)
    figures = ("told MB", "allocated MB", "ratio", "told MB", "reserved MB", "ratio")
    print(markdown(("model", "variant", "stage", *figures), rows))
    exceeded = False
    for what, found in zip(("allocated", "reserved"), zip(*ratios, strict=True), strict=True):
        off = [abs(ratio - 1) for ratio in found]
        print(f"{what}: off by {statistics.median(off):.1%} in the median, {max(off):.1%} at most")
        exceeded |= what == "allocated" and (statistics.median(off) > MEDIAN or max(off) > WORST)
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())
