"""Plans cut by hand, and emitted stages run in plain Python."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from loading import load_package, load_script
from segmenting import in_segments
from torch import nn

from gpipe_compiler.cluster import DEFAULT_HOST, Cluster, Device, Link
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.tracing import trace
from gpipe_compiler.ir import Graph
from gpipe_compiler.options import LossChoice
from gpipe_compiler.passes.atoms import atoms
from gpipe_compiler.passes.cost import roofline
from gpipe_compiler.passes.duplicate import duplicable
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.loss_weight import weigh_loss
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.plan import Plan, Prediction, Stage
from gpipe_compiler.planner.cut_problem import CutFacts
from gpipe_compiler.planner.stage_table import tabulate
from gpipe_compiler.runtime.schedule import gpipe
from gpipe_compiler.runtime.spec import ScheduleKind
from gpipe_compiler.targets.torch_stages import emit

models = load_script(Path(__file__).with_name("models.py"), "codegen_models")
CLUSTER = Cluster.of(Device("test", 1e12, 1e11, 1 << 34, 1e-6), Link(1e10, 1e-6))
MICROBATCHES = 2


def graph_of(
    model: nn.Module,
    *args: torch.Tensor,
    target: object = None,
    loss_fn: Callable[[object, object], torch.Tensor] | None = None,
    kwargs: Mapping[str, object] | None = None,
    name: str = "example",
    training: bool = True,
    loss: LossChoice = LossChoice.SUM_OF_SQUARES,
) -> Graph:
    """The graph of a model, annotated for a micro-batch; `args` are a mini-batch.

    Args:
        loss: where there is no loss function.
    """
    loss = loss if loss_fn is None else LossChoice.MODEL
    subject = Subject(name, model, args, kwargs or {}, target, loss_fn, training, loss)
    graph = trace(subject)
    if not graph.example:
        call = {"args": args, "kwargs": subject.kwargs, "target": target}
        graph = graph.replace(
            example={source.name: _at(call, source.path) for source in graph.inputs}
        )
    return weigh_loss(annotate(graph, graph.batch_size // MICROBATCHES))


def _at(call: Any, path: Sequence[str | int]) -> Any:
    return functools.reduce(lambda found, key: found[key], path, call)


def cut(graph: Graph, count: int) -> Plan:
    """A plan with about equally many ops in each of `count` stages, atoms kept whole."""
    found = effects(graph)
    copied = duplicable(graph, found)
    groups = atoms(graph, found, copied)
    kept = [op.name for op in graph.ops if op.name not in copied]
    stage_of: dict[str, int] = {}
    for index, name in enumerate(kept):
        stage_of[name] = index * count // len(kept)
    changed = True
    while changed:  # nothing before what it reads, no atom apart, the loss last
        before = dict(stage_of)
        edges = [*groups.precedence]
        for name in kept:
            if name in groups.last_stage:
                stage_of[name] = count - 1
            for value in graph.op_of[name].inputs:
                maker = graph.producer.get(value)
                if maker is not None and maker.name in stage_of:
                    edges.append((maker.name, name))
        for first, second in edges:
            if first in stage_of and second in stage_of:
                stage_of[second] = max(stage_of[second], stage_of[first])
        for group in groups.groups:
            top = max(stage_of[name] for name in group)
            stage_of.update(dict.fromkeys(group, top))
        changed = before != stage_of
    return _plan(graph, stage_of, count)


def _plan(graph: Graph, stage_of: dict[str, int], count: int) -> Plan:
    """The plan of an assignment, without figures."""
    table = tabulate(CutFacts.of(graph, roofline(graph, DEFAULT_HOST)), stage_of, count)
    stages = tuple(
        Stage(
            index=index,
            ops=table.ops[index],
            duplicates=table.duplicates[index],
            inputs=table.inputs[index],
            outputs=table.outputs[index],
            state=(),
            forward_s=1.0,
            backward_s=2.0,
            receive_bytes=0,
            gradient_bytes=0,
            parameter_bytes=0,
            parameter_count=0,
            saved_bytes=0,
        )
        for index in range(count)
    )
    return Plan(
        name=graph.name,
        stages=stages,
        crossings=table.crossings,
        schedule=ScheduleKind.GPIPE,
        microbatches=MICROBATCHES,
        batch_size=graph.batch_size * MICROBATCHES,
        training=graph.loss is not None,
        orders=gpipe(tuple(range(count)), MICROBATCHES),
        cluster=CLUSTER,
        cost_source="by hand",
        prediction=Prediction(1.0, 1.0, 0.0, 1.0, False, (0,) * count),
        graph=graph,
    )


@dataclasses.dataclass
class Emitted:
    """A package with the model it was made from."""

    case: Any
    model: nn.Module
    directory: Path
    package: ModuleType
    stages: list[nn.Module]

    def chain(self, training: bool) -> Callable[[Sequence[object], object], tuple[object, Any]]:
        """Runs all stages in a row: the model's outputs, and the loss."""
        spec = self.package.SPEC

        def run(args: Sequence[object], target: object) -> tuple[object, Any]:
            call = {"args": args, "kwargs": {}, "target": target}
            values = {
                source.name: _at(call, source.path)
                for source in spec.inputs
                if training or source.path[0] != "target"
            }
            for stage, module in zip(spec.stages, self.stages, strict=True):
                module.train(training)
                returned = module(*(values[name] for name in stage.inputs))
                single = len(stage.outputs) == 1
                values.update(zip(stage.outputs, (returned,) if single else returned, strict=True))
            outputs = _rebuild(spec.outputs, values)
            if not training or spec.loss is None:
                return outputs, None
            if spec.loss.separate:
                last = spec.stages[-1]
                loss = self.stages[-1].loss(*(values[name] for name in last.loss_inputs))
                return outputs, loss
            return outputs, values[spec.loss.value]

        return run

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Gives the stages the state of the model."""
        for stage, module in zip(self.package.SPEC.stages, self.stages, strict=True):
            for own, tensor in module.state_dict(keep_vars=True).items():
                if stage.state[own] in state:
                    tensor.data.copy_(state[stage.state[own]])

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients under the model's names, summed over the stages that share a parameter."""
        found: dict[str, torch.Tensor] = {}
        for stage, module in zip(self.package.SPEC.stages, self.stages, strict=True):
            for own, parameter in module.named_parameters():
                if parameter.grad is not None:
                    name = stage.state[own]
                    found[name] = found.get(name, 0) + parameter.grad
        return found

    def buffers(self) -> dict[str, torch.Tensor]:
        """Buffers of the model under its names."""
        wanted = dict(self.model.named_buffers())
        return {
            stage.state[own]: buffer
            for stage, module in zip(self.package.SPEC.stages, self.stages, strict=True)
            for own, buffer in module.named_buffers()
            if stage.state[own] in wanted
        }


