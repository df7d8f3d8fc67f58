"""What GPUs take that the host does not: CUDA's rules of autocast, and its matrix library."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import gpipe_compiler as gpc
from gpipe_compiler.cluster import Cluster, Device, Link, built_in
from gpipe_compiler.cluster.catalogue import DEFAULT_HOST, workspace_of
from gpipe_compiler.options import LossChoice, Policy
from gpipe_compiler.passes import cuda_autocast as rules
from gpipe_compiler.passes.cuda_autocast import cuda_autocast
from gpipe_compiler.plan.memory_curve import Category, DeviceMemory
from gpipe_compiler.runtime.spec import Precision

HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
H100, A100 = built_in("H100").device, built_in("A100").device
WIDTH = 64
BY_NAME = re.compile("imname|names_")
"""Overloads for named dimensions, which torch 2.11 has and no graph calls."""


def listed(macro: str) -> set[str]:
    """The ops of one of the lists in torch's header."""
    text = HEADER.read_text(encoding="utf-8").replace("\\\n", "\n")
    begin = text.index(f"#define {macro}(_)")
    body = re.split(r"\n\s*\n", text[begin:].partition("\n")[2])[0]
    names = (".".join(filter(None, found)) for found in _entries(body))
    return {name for name in names if not BY_NAME.search(name)}


def _entries(body: str) -> list[tuple[str, str]]:
    return re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body)


def test_the_lists_are_those_of_torch():
    lower = listed("AT_FORALL_LOWER_PRECISION_FP")
    assert len(lower) > 20
    assert lower <= rules._LOWER
    assert listed("AT_FORALL_FP32_SET_OPT_DTYPE") == rules._IN_TYPE
    assert listed("AT_FORALL_PROMOTE") == rules._WIDEST

    known = rules._LOWER | rules._IN_TYPE | rules._WIDEST | {rules.FORBIDDEN}
    others = rules._with_rules("AutocastCUDA") - known
    in_fp32 = {name for name in others if "norm.S" not in name and not BY_NAME.search(name)}
    assert listed("AT_FORALL_FP32") <= in_fp32
    # What torch has a rule for beside its lists, the host has one for, too, which stays.
    assert in_fp32 - listed("AT_FORALL_FP32") <= rules._with_rules("AutocastCPU")


def types_of_results() -> dict[str, torch.dtype]:
    """Types of what ops make of 16 bits under the host's autocast."""
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        x, weight = (torch.empty(8, 8, requires_grad=True) for _ in range(2))
        low = x @ weight
        found: dict[str, Tensor] = {
            "product": low,
            "norm": F.layer_norm(low, (8,)),
            "power": low.pow(2),
            "weights": low.softmax(-1),
            "sum": low.sum(-1),
            "root": low.rsqrt(),
            "gelu": F.gelu(low),
            "wide": torch.addcmul(x, low, low),
            "joined": torch.cat([low, low]),
            "asked": low.sum(-1, dtype=torch.bfloat16),
        }
        sum(tensor.float().sum() for tensor in found.values()).backward()
        assert weight.grad is not None
        assert weight.grad.dtype is torch.float32
    return {name: tensor.dtype for name, tensor in found.items()}


def test_ops_compute_as_on_cuda_and_afterwards_as_on_the_host():
    before = types_of_results()
    with cuda_autocast(Precision.BF16):
        there = types_of_results()
    in_fp32 = {"norm", "power", "weights", "sum", "root", "wide"}

    assert {name for name, dtype in there.items() if dtype is torch.float32} == in_fp32
    assert types_of_results() == before != there


def test_without_autocast_nothing_changes():
    before = types_of_results()
    with cuda_autocast(Precision.FP32):
        assert types_of_results() == before


class Normed(nn.Sequential):
    """Linear layers, each but the first after a norm."""

    def __init__(self, norms: int = 1) -> None:
        pairs = ((nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(norms))
        super().__init__(nn.Linear(WIDTH, WIDTH), *itertools.chain.from_iterable(pairs))


def memory_on(device: Device, model: nn.Module, x: Tensor, **policy: Any) -> DeviceMemory:
    """Of a device that trains the whole model."""
    graph = gpc.trace(model, x, loss=LossChoice.SUM_OF_SQUARES)
    cluster = Cluster.of(device, Link(1e12, 0.0))
    plan = gpc.plan(graph, stages=1, microbatches=1, cluster=cluster, policy=Policy(**policy))
    return plan.prediction.memory[0]


def test_a_gpu_keeps_what_a_norm_takes_in_fp32():
    """The norm keeps its input cast to 4 bytes a number, and two statistics of a row so; the host
    keeps 2 bytes of each. The next layer keeps 2 bytes a number of the norm's result on both."""
    x = torch.randn(4096, WIDTH)

    def kept(device: Device, norms: int, **policy: Any) -> int:
        return memory_on(device, Normed(norms), x, **policy).of(Category.ACTIVATIONS)

    def more(device: Device, **policy: Any) -> int:
        return kept(device, 2, **policy) - kept(device, 1, **policy)

    in_16_bits = {"precision": Precision.BF16}
    statistics = 2 * len(x)

    assert more(H100) == more(DEFAULT_HOST)
    assert more(H100, **in_16_bits) - more(DEFAULT_HOST, **in_16_bits) == 2 * (
        x.numel() + statistics
    )


# --- workspaces of the matrix library -------------------------------------------------------------


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.last(self.first(x).relu())
        return hidden


def test_forward_and_backward_have_a_workspace_each_where_matrices_are_multiplied():
    multiplied = memory_on(H100, Normed(), torch.randn(8, WIDTH))
    convolved = memory_on(H100, Convolved(), torch.randn(2, 3, 16, 16))
    on_host = memory_on(DEFAULT_HOST, Normed(), torch.randn(8, WIDTH))

    assert multiplied.of(Category.WORKSPACES) == 2 * 32 * 2**20
    assert multiplied.peak > 2 * 32 * 2**20
    assert convolved.of(Category.WORKSPACES) == on_host.of(Category.WORKSPACES) == 0


def test_inference_has_one():
    graph = gpc.trace(Normed(), torch.randn(8, WIDTH), training=False)
    plan = gpc.plan(graph, stages=2, microbatches=2, cluster=Cluster.of(A100, Link(1e12, 0.0)))

    sizes = {memory.of(Category.WORKSPACES) for memory in plan.prediction.memory}
    assert sizes == {8_519_680}


def test_workspaces_by_generation():
    """As torch's notes have them: 8 MiB and an eighth, 32 MiB from Hopper on; AMD's are larger."""
    sizes = [workspace_of(c, rocm=False) for c in ((7, 0), (8, 6), (9, 0), (10, 0), (12, 0))]

    assert sizes == [8_519_680, 8_519_680, 2**25, 2**25, 2**25]
    assert workspace_of((9, 0), rocm=True) == 2**25
    assert workspace_of((9, 4), rocm=True) == 2**27
