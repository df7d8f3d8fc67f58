"""Batches whose targets are others, for a loss of which numbers alone tell that it can be split.

Where the structure of a loss does not tell what it is a mean over, an example in which everything
counts shows a mean over samples. Here targets are drawn anew: on both sides of every bound that the
model compares them with, masks with holes, lengths up to the longest. Each sample differs more from
the example than the one before it, so that micro-batches differ from each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

import torch

from gpipe_compiler.dispatching import PlainDispatchMode
from gpipe_compiler.ir import Graph, Input, Ref, called
from gpipe_compiler.passes.verbs import BOUNDING, COMPARING, elements_of, number_of
from gpipe_compiler.validate.plain_run import MiniBatch

_FEW = 8
"""Distinct numbers up to which a floating-point input is a choice among them, such as a mask."""


def other_targets(graph: Graph, batch: MiniBatch, seed: int) -> Iterator[MiniBatch]:
    """Batches with other numbers in what only the loss reads, or is compared with bounds.

    First all that may be drawn at once; then, as plain PyTorch may reject some of them, each input
    by itself, and of an integer each bound.
    """
    late = {name for op in graph.ops if op.name in graph.loss_only for name in op.inputs}
    bounds = _bounds(graph)
    drawn = [
        (place, marks)
        for place, source in enumerate(graph.inputs)
        if source.batch_dim is not None and (source.name in late or source.name in bounds)
        for marks in (tuple(sorted(bounds.get(source.name, ()))),)
        if _varies(batch.inputs[place], marks)
    ]
    choices = [drawn] if drawn else []
    choices += [[(place, (mark,))] for place, marks in drawn for mark in marks]
    choices += [[item] for item in drawn if not item[1]]
    for number, choice in enumerate(choices if len(choices) != 2 else choices[:1]):
        random = torch.Generator().manual_seed(seed + number)
        inputs = list(batch.inputs)
        for place, marks in choice:
            inputs[place] = _drawn(graph.inputs[place], inputs[place], marks, random)
        yield dataclasses.replace(batch, inputs=tuple(inputs))


class CheckedClasses(PlainDispatchMode):
    """Rejects targets of a CTC loss that are no classes.

    Every other loss of torch does so by itself. This one reads what happens to lie there, so that
    it shows nothing.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one kernel, if it is given classes."""
        if func.overloadpacket.__name__ in ("_ctc_loss", "_cudnn_ctc_loss"):
            scores, targets, *_ = args
            if bool(((targets < 0) | (targets >= scores.shape[-1])).any()):
                raise IndexError("a target of the CTC loss is no class")
        return func(*args, **(kwargs or {}))


def _bounds(graph: Graph) -> dict[str, set[int]]:
    """For each input of integers, the numbers next to those that it is compared with."""
    inputs = {source.name for source in graph.inputs}
    found: dict[str, set[int]] = {}
    for op in graph.ops:
        if called(op.call) not in COMPARING | BOUNDING:
            continue
        numbers = [number_of(graph, item) for item in (*op.call.args, *op.call.kwargs.values())]
        whole = {int(n) for n in numbers if n is not None and float(n).is_integer()}
        near = {n + by for n in whole for by in (-1, 0, 1)}
        for item in op.call.args:
            source = elements_of(graph, item)
            if isinstance(source, Ref) and source.name in inputs:
                found.setdefault(source.name, set()).update(near)
    return found


def _varies(tensor: torch.Tensor, marks: Collection[int]) -> bool:
    """Whether anything but the batch's own numbers, in another order, may be drawn."""
    if tensor.is_complex() or not tensor.numel():
        return False
    if tensor.dtype is torch.bool:
        return True
    alike = bool((tensor == tensor.flatten()[0]).all())
    if tensor.is_floating_point():
        return len(torch.unique(tensor)) <= _FEW
    return bool(marks) or (alike and int(tensor.flatten()[0]) > 0)


def _drawn(
    source: Input, tensor: torch.Tensor, marks: Collection[int], random: torch.Generator
) -> torch.Tensor:
    """Other numbers: of the first sample its own, of the last one as many as there can be."""
    assert source.batch_dim is not None
    rows = tensor.cpu().movedim(source.batch_dim, 0)
    extent = torch.linspace(0, 1, len(rows)).reshape(-1, *(1,) * (rows.ndim - 1))
    changed = torch.rand(rows.shape, generator=random) < extent
    if rows.dtype is torch.bool:
        others = ~rows
    elif marks:
        chosen = torch.randint(len(marks), rows.shape, generator=random)
        others = torch.tensor([*marks])[chosen]
    elif rows.is_floating_point():
        known = torch.unique(torch.cat((rows.flatten(), rows.new_zeros(1))))
        others = known[torch.randint(len(known), rows.shape, generator=random)]
    else:  # of lengths the later samples have lesser ones, down to 1
        longest = int(rows.max()) * (1 - extent) + extent
        others = (torch.rand(rows.shape, generator=random) * longest).ceil().clamp(min=1)
    found = torch.where(changed, others.to(rows.dtype), rows)
    return found.movedim(0, source.batch_dim).contiguous().to(tensor.device)