def _rebuild(structure: Any, values: Mapping[str, object]) -> object:
    if isinstance(structure, dict):
        return {key: _rebuild(item, values) for key, item in structure.items()}
    if isinstance(structure, tuple | list):
        return type(structure)(_rebuild(item, values) for item in structure)
    return values[structure.value] if hasattr(structure, "value") else structure


@pytest.fixture
def emitted(tmp_path: Path) -> Callable[..., Emitted]:
    """Compiles one of the models, cut by hand, and loads the package.

    The stages recompute in so many segments, where some are asked for.
    """

    def make(label: str, count: int, segments: int = 0) -> Emitted:
        torch.manual_seed(0)
        case = models.CASES[label]
        model = case.build()
        target = case.target() if case.target is not None else None
        graph = graph_of(
            copy.deepcopy(model),
            *case.args(),
            target=target,
            loss_fn=case.loss_fn,
            name=label,
        )
        plan = cut(graph, count)
        directory = emit(in_segments(plan, segments) if segments else plan, tmp_path / "out")
        package = load_package(directory)
        build = importlib.import_module(f"{package.__name__}.runtime.core.building")
        store = build.Weights.open(directory / "weights")
        stages = [
            build.build_stage(stage, store, torch.device("cpu"), 0) for stage in package.SPEC.stages
        ]
        return Emitted(case, model, directory, package, stages)

    return make


@pytest.fixture
def ruff() -> Callable[[Path], None]:
    """Holds the emitted files (the runtime apart) against ruff's own defaults at 100 columns."""

    def check(directory: Path) -> None:
        files = [str(path) for path in sorted(directory.glob("*.py"))]
        base = [sys.executable, "-m", "ruff"]
        options = ["--isolated", "--line-length", "100"]
        for command in (["check"], ["format", "--diff"]):
            done = subprocess.run(
                [*base, *command, *options, *files], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr

    return check


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-golden", action="store_true", help="write the golden folder anew")


@pytest.fixture(scope="session")
def planned() -> Callable[..., Plan]:
    """A model traced and cut by hand into `count` stages."""

    def make(model: nn.Module, *args: torch.Tensor, count: int, **options: Any) -> Plan:
        return cut(graph_of(model, *args, **options), count)

    return make


@pytest.fixture
def cut_of() -> Callable[..., Plan]:
    """A model traced as `graph_of` does, and cut by hand into two stages."""

    def make(model: nn.Module, *args: torch.Tensor, **options: Any) -> Plan:
        return cut(graph_of(model, *args, **options), 2)

    return make


@pytest.fixture
def load() -> Callable[[Path], ModuleType]:
    return load_package
