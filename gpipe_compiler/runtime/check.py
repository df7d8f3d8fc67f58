"""Proves on the user's own machine that a package computes what it should.

The pipeline, with its schedule and transport, is held against a reference: the results of the
original model, saved when the package was compiled, or else the package's own stages run one after
another in plain autograd, which leaves out nothing but the pipelining.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import nn

from .comparison import Kind, Row, Tensors, compare, flat_tensors, unpack
from .errors import UsageError
from .inputs import Inputs, bind, join, rebuild, split
from .job import Values
from .pipeline import Pipeline
from .random import SeededRandom
from .spec import LossSpec, PipelineSpec
from .weighing import Scales
from .weights import Weights, build_stage
from .wiring import inputs_for, most_work, output_leaves

LEARNING_RATE = 1.0
"""Of the optimizer step in a check: the weights move by their gradients."""


def check_pipeline(
    pipe: Pipeline, weights: Path | None, inputs: Inputs, target: object, reference: Path | None
) -> tuple[Row, ...]:
    """How the pipeline compares, kind by kind; the weights are changed by one step.

    Under torchrun each rank compares what it holds.

    Args:
        weights: the folder that the pipeline's weights came from.
        reference: results of the original model on these inputs; None for the stages in a row.

    Raises:
        UsageError: when the reference cannot be read, or there are no weights to start from.
    """
    if reference is not None:
        expected = _read(reference)
    elif weights is not None:
        with intra_op_threads(pipe.threads):
            expected = run_stages(pipe.spec, weights, inputs, target, pipe.microbatches, pipe.seed)
    else:
        raise UsageError(
            "there is nothing to check against: this package has no weights",
            hint="train it and save weights, or pass --reference",
        )
    actual = run_pipeline(pipe, inputs, target)
    return compare(_without_constants(actual, expected), _held(expected, pipe))


@contextlib.contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Computes with so many threads, as a stage does.

    Another number lets kernels sum in another order. A deep network with BatchNorm turns that
    rounding into other signs before its ReLUs: gradients of a ResNet-50 at initialisation, on one
    thread and on two, differ by a tenth of their size.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_pipeline(pipe: Pipeline, inputs: Inputs, target: object) -> Tensors:
    """Outputs in eval mode; then loss, gradients, buffers and weights of one training step."""
    with _kept_buffers(pipe.stages.values()):
        outputs = flat_tensors(pipe.eval()(inputs))
    results: dict[Kind, Mapping[str, torch.Tensor]] = {Kind.OUTPUT: outputs}
    if pipe.spec.loss is None:
        return results
    pipe.train().zero_grad()
    results[Kind.LOSS] = {"loss": pipe.step(inputs, target)}
    gradients = {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
    torch.optim.SGD(pipe.parameters(), lr=LEARNING_RATE).step()
    return results | {
        Kind.GRADIENT: gradients,
        Kind.BUFFER: dict(pipe.named_buffers()),
        Kind.WEIGHT: {n: p.detach() for n, p in pipe.named_parameters() if p.requires_grad},
    }


@contextlib.contextmanager
def _kept_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Undoes what is written to buffers: the step that follows starts from the model's own."""
    buffers = [buffer for module in modules for buffer in module.buffers()]
    before = [buffer.clone() for buffer in buffers]
    yield
    for buffer, content in zip(buffers, before, strict=True):
        buffer.copy_(content)


def run_stages(
    spec: PipelineSpec,
    weights: Path,
    inputs: Inputs,
    target: object,
    microbatches: int,
    seed: int,
) -> Tensors:
    """The same results from the stages one after another, on the CPU."""
    store, cpu = Weights.open(weights), torch.device("cpu")
    modules = [build_stage(stage, store, cpu, seed) for stage in spec.stages]
    for module in modules:
        module.eval()
    bound = bind(inputs, target, spec, inputs_for(spec, most_work(spec)))
    parts, sizes = split(bound, spec, microbatches)
    with torch.no_grad(), _kept_buffers(modules):
        evaluated = [_forward(spec, modules, part, SeededRandom(seed, 0, 0, ())) for part in parts]
    outputs = {
        leaf.value: join(leaf, [values[leaf.value] for values in evaluated], sizes)
        for leaf in output_leaves(spec.outputs)
    }
    results: Tensors = {Kind.OUTPUT: flat_tensors(rebuild(spec.outputs, outputs))}
    if spec.loss is None:
        return results
    scales = Scales(spec, store, seed)
    weighed = scales.weigh(parts, sizes)
    shares = scales.shares(weighed, sum(weighed))
    return {**results, **_train(spec, spec.loss, modules, parts, shares, seed)}


