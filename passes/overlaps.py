"""State of the model that shares memory under several names, where a stage's own copy would differ.

Tied weights are one tensor under several names, which the graph knows as one. A buffer that is a
view of another, or a parameter that was given the `.data` of another, is a tensor of its own: what
is written to one shows in the other, and a package holds both apart.
"""

from __future__ import annotations

import itertools
import operator

import torch
from torch import nn

from gpipe_compiler.errors import ModelError
from gpipe_compiler.ir import Graph
from gpipe_compiler.passes.effects import effects


def refuse_overlaps(graph: Graph, model: nn.Module) -> None:
    """Holds an annotated graph to it: what changes is in memory of its own.

    Args:
        model: as its author made it; the graph's tensors are copies.

    Raises:
        ModelError: naming both states, and the line of the op that writes to one.
    """
    by_memory: dict[int, list[str]] = {}
    tensors = {name: tensor for name in graph.state if (tensor := _tensor(model, name)) is not None}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        by_memory.setdefault(storage.data_ptr() or storage._cdata, []).append(name)
    shared = [
        pair
        for names in by_memory.values()
        for pair in itertools.combinations(names, 2)
        if _overlap(*(tensors[name] for name in pair))
    ]
    if not shared:
        return
    writers = effects(graph).state_writes
    for one, other in shared:
        pair = {one, other}
        writing = [op for op in graph.ops if pair & writers.get(op.name, frozenset())]
        trained = graph.loss is not None and any(graph.state[n].requires_grad for n in pair)
        if writing or trained:
            raise ModelError(
                f"{one} and {other} are two tensors in the same memory, and "
                f"{'one of them is written to' if writing else 'training changes it'}: a stage "
                "holds each by itself, and would not see the other change",
                location=writing[0].source if writing else None,
                hint="hold one of them alone, and slice or reshape it in forward; weights are tied "
                "by giving both modules the same nn.Parameter",
            )


def _tensor(model: nn.Module, name: str) -> torch.Tensor | None:
    """A tensor with memory, by its name; None for what has none, or is no attribute."""
    try:
        found = operator.attrgetter(name)(model)
    except (AttributeError, RuntimeError):
        return None
    plain = isinstance(found, torch.Tensor) and found.layout is torch.strided and found.numel()
    return found if plain else None


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of the same storage have an element in common."""
    if one.dtype != other.dtype:
        (start, end), (from_, to) = _bytes(one), _bytes(other)
        return start < to and from_ < end
    count = max(_bytes(one)[1], _bytes(other)[1]) // one.itemsize
    places = torch.zeros(count, dtype=torch.bool)
    places.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(places.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor begins and ends in its storage, in bytes."""
    first = int(tensor.storage_offset())
    last = first + sum(
        int((size - 1) * step) for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return first * tensor.itemsize, (last + 1) * tensor.itemsize
