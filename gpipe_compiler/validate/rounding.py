"""How far rounding alone moves what the plain model computes: its results with other last bits.

A gradient may be zero but for rounding, such as that of a bias before a BatchNorm, or the small
difference of large numbers. What rounding leaves of it differs between two right ways to compute
it, by more than a share of its own size. So the model runs again with every weight moved by its
last bit: what that changes in a result, nobody can hold a package to.

Nor to the order in which gradients are summed in 16 bits, where a value has several uses in several
stages: each of these sums its own before it hands one gradient back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from gpipe_compiler.frontend.comparable_runs import LARGEST_COPIED
from gpipe_compiler.frontend.state import isolated
from gpipe_compiler.ir import Autocast, Graph
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.train.comparison import (
    REROUNDED,
    ROUNDINGS,
    ComparedKind,
    Tensors,
    dense,
    distance,
)

_RUNS = 4
"""Models with other last bits; of what they change the most is taken."""

_SEED = 411


def rounding_of(
    model: nn.Module, results: Callable[[nn.Module], Tensors]
) -> dict[ComparedKind, dict[str, float]]:
    """For every tensor, by how much its entries change with the last bits of the weights.

    Nothing is found of a model that is too large to be copied, or whose weights are of 16 bits.

    Args:
        results: those of a model on the batch in question.
    """
    if sum(parameter.nbytes for parameter in model.parameters()) > LARGEST_COPIED:
        return {}
    found: dict[ComparedKind, dict[str, float]] = {}
    random = torch.Generator().manual_seed(_SEED)
    # Compared with a copy too: what a copy lacks of the model is no rounding.
    plain = results(isolated(model))
    for _ in range(_RUNS):
        moved = results(_with_other_bits(model, random))
        for kind, group in plain.items():
            largest = found.setdefault(kind, {})
            for name, tensor in group.items():
                if name in moved.get(kind, {}):
                    change = distance(moved[kind][name], tensor)
                    largest[name] = max(largest.get(name, 0.0), change)
    return found


@torch.no_grad()
def _with_other_bits(model: nn.Module, random: torch.Generator) -> nn.Module:
    """A copy of a model with every weight of 32 or 64 bits moved by its last one, up or down."""
    copied = isolated(model)
    for parameter in copied.parameters():
        if parameter.dtype in (torch.float32, torch.float64):
            signs = torch.randint(0, 2, parameter.shape, generator=random).to(parameter) * 2 - 1
            parameter.mul_(1 + signs * torch.finfo(parameter.dtype).eps)
    return copied


_GRADIENTS = (ComparedKind.GRADIENT, ComparedKind.WEIGHT)


def with_other_sums(
    found: Mapping[ComparedKind, Mapping[str, float]], expected: Tensors, plan: Plan
) -> dict[ComparedKind, dict[str, float]]:
    """How far rounding moves tensors, also where stages sum gradients of 16 bits in another order.

    Args:
        found: what other last bits of the weights change.
        expected: the results of the model.
    """
    units = _units_before(plan.known_graph, _summed_apart(plan.known_graph, plan))
    for name, unit in _cast_apart(plan.known_graph, plan).items():
        units[name] = max(units.get(name, 0.0), unit)
    moved = {kind: dict(group) for kind, group in found.items()}
    for name, gradient in expected.get(ComparedKind.GRADIENT, {}).items():
        size = float(dense(gradient).abs().max()) if name in units and gradient.numel() else 0.0
        for kind in _GRADIENTS if size else ():
            group = moved.setdefault(kind, {})
            allowed = ROUNDINGS / REROUNDED * units[name] * size
            group[name] = max(group.get(name, 0.0), allowed)
    return moved


def _summed_apart(graph: Graph, plan: Plan) -> dict[str, float]:
    """Values whose gradient is a sum in 16 bits that several stages add up, with its unit.

    A sum of two is the same in any order.
    """
    stage_of = {name: stage.index for stage in plan.stages for name in stage.ops}
    return {
        name: torch.finfo(value.dtype).eps
        for name, value in graph.values.items()
        if value.dtype in (torch.bfloat16, torch.float16)
        and value.requires_grad
        and len(uses := graph.consumers.get(name, ())) > 2
        and len({stage_of[op.name] for op in uses}) > 1
    }


def _cast_apart(graph: Graph, plan: Plan) -> dict[str, float]:
    """The parameters that autocast of the model's own casts in several stages or segments, with its
    unit: each sums what comes to its own cast in 16 bits."""
    part_of = {
        name: (stage.index, number)
        for stage in plan.stages
        for number, part in enumerate((stage.ops, *stage.segments))
        for name in part
    }
    units: dict[str, float] = {}
    parts: dict[str, set[tuple[int, int]]] = {}
    for op in graph.ops:
        contexts = [r.context for r in op.regions if isinstance(r.context, Autocast)]
        if contexts and contexts[-1].enabled and op.name in part_of:
            for name in op.states(graph.modules):
                units[name] = torch.finfo(_cast_to(contexts[-1])).eps
                parts.setdefault(name, set()).add(part_of[op.name])
    return {name: unit for name, unit in units.items() if len(parts[name]) > 1}


def _units_before(graph: Graph, values: Mapping[str, float]) -> dict[str, float]:
    """The parameters that values are computed from, with the largest unit of these values."""
    units = dict(values)
    found: dict[str, float] = {}
    for op in reversed(graph.ops):
        unit = max((units.get(name, 0.0) for name in op.outputs), default=0.0)
        for names, group in ((op.inputs, units), (op.states(graph.modules), found)):
            group.update((name, max(group.get(name, 0.0), unit)) for name in names if unit)
    return found


# --- types: those of 16 bits that a model computes in by itself, and others -----------------------

_LOWER = frozenset({torch.bfloat16, torch.float16})


def lower_types(graph: Graph) -> frozenset[torch.dtype]:
    """Those of its values, parameters and buffers, and those of its autocast regions."""
    held = {item.dtype for items in (graph.values, graph.state) for item in items.values()}
    return frozenset(_LOWER & {*held, *_of_regions(graph)})


def _of_regions(graph: Graph) -> Iterator[torch.dtype]:
    for context in {region.context for op in graph.ops for region in op.regions}:
        if isinstance(context, Autocast) and context.enabled:
            yield _cast_to(context)


def _cast_to(context: Autocast) -> torch.dtype:
    return context.dtype or torch.get_autocast_dtype(context.device_type)


def rounded(tensors: Tensors, dtype: torch.dtype | None) -> Tensors:
    """Tensors of every kind, in a type that is rounded to where there is one."""
    return {
        kind: {name: to_type(tensor, dtype) for name, tensor in group.items()}
        for kind, group in tensors.items()
    }


def to_type(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """In a type that is rounded to, where there is one and the tensor has fractions."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def doubled(function: Any) -> Any:
    if not isinstance(function, nn.Module):
        return function
    return isolated(function).double()
