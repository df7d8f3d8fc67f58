"""`run.py check`: compares a package with its model, on the user's own machine.

The pipeline, with its schedule and transport, is held against references: results of the original
model, each for a batch of its own, or else the package's own stages run one after another in plain
autograd, which leaves out nothing but the pipelining.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import safetensors
import safetensors.torch
import torch
from torch import nn

from ..core.batchnorm import DeferredStatistics
from ..core.devices import intra_op_threads
from ..core.full_batch import joint_stages
from ..core.inputs import Inputs, bind_call
from ..core.local_stages import owners_of
from ..core.loss_weights import LossWeigher, summed, terms_of
from ..core.nest import items_of
from ..core.options import ExecutionOptions
from ..core.outputs import join, rebuild
from ..core.pipeline import Pipeline
from ..core.precision import autocast, lower_dtype
from ..core.random import SeededRandom, seed_in_eval
from ..core.request import Values
from ..core.weights import Weights, build_stage
from ..core.wiring import inputs_for, most_work, output_leaves
from ..errors import UsageError
from ..spec import BatchNorm, Joined, Leaf, LossSpec, PipelineSpec, Precision
from .comparison import (
    ComparedKind,
    Row,
    Tensors,
    close_names,
    compare,
    flat_tensors,
    path_name,
    tolerance,
    unpack,
    worst_of,
)
from .data import call_of

INPUT = "input/"
"""What stands before the name of an input in a reference file."""

ROUNDING = "rounding/"
"""What stands before the name of a tensor, for how far rounding alone moves its entries."""

LEARNING_RATE = 1.0
"""Of the optimizer step in a check: the weights move by their gradients."""

LOSS_SCALE = 1024.0
"""In a check of fp16: a power of two rounds nothing, and this one is far from overflow."""


Shares: TypeAlias = Mapping[ComparedKind, Mapping[str, float]]
"""How far off tensors may be: most often as a share of what they are measured by."""


@dataclass(frozen=True)
class Expected:
    """A batch, and the results that a pipeline should have on it.

    Attributes:
        rounding: how far rounding alone moves entries of these, where that was measured.
    """

    inputs: Inputs
    target: object
    results: Tensors
    rounding: Shares = field(default_factory=dict)


def check_pipeline(
    pipe: Pipeline,
    weights: Path | None,
    inputs: Inputs,
    target: object,
    references: Sequence[Path] = (),
) -> tuple[Row, ...]:
    """How the pipeline compares, kind by kind, at its worst; the weights are changed by one step.

    Under torchrun each rank compares what it holds.

    Args:
        weights: the folder that the pipeline's weights came from.
        inputs, target: the batch of every reference that brings none along.
        references: results of the original model; none for those of the stages in a row.

    Raises:
        UsageError: when a reference cannot be read, or there are no weights to start from.
    """
    if references:
        batches = [_read(path, pipe, inputs, target) for path in references]
    elif weights is not None:
        with intra_op_threads(pipe.threads):
            batches = [Expected(inputs, target, run_stages(pipe, weights, inputs, target))]
    else:
        raise UsageError(
            "there is nothing to check against: this package has no weights",
            hint="train it and save weights, or pass --reference",
        )
    lower = lower_dtype(pipe.options.precision)
    pairs, rows = [], []
    before = {name: tensor.detach().clone() for name, tensor in _state(pipe)}
    for batch in batches:
        with torch.no_grad():
            for name, tensor in _state(pipe):
                tensor.copy_(before[name])
        pipe.rewind()
        actual = run_pipeline(pipe, batch.inputs, batch.target)
        actual, expected = _without_constants(actual, batch.results), _held(batch.results, pipe)
        if lower is None:
            rows.append(compare(actual, expected, rounding=batch.rounding))
        else:
            pairs.append((_copied(actual), expected, batch.rounding))
    return worst_of(
        rows if lower is None else _under_autocast(pairs, _summed_in(pipe, lower), lower)
    )


def _copied(tensors: Tensors) -> Tensors:
    """In memory of their own, on the CPU: another batch changes weights and buffers."""
    return {
        kind: {name: tensor.detach().to("cpu", copy=True) for name, tensor in group.items()}
        for kind, group in tensors.items()
    }


def _under_autocast(
    pairs: Sequence[tuple[Tensors, Tensors, Shares]], summed: Shares, lower: torch.dtype
) -> list[tuple[Row, ...]]:
    """The rows of each batch; a gradient that is close on one may differ by a unit on the others.

    Args:
        pairs: what a batch came to, what it should, and how far rounding alone moves that.
        lower: the 16-bit type that is computed in.
    """
    close = {
        kind: [close_names(kind, actual, expected) for actual, expected, _ in pairs]
        for kind in (ComparedKind.GRADIENT, ComparedKind.WEIGHT)
    }
    unit = torch.finfo(lower).eps
    rows = []
    for number, (actual, expected, rounding) in enumerate(pairs):
        allowed = {kind: dict(names) for kind, names in summed.items()}
        for kind, names in close.items():
            elsewhere = frozenset().union(*names[:number], *names[number + 1 :])
            shares = allowed.setdefault(kind, {})
            shares.update((name, unit) for name in elsewhere if name not in shares)
        rows.append(compare(actual, expected, allowed, rounding))
    return rows


def _state(pipe: Pipeline) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers held here."""
    yield from pipe.named_parameters()
    yield from pipe.named_buffers()