def _train(
    spec: PipelineSpec,
    loss: LossSpec,
    modules: Sequence[nn.Module],
    parts: Sequence[Values],
    weights: Sequence[float],
    seed: int,
) -> Tensors:
    """One training step of the stages in a row."""
    for module in modules:
        module.train()
    total = torch.zeros(())
    for microbatch, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        values = _forward(spec, modules, part, SeededRandom(seed, 0, microbatch, ()), loss)
        if not weight:  # its loss may be nan: nothing in it counts
            continue
        weighted = values[loss.value] * weight
        torch.autograd.backward(weighted)
        total = total + weighted.detach()
    gradients: Values = {}
    parameters: Values = {}
    buffers: Values = {}
    for stage, module in zip(spec.stages, modules, strict=True):
        for own, parameter in module.named_parameters():
            name = stage.state.get(own, own)
            if parameter.requires_grad:
                parameters[name] = parameter.detach()
            if parameter.grad is not None:
                known = gradients.get(name)
                gradients[name] = parameter.grad if known is None else known + parameter.grad
        buffers.update({stage.state.get(own, own): b for own, b in module.named_buffers()})
    return {
        Kind.LOSS: {"loss": total},
        Kind.GRADIENT: gradients,
        Kind.BUFFER: buffers,
        Kind.WEIGHT: {
            name: tensor - LEARNING_RATE * gradients[name] if name in gradients else tensor
            for name, tensor in parameters.items()
        },
    }


def _forward(
    spec: PipelineSpec,
    modules: Sequence[nn.Module],
    inputs: Values,
    random: SeededRandom,
    loss: LossSpec | None = None,
) -> Values:
    """Every value that a stage hands out, and the loss where it is asked for."""
    values = dict(inputs)
    for stage, module in zip(spec.stages, modules, strict=True):
        random.numbers, random.position = stage.random_ops, 0
        with random:
            returned = module(*(values[name] for name in stage.inputs))
            single = len(stage.outputs) == 1
            values.update(zip(stage.outputs, (returned,) if single else returned, strict=True))
            if loss is not None and loss.separate and module is modules[-1]:
                arguments = (values[name] for name in stage.loss_inputs)
                values[loss.value] = module.loss(*arguments)  # type: ignore[operator]  # the last stage of a pipeline with a loss has this method
    return values


def _read(reference: Path) -> Tensors:
    try:
        return unpack(safetensors.torch.load_file(reference))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise UsageError(f"cannot read the reference {reference}: {error}") from error


def _without_constants(actual: Tensors, expected: Tensors) -> Tensors:
    """The buffers that the model has too; a stage keeps the model's constants as buffers."""
    known = expected.get(Kind.BUFFER, {})
    buffers = {n: buffer for n, buffer in actual.get(Kind.BUFFER, {}).items() if n in known}
    return {**actual, Kind.BUFFER: buffers}


def _held(expected: Tensors, pipe: Pipeline) -> Tensors:
    """The part of the expectations that this process holds: all of them, outside torchrun."""
    if len(pipe.stages) == len(pipe.spec.stages):
        return expected
    kept = dict(expected)
    if pipe.rank != 0:
        kept.pop(Kind.OUTPUT, None)
    names = {name for stage in pipe.stages for name in pipe.spec.stages[stage].state.values()}
    for kind in (Kind.GRADIENT, Kind.BUFFER, Kind.WEIGHT):
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
