"""`run.py check`: compares a package with its model, on the user's own machine.

The pipeline, with its schedule and transport, is held against references: results of the original
model, each for a batch of its own, or else the package's own stages run one after another in plain
autograd, which leaves out nothing but the pipelining.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from ..core.inputs import Inputs
from ..core.local_stages import owners_of
from ..core.nest import items_of
from ..core.pipeline import Pipeline
from ..core.precision import lower_dtype
from ..errors import UsageError
from ..spec import BatchNorm, Joined, Leaf
from .comparison import (
    Kind,
    Row,
    Tensors,
    compare,
    flat_tensors,
    path_name,
    unpack,
    worst_of,
)
from .data import call_of
from .sequential_run import LEARNING_RATE, LOSS_SCALE, kept_buffers, run_stages

INPUT = "input/"
"""What stands before the name of an input in a reference file."""


@dataclass(frozen=True)
class Expected:
    """A batch, and the results that a pipeline should have on it."""

    inputs: Inputs
    target: object
    results: Tensors


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
    found = []
    before = {name: tensor.detach().clone() for name, tensor in _state(pipe)}
    for batch in batches:
        with torch.no_grad():
            for name, tensor in _state(pipe):
                tensor.copy_(before[name])
        pipe.rewind()
        actual = run_pipeline(pipe, batch.inputs, batch.target)
        actual = _without_constants(actual, batch.results)
        found.append(compare(actual, _held(batch.results, pipe), _summed_in(pipe)))
    return worst_of(found)


def _state(pipe: Pipeline) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers held here."""
    yield from pipe.named_parameters()
    yield from pipe.named_buffers()


def _summed_in(pipe: Pipeline) -> dict[Kind, dict[str, torch.dtype]]:
    """What the plain model sums in 16 bits.

    Gradients of the parameters of several stages; with exact BatchNorm all, for the plain model
    takes the mini-batch at once, and stages without BatchNorm take micro-batches. And outputs that
    are means or sums over the batch.
    """
    dtype = lower_dtype(pipe.options.precision)
    if dtype is None:
        return {}
    names: set[str] = set(owners_of(pipe.spec))
    if pipe.options.batchnorm is BatchNorm.EXACT:
        names.update(name for stage in pipe.spec.stages for name in stage.state.values())
    leaves = items_of(pipe.spec.outputs, Leaf)
    means = [path for path, leaf in leaves if leaf.joined in (Joined.MEAN, Joined.SUM)]
    outputs = dict.fromkeys(map(path_name, means), dtype)
    gradients = dict.fromkeys(names, dtype)
    return {Kind.OUTPUT: outputs, Kind.GRADIENT: gradients, Kind.WEIGHT: gradients}


@contextlib.contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Computes with `count` intra-op threads, as a stage does.

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
    with kept_buffers(pipe.stages.values()):
        outputs = flat_tensors(pipe.eval()(inputs))
    results: dict[Kind, Mapping[str, torch.Tensor]] = {Kind.OUTPUT: outputs}
    if pipe.spec.loss is None:
        return results
    pipe.train().zero_grad()
    pipe.scaler.update(LOSS_SCALE)
    results[Kind.LOSS] = {"loss": pipe.step(inputs, target)}
    if pipe.scaler.is_enabled():
        pipe.scaler.unscale_(torch.optim.SGD(pipe.parameters()))
    gradients = {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
    _descend(pipe)
    return results | {
        Kind.GRADIENT: gradients,
        Kind.BUFFER: dict(pipe.named_buffers()),
        Kind.WEIGHT: {n: p.detach() for n, p in pipe.named_parameters() if p.requires_grad},
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
        results = unpack(packed)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise UsageError(f"cannot read the reference {reference}: {error}") from error
    if given:
        named = {name.removeprefix(INPUT): tensor for name, tensor in given.items()}
        inputs, target = call_of(pipe.spec, named)
    return Expected(inputs, target, results)


def _without_constants(actual: Tensors, expected: Tensors) -> Tensors:
    """The buffers that the model has too; a stage keeps the model's constants as buffers."""
    known = expected.get(Kind.BUFFER, {})
    buffers = {n: buffer for n, buffer in actual.get(Kind.BUFFER, {}).items() if n in known}
    return {**actual, Kind.BUFFER: buffers}


def _held(expected: Tensors, pipe: Pipeline) -> Tensors:
    """The expected results of this process's stages: all of them, outside torchrun."""
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
