"""Plans of models far larger than this machine.

Held against published sizes, against counts that follow from the layers (no op of a repeated layer
is traced, described or priced twice), and the two largest against the memory they may take.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from gpipe_compiler.cluster import Cluster, Device, Link
from gpipe_compiler.compile import plan, trace
from gpipe_compiler.frontend import tracing
from gpipe_compiler.frontend.source import load
from gpipe_compiler.ir import Graph, ModuleCall, ModuleSpec, Op, interpret
from gpipe_compiler.options import LossChoice, Policy
from gpipe_compiler.passes import cost
from gpipe_compiler.passes.dry_run import DryRun
from gpipe_compiler.runtime.spec import ScheduleKind

ROOT = Path(__file__).parents[2]
TRANSFORMER_L = ROOT / "examples" / "transformer_l.py"
TRANSFORMER_1T = ROOT / "examples" / "transformer_1t.py"

MOST_BYTES = 4e9

LAYERS = 64

MODEL = """
import torch
from torch import nn
from transformer_l import TransformerL, loss_fn

def build_model():
    with torch.device("meta"):
        return TransformerL(50, 16, 32, 2, {layers}, 0.1)

def example_inputs():
    return torch.zeros(64, 8, dtype=torch.long)

example_target = example_inputs
"""


@pytest.mark.parametrize(
    "layers", [3, 13, 103, *(pytest.param(n, marks=pytest.mark.slow) for n in (415, 1663))]
)
def test_transformer_l_has_the_published_number_of_parameters(layers: int) -> None:
    subject = load(f"{TRANSFORMER_L}:transformer_{layers}")

    count = sum(parameter.numel() for parameter in subject.model.parameters())

    assert count == 50_358_272 * layers + 131_104_000
    assert all(parameter.is_meta for parameter in subject.model.parameters())


def test_the_trillion_has_the_parameters_of_its_table() -> None:
    """arXiv 2104.04473, equation 2 and table 1: 1008.0 billion; besides, a last norm."""
    subject = load(str(TRANSFORMER_1T))
    layers, dim, sequence, vocabulary = 128, 25600, 2048, 51200
    published = 12 * layers * dim * dim + 13 * layers * dim + (vocabulary + sequence) * dim

    count = sum(parameter.numel() for parameter in subject.model.parameters())

    assert count == published + 2 * dim
    assert round(count / 1e9) == 1008


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    """A decoder of 64 layers, of the example's own classes."""
    model = tmp_path / "stack.py"
    folder = f"import sys; sys.path.insert(0, {str(TRANSFORMER_L.parent)!r})"
    model.write_text(folder + MODEL.format(layers=LAYERS))
    return model


@pytest.mark.slow
def test_a_repeated_layer_is_traced_described_and_priced_once(stack: Path) -> None:
    subject = load(str(stack))
    traced: list[int] = []
    run: list[int] = []
    priced: list[str] = []
    unchecked, run_all, work_of = tracing.unchecked, DryRun.run, cost.work_of

    def counted(subject: object, precision: object) -> Graph:
        traced.append(sum(1 for _ in subject.model.modules()))  # type: ignore[attr-defined]  # a Subject
        return unchecked(subject, precision)  # type: ignore[arg-type]  # as above

    def running(self: DryRun, *args: object) -> dict[str, object]:
        run.append(len(self.graph.ops))
        return run_all(self, *args)  # type: ignore[arg-type]  # as given

    def pricing(lone: object) -> object:
        priced.append(lone.op.name)  # type: ignore[attr-defined]  # a IsolatedOp
        return work_of(lone)  # type: ignore[arg-type]  # as above

    with (
        mock.patch.object(tracing, "unchecked", counted),
        mock.patch.object(DryRun, "run", running),
        mock.patch.object(cost, "work_of", pricing),
    ):
        graph = tracing.trace(subject)
        made = plan(
            graph,
            stages=16,
            microbatches=64,
            policy=Policy(schedule=ScheduleKind.ONE_F_ONE_B),
            cluster=Cluster.of(Device("device", 1e12, 1e12, 10**12, 1e-6), Link(1e10, 1e-6)),
        )

    per_layer = layer_ops(graph, 1)
    others = len(graph.ops) - LAYERS * len(per_layer)
    assert len(traced) == 1
    assert traced[0] < sum(1 for _ in subject.model.modules()) / 8
    assert max(run) <= others + 6 * len(per_layer)
    assert len(priced) <= others + 2 * len(per_layer)
    assert len(made.stages) == 16
    actions = [action for order in made.orders for action in order]
    assert len(actions) == len(set(actions)) == 2 * 16 * 64
    owned = [name for stage in made.stages for name in stage.ops if name in graph.op_of]
    assert {op.name for op in graph.ops} == set(owned)
    assert sum(stage.parameter_count for stage in made.stages) == graph.parameter_count


def layer_ops(graph: Graph, layer: int) -> list[Op]:
    """The ops of one layer, by the modules that call them and are called."""
    path = f"layers.{layer}"
    return [
        op
        for op in graph.ops
        if op.module == path
        or op.module.startswith(f"{path}.")
        or getattr(op.call, "module", "").startswith(f"{path}.")
    ]


@pytest.mark.parametrize("stages", [2, 6])
@pytest.mark.parametrize("layers", [12, 24])
def test_an_op_of_unequal_layers_is_run_and_made_a_few_times(layers: int, stages: int) -> None:
    """Whatever the number of ops and of stages: nothing grows faster than they do."""
    widths = range(8, 9 + layers)
    net = nn.Sequential(
        *(nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths))
    )
    graph = trace(net, torch.ones(8, 8), loss=LossChoice.SUM_OF_SQUARES)
    ran, made = Counter[str](), Counter[str]()
    run_all, construct = DryRun.run, interpret.construct

    def running(self: DryRun, *args: object) -> dict[str, object]:
        ran.update(op.name for op in self.graph.ops)
        return run_all(self, *args)  # type: ignore[arg-type]  # as given

    def constructing(spec: ModuleSpec, **mode: bool) -> nn.Module:
        made[str(spec.args)] += 1
        return construct(spec, **mode)

    with (
        mock.patch.object(DryRun, "run", running),
        mock.patch.object(interpret, "construct", constructing),
    ):
        plan(graph, stages=stages, microbatches=4, policy=Policy())

    of_layers = [op.name for op in graph.ops if isinstance(op.call, ModuleCall)]
    assert max(ran[name] for name in of_layers) <= 6
    assert max(count for args, count in made.items() if args != "()") <= 7


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "stages"), [("transformer-1663", 128), ("one-trillion", 512)])
def test_the_largest_models_are_planned_in_four_gigabytes(name: str, stages: int) -> None:
    """In a process of its own, whose peak is that of the plan."""
    command = [sys.executable, str(ROOT / "benchmarks" / "scale.py"), "--one", name]

    result = subprocess.run(command, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stderr
    steps = json.loads(result.stdout.splitlines()[-1])
    assert {"tracing", "planning", "plan.json", "report"} <= {step[0] for step in steps}
    assert 0 < max(step[3] for step in steps) < MOST_BYTES
