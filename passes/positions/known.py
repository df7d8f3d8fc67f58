"""Finds the tensors that are made of positions and constants alone, such as attention masks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch._subclasses import FakeTensor

from gpipe_compiler.ir import (
    Argument,
    FunctionCall,
    Graph,
    MethodCall,
    Mode,
    Op,
    Ref,
    StateKind,
    StateRef,
    ValueKind,
    called,
)
from gpipe_compiler.passes.effects import Effects
from gpipe_compiler.passes.positions.coordinates import (
    Cases,
    Content,
    Element,
    Reading,
    UnknownError,
    as_cases,
    as_condition,
    coordinate,
    negated,
    number,
    up_to,
)
from gpipe_compiler.passes.positions.rules import COMPUTING, MOVING

_POSITIONS = frozenset({torch.int32, torch.int64})
"""Types that hold positions in a tensor of any size."""

_LARGEST_TABLE = 2**24
"""Elements of a constant that is looked through."""

_RULES = {**MOVING, **COMPUTING}


@dataclass
class Positions:
    """The values of an annotated graph whose elements follow from their coordinates."""

    graph: Graph
    effects: Effects
    _known: dict[str, Content] = field(default_factory=dict)
    _states: dict[str, Content | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for op in self.graph.ops:
            element = self._element(op)
            if element is not None and isinstance(op.result, str):
                self._known[op.result] = Content(element, self.graph.values[op.result].dims)

    def element(self, argument: Argument) -> Element | None:
        """The elements of a value or state; None where they are not known."""
        try:
            return self._content(argument).element
        except UnknownError:
            return None

    def __contains__(self, value: str) -> bool:
        return value in self._known

    def _element(self, op: Op) -> Element | None:
        call = op.call
        if not isinstance(call, FunctionCall | MethodCall) or op.mode is not Mode.ALWAYS:
            return None
        rule = _RULES.get(called(call))
        if rule is None or not isinstance(op.result, str):
            return None
        value = self.graph.values[op.result]
        written = not self.effects.alias_set(op.result).isdisjoint(self.effects.written_values)
        if value.kind is not ValueKind.TENSOR or value.dtype is None or written:
            return None
        try:
            found = rule(Reading(self.graph, self._content, value.dims), call.args, call.kwargs)
            return _settled(found, value.dtype, len(value.shape))
        except (UnknownError, IndexError, OverflowError):
            return None

    def _content(self, argument: Argument) -> Content:
        if isinstance(argument, Ref) and argument.name in self._known:
            return self._known[argument.name]
        if isinstance(argument, StateRef):
            if argument.name not in self._states:
                self._states[argument.name] = self._constant(argument.name)
            content = self._states[argument.name]
            if content is not None:
                return content
        raise UnknownError

    def _constant(self, name: str) -> Content | None:
        """The elements of a tensor that nobody loads or writes."""
        state, tensor = self.graph.state[name], self.graph.tensors.get(name)
        fixed = state.kind is StateKind.CONSTANT or (
            state.kind is StateKind.BUFFER and not state.persistent
        )
        if not fixed or tensor is None or name in self.effects.written_states:
            return None
        if tensor.is_meta or isinstance(tensor, FakeTensor) or tensor.requires_grad:
            return None
        try:
            found = _settled(_looked_through(tensor), tensor.dtype, tensor.ndim)
        except UnknownError:
            return None
        return Content(found, tuple(tensor.shape))


def _settled(element: Element, dtype: torch.dtype, rank: int) -> Element:
    """The element in a type.

    Raises:
        UnknownError: where the type may not hold it exactly.
    """
    if dtype is torch.bool:
        return as_condition(element)
    found = as_cases(element, rank)
    if dtype in _POSITIONS:
        if all(isinstance(affine.offset, int) for _, affine in found.cases):
            return found
    elif dtype.is_floating_point and all(affine.constant for _, affine in found.cases):
        rounded = [torch.tensor(a.offset, dtype=dtype).item() for _, a in found.cases]
        if not any(map(math.isnan, rounded)):
            pairs = zip(found.cases, rounded, strict=True)
            return Cases(tuple((when, number(value, rank)) for (when, _), value in pairs))
    raise UnknownError


def _looked_through(tensor: torch.Tensor) -> Element:
    """The elements of a constant: one number, positions, or one number up to the diagonal."""
    rank = tensor.ndim
    if not 0 < tensor.numel() <= _LARGEST_TABLE:
        raise UnknownError
    first = tensor.flatten()[0]
    if bool((tensor == first).all()):
        return Cases(((True, number(first.item(), rank)),))
    wide = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    if len(wide) == 1 and tensor.dtype in _POSITIONS:
        if torch.equal(tensor.flatten().long(), torch.arange(tensor.numel())):
            return Cases(((True, coordinate(wide[0], rank)),))
    elif wide == [rank - 2, rank - 1]:
        lower = torch.ones(tensor.shape[-2:], dtype=torch.bool).tril()
        above = tensor[..., 0, 1].flatten()[0]
        if torch.equal(tensor, torch.where(lower, first, above).expand_as(tensor)):
            inside = up_to(0, rank)
            outside = negated(inside)
            values = (inside, number(first.item(), rank)), (outside, number(above.item(), rank))
            return Cases(values)
    raise UnknownError