def _summed_in(pipe: Pipeline, lower: torch.dtype) -> Shares:
    """What the plain model sums in 16 bits, and how far off these sums may be.

    Gradients of the parameters of several stages; with exact BatchNorm all, for the plain model
    takes the mini-batch at once, and stages without BatchNorm take micro-batches. And outputs that
    are means or sums over the batch.
    """
    names: set[str] = set(owners_of(pipe.spec))
    if pipe.options.batchnorm is BatchNorm.EXACT:
        names.update(name for stage in pipe.spec.stages for name in stage.state.values())
    leaves = items_of(pipe.spec.outputs, Leaf)
    means = [path for path, leaf in leaves if leaf.joined in (Joined.MEAN, Joined.SUM)]
    outputs = dict.fromkeys(map(path_name, means), tolerance(lower))
    gradients = dict.fromkeys(names, tolerance(lower))
    return {
        ComparedKind.OUTPUT: outputs,
        ComparedKind.GRADIENT: gradients,
        ComparedKind.WEIGHT: gradients,
    }


def run_pipeline(pipe: Pipeline, inputs: Inputs, target: object) -> Tensors:
    """Outputs in eval mode; then loss, gradients, buffers and weights of one training step."""
    with kept_buffers(pipe.stages.values()):
        outputs = flat_tensors(pipe.eval()(inputs))
    results: dict[ComparedKind, Mapping[str, torch.Tensor]] = {ComparedKind.OUTPUT: outputs}
    if pipe.spec.loss is None:
        return results
    pipe.train().zero_grad()
    pipe.scaler.update(LOSS_SCALE)
    results[ComparedKind.LOSS] = {"loss": pipe.step(inputs, target)}
    if pipe.scaler.is_enabled():
        pipe.scaler.unscale_(torch.optim.SGD(pipe.parameters()))
    gradients = {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
    _descend(pipe)
    return results | {
        ComparedKind.GRADIENT: gradients,
        ComparedKind.BUFFER: dict(pipe.named_buffers()),
        ComparedKind.WEIGHT: {n: p.detach() for n, p in pipe.named_parameters() if p.requires_grad},
    }


@torch.no_grad()
def _descend(pipe: Pipeline) -> None:
    """A step of `torch.optim.SGD`; to construct that imports dynamo, which takes a second."""
    for parameter in pipe.parameters():
        if parameter.grad is not None:
            parameter.add_(parameter.grad, alpha=-LEARNING_RATE)


def _read(reference: Path, pipe: Pipeline, inputs: Inputs, target: object) -> Expected:
    try:
        packed = safetensors.torch.load_file(reference)
        given = {name: packed.pop(name) for name in sorted(packed) if name.startswith(INPUT)}
        names = [name for name in packed if name.startswith(ROUNDING)]
        moved = {name.removeprefix(ROUNDING): packed.pop(name) for name in names}
        rounding = {
            kind: {name: float(tensor) for name, tensor in group.items()}
            for kind, group in unpack(moved).items()
        }
        results = unpack(packed)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise UsageError(f"cannot read the reference {reference}: {error}") from error
    if given:
        named = {name.removeprefix(INPUT): tensor for name, tensor in given.items()}
        inputs, target = call_of(pipe.spec, named)
    return Expected(inputs, target, results, rounding)


def _without_constants(actual: Tensors, expected: Tensors) -> Tensors:
    """The buffers that the model has too; a stage keeps the model's constants as buffers."""
    known = expected.get(ComparedKind.BUFFER, {})
    buffers = {n: buffer for n, buffer in actual.get(ComparedKind.BUFFER, {}).items() if n in known}
    return {**actual, ComparedKind.BUFFER: buffers}


def _held(expected: Tensors, pipe: Pipeline) -> Tensors:
    """The expected results of this process's stages: all of them, outside torchrun."""
    if len(pipe.stages) == len(pipe.spec.stages):
        return expected
    kept = dict(expected)
    if pipe.rank != 0:
        kept.pop(ComparedKind.OUTPUT, None)
    names = {name for stage in pipe.stages for name in pipe.spec.stages[stage].state.values()}
    for kind in (ComparedKind.GRADIENT, ComparedKind.BUFFER, ComparedKind.WEIGHT):
        group = expected.get(kind, {})
        kept[kind] = {name: tensor for name, tensor in group.items() if name in names}
    return kept


def format_rows(rows: Sequence[Row]) -> str:
    """The comparison as a table for the terminal."""
    lines = ["what       compared  largest difference  of its size  allowed"]
    for row in rows:
        lines.append(
            f"{row.what:<10} {row.compared:>8}  {row.largest_difference:>18.2e}  "
            f"{row.relative:>11.2e}  {row.tolerance:.0e}  {'ok' if row.passed else 'FAILED'}"
        )
        lines.extend(f"  {fault}" for fault in row.faults[:10])
    return "\n".join(lines)


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """The comparison as JSON, a list of rows."""
    path.write_text(json.dumps([dataclasses.asdict(row) for row in rows]), encoding="utf-8")


def run_stages(pipe: Pipeline, weights: Path, inputs: Inputs, target: object) -> Tensors:
    """The expected results of a pipeline: outputs, and all that a training step changes.

    On the CPU; in 16 bits where the pipeline computes, as autocast differs between devices.

    Args:
        weights: the folder that the pipeline's weights came from.
    """
    spec, device = pipe.spec, torch.device("cpu")
    if pipe.options.precision is not Precision.FP32:
        device = next((tensor.device for _, tensor in pipe.named_parameters()), device)
    store = Weights.open(weights)
    modules = [build_stage(stage, store, device, pipe.seed) for stage in spec.stages]
    stages = _Stages(spec, modules, pipe.options, device, pipe.seed)
    needed = inputs_for(spec, most_work(spec))
    call = bind_call(inputs, target, spec, needed, pipe.microbatches)
    evaluated = stages.evaluate(call.parts)
    outputs = {
        leaf.value: join(leaf, [values[leaf.value] for values in evaluated], call.samples)
        for leaf in output_leaves(spec.outputs)
    }
    returned = rebuild(spec.outputs, outputs, call.samples, call.sizes[0])
    results: Tensors = {ComparedKind.OUTPUT: flat_tensors(returned)}
    if spec.loss is None:
        return results
    if pipe.options.batchnorm is BatchNorm.EXACT and joint_stages(spec.stages):
        call = bind_call(inputs, target, spec, needed, 1)
    weigher = LossWeigher(spec, store, pipe.seed)
    weighed = weigher.weigh(call)
    shares = weigher.shares(weighed, summed(weighed))
    return {**results, **stages.train(spec.loss, call.parts, shares)}


@contextlib.contextmanager
def kept_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Undoes what is written to buffers: the step that follows starts from the model's own."""
    buffers = [buffer for module in modules for buffer in module.buffers()]
    before = [buffer.clone() for buffer in buffers]
    yield
    for buffer, content in zip(buffers, before, strict=True):
        buffer.copy_(content)


@dataclass(frozen=True)
class _Stages:
    """All the stages, on one device."""

    spec: PipelineSpec
    modules: Sequence[nn.Module]
    options: ExecutionOptions
    device: torch.device
    seed: int

    def evaluate(self, parts: Sequence[Values]) -> list[Values]:
        """What the stages hand out in eval mode, micro-batch by micro-batch."""
        for module in self.modules:
            module.eval()
        with torch.no_grad(), kept_buffers(self.modules):
            return [self._forward(0, part, None, {})[0] for part in parts]

    def train(
        self, loss: LossSpec, parts: Sequence[Values], weights: Sequence[Sequence[float]]
    ) -> Tensors:
        """One training step.

        Args:
            weights: for each micro-batch those of its loss's terms. One of weight 0 may be nan:
                nothing in it counts.
        """
        for module in self.modules:
            module.train()
        deferred: dict[int, DeferredStatistics] = {}
        if self.options.batchnorm is BatchNorm.DEFERRED:
            pairs = zip(self.modules, self.spec.stages, strict=True)
            deferred = {
                index: DeferredStatistics(module, stage.renamed)
                for index, (module, stage) in enumerate(pairs)
            }
        scale = LOSS_SCALE if self.options.precision is Precision.FP16 else 1.0
        total = torch.zeros((), device=self.device)
        for microbatch, (part, own) in enumerate(zip(parts, weights, strict=True)):
            _, terms = self._forward(microbatch, part, loss, deferred)
            weighed = zip(terms, own, strict=True)
            weighted = [term.reshape(()) * weight for term, weight in weighed if weight]
            if weighted:
                torch.autograd.backward(torch.stack(weighted).sum() * scale)
                total = total + torch.stack(weighted).sum().detach()
        for statistics in deferred.values():
            statistics.commit()
        return {ComparedKind.LOSS: {"loss": total}, **self._state(scale)}

    def _state(self, scale: float) -> Tensors:
        """Gradients, buffers, and weights moved by the gradients."""
        gradients: Values = {}
        parameters: Values = {}
        buffers: Values = {}
        for stage, module in zip(self.spec.stages, self.modules, strict=True):
            for own, parameter in module.named_parameters():
                name = stage.named(own)
                if parameter.requires_grad:
                    parameters[name] = parameter.detach()
                if parameter.grad is not None:
                    gradient = parameter.grad / scale
                    known = gradients.get(name)
                    gradients[name] = gradient if known is None else known + gradient
            buffers.update({stage.named(own): b for own, b in module.named_buffers()})
        return {
            ComparedKind.GRADIENT: gradients,
            ComparedKind.BUFFER: buffers,
            ComparedKind.WEIGHT: {
                name: tensor - LEARNING_RATE * gradients[name] if name in gradients else tensor
                for name, tensor in parameters.items()
            },
        }

    def _forward(
        self,
        microbatch: int,
        inputs: Values,
        loss: LossSpec | None,
        deferred: Mapping[int, DeferredStatistics],
    ) -> tuple[Values, tuple[torch.Tensor, ...]]:
        """Every value that a stage hands out, and the terms of the loss where it is asked for."""
        terms: tuple[torch.Tensor, ...] = ()
        values = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        training = any(module.training for module in self.modules)
        seed = self.seed if training else seed_in_eval(self.seed, 0)
        random = SeededRandom(seed, 0, microbatch, ())
        for index, (stage, module) in enumerate(zip(self.spec.stages, self.modules, strict=True)):
            random.numbers, random.shared = stage.randoms(training=training)
            random.position = 0
            with contextlib.ExitStack() as around:
                if index in deferred:
                    around.enter_context(deferred[index].forward(again=False))
                around.enter_context(random)
                around.enter_context(autocast(self.options.precision, self.device))
                returned = module(*(values[name] for name in stage.inputs))
                single = len(stage.outputs) == 1
                values.update(zip(stage.outputs, (returned,) if single else returned, strict=True))
                if loss is not None and loss.separate and module is self.modules[-1]:
                    arguments = (values[name] for name in stage.loss_inputs)
                    terms = terms_of(module.loss(*arguments))  # type: ignore[operator]  # the last stage of a pipeline with a loss has this method
        if loss is not None and not loss.separate:
            terms = (values[loss.value],)
        return values, terms
