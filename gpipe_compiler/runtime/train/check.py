"""`run.py check`: compares a package with its model, on the user's own machine.

The pipeline, with its schedule and transport, is compared with references: results of the original
model, each for a batch of its own, or else of the package's own stages (`plain_stages.py`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import safetensors
import safetensors.torch
import torch

from ..core.devices import intra_op_threads
from ..core.inputs import Inputs
from ..core.local_stages import owners_of
from ..core.nest import items_of
from ..core.pipeline import Pipeline
from ..core.precision import lower_dtype
from ..core.stored_weights import Weights
from ..core.storing import place_text
from ..errors import UsageError
from ..spec import BatchNorm, Joined, Leaf
from .comparison import (
    ComparedKind,
    Row,
    Tensors,
    close_names,
    compare,
    flat_tensors,
    path_name,
    rounding_in,
    tolerance,
    unpack,
    worst_of,
)
from .data import call_of
from .plain_stages import LOSS_SCALE, after_step, kept_buffers, run_stages

INPUT = "input/"
"""What stands before the name of an input in a reference file."""

MICROBATCHES = "microbatches"
"""The name in a reference file of the number of micro-batches that its batch is split into."""

Shares: TypeAlias = Mapping[ComparedKind, Mapping[str, float]]
"""How far off tensors may be: most often as a share of what they are measured by."""


@dataclass(frozen=True)
class Expected:
    """A batch, and the results that a pipeline should have on it.

    Attributes:
        microbatches: into which the batch is split, at most.
        rounding: how far rounding alone moves entries of these, where that was measured.
    """

    inputs: Inputs
    target: object
    results: Tensors
    microbatches: int
    rounding: Shares = field(default_factory=dict)


def check_pipeline(
    pipe: Pipeline,
    weights: Weights | None,
    inputs: Inputs,
    target: object,
    references: Sequence[Path] = (),
) -> tuple[Row, ...]:
    """How the pipeline compares, kind by kind, at its worst; the weights are changed by one step.

    Under torchrun each rank compares what it holds.

    Args:
        inputs, target: the batch of every reference that brings none along.
        references: results of the original model; none for those of the stages in a row.

    Raises:
        UsageError: when a reference cannot be read, or there are no weights to start from.
    """
    if references:
        batches = [_read(path, pipe, inputs, target) for path in references]
    elif weights is not None:
        with intra_op_threads(pipe.execution.threads):
            results = run_stages(pipe, weights, inputs, target)
        batches = [Expected(inputs, target, results, pipe.microbatches)]
    else:
        raise UsageError(
            "there is nothing to check against: this package has no weights",
            hint="train it and save weights, or pass --reference",
        )
    with intra_op_threads(pipe.execution.threads):
        return _compared(pipe, batches)


def _compared(pipe: Pipeline, batches: Sequence[Expected]) -> tuple[Row, ...]:
    lower = lower_dtype(pipe.options.precision)
    pairs, rows = [], []
    several = len(batches) > 1
    before = {name: tensor.detach().clone() for name, tensor in _state(pipe)} if several else {}
    for number, batch in enumerate(batches):
        with torch.no_grad():
            for name, tensor in _state(pipe) if number else ():
                tensor.copy_(before[name])
        pipe.rewind()
        pipe.execution.microbatches = batch.microbatches
        actual = run_pipeline(pipe, batch)
        actual, expected = _without_constants(actual, batch.results), _held(batch.results, pipe)
        if lower is None:
            rows.append(compare(actual, expected, rounding=batch.rounding))
        else:
            pairs.append((_copied(actual), expected, batch.rounding))
    pipe.execution.microbatches = pipe.microbatches
    return worst_of(
        rows if lower is None else _under_autocast(pairs, _summed_in(pipe, lower), lower)
    )


def _copied(tensors: Tensors) -> Tensors:
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


def _apart(outputs: Mapping[str, torch.Tensor], pipe: Pipeline) -> Mapping[str, torch.Tensor]:
    """Outputs, those copied that look into the weights, which a step changes."""
    held = {tensor.untyped_storage().data_ptr() for _, tensor in _state(pipe)}
    return {
        name: tensor.clone()
        if tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in held
        else tensor
        for name, tensor in outputs.items()
    }


def run_pipeline(pipe: Pipeline, batch: Expected) -> Tensors:
    """Outputs in eval mode, where they are expected; then loss, gradients, buffers and weights of
    one training step."""
    results: dict[ComparedKind, Mapping[str, torch.Tensor]] = {}
    if ComparedKind.OUTPUT in batch.results:
        with kept_buffers(pipe.stages.values()):
            outputs = flat_tensors(pipe.eval()(batch.inputs))
            results[ComparedKind.OUTPUT] = _apart(outputs, pipe)
    if pipe.spec.loss is None:
        return results
    pipe.train().zero_grad()
    pipe.scaler.update(LOSS_SCALE)
    results[ComparedKind.LOSS] = {"loss": pipe.step(batch.inputs, batch.target)}
    if pipe.scaler.is_enabled():
        pipe.scaler.unscale_(torch.optim.SGD(pipe.parameters()))
    return {**results, **after_step(pipe.local_stages)}


def _read(reference: Path, pipe: Pipeline, inputs: Inputs, target: object) -> Expected:
    try:
        packed = safetensors.torch.load_file(reference)
        given = {name: packed[name] for name in sorted(packed) if name.startswith(INPUT)}
        microbatches = int(packed.get(MICROBATCHES, pipe.microbatches))
        results, rounding = unpack(packed), rounding_in(packed)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise UsageError(f"cannot read the reference {reference}: {error}") from error
    if given:
        named = {name.removeprefix(INPUT): tensor for name, tensor in given.items()}
        inputs, target = call_of(pipe.spec, named)
    return Expected(inputs, target, results, microbatches, rounding)


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
    place_text(path, json.dumps([dataclasses.asdict(row) for row in rows]))
