"""When a method can let go of its values.

A local variable holds its tensor to the end of the method, unless it is bound anew or deleted. So
that memory is free right after its last use, as the rehearsal of a stage takes it to be, the body
binds names anew where it can, writes ops that would nest as statements of their own where a
variable would outlive its use in them, and deletes the rest. What makes no difference is left: what
the caller, autograd or a checkpoint holds anyway, small tensors, and what lives until the last
large tensor is made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch.utils.checkpoint import checkpoint

from gpipe_compiler.codegen.uses import is_attribute
from gpipe_compiler.codegen.variables import END
from gpipe_compiler.ir import FunctionCall, Graph, Op, ValueKind

SMALL = 100
"""A tensor of less than one part in so many of the largest in its method is not worth a line."""


@dataclass(frozen=True, slots=True)
class Releases:
    """The ends of the memory of a method's values.

    Attributes:
        ends: for each value that is worth letting go of, the position of the last op that reads it
            or what shares its memory.
        asked: results of `x.shape` and the like that are used when the memory of x has ended, and
            so are not to be written where they are used.
        busy: the position of the last op that reads or makes a large tensor.
    """

    ends: Mapping[str, int]
    asked: frozenset[str]
    busy: int

    @classmethod
    def of(
        cls,
        graph: Graph,
        ops: Sequence[Op],
        arguments: Sequence[str],
        returns: Sequence[str],
        saved: Mapping[str, Collection[str]],
    ) -> Releases:
        """Those of a method.

        Args:
            saved: op -> the values whose memory autograd keeps for it, where it does.
        """
        memory = _Memory(graph, (*arguments, *(v for op in ops for v in op.outputs)))
        last = dict.fromkeys(arguments, -1)
        for position, op in enumerate(ops):
            last.update(dict.fromkeys((*op.outputs, *op.inputs), position))
        last.update(dict.fromkeys(returns, END))
        ends: dict[int, int] = {}
        for value, position in last.items():
            key = memory.of.get(value)
            if key is not None:
                ends[key] = max(ends.get(key, -1), position)
        held = memory.keys(arguments)
        for op in ops:
            held |= memory.keys(_held_by(op, saved))
        large = memory.large()
        touched = (p for p, op in enumerate(ops) if memory.keys((*op.inputs, *op.outputs)) & large)
        busy = max(touched, default=-1)
        worth = {key for key in large - held if ends[key] < busy}
        found = {value: ends[key] for value, key in memory.of.items() if key in worth}
        asked = {
            value
            for op in ops
            if is_attribute(op.call)
            for value in op.outputs
            if any(found.get(name, END) < last[value] for name in op.inputs)
        }
        return cls(found, frozenset(asked), busy)

    def worth(self, values: Iterable[str]) -> bool:
        """Whether something of these is worth letting go of, now or later."""
        return not self.ends.keys().isdisjoint(values)

    def done(self, values: Iterable[str], position: int) -> bool:
        """Whether something worth it has ended with the op at a position or before."""
        return any(self.ends.get(value, END) <= position for value in values)


NOTHING = Releases({}, frozenset(), -1)
"""Of a method that holds everything to its end."""


def _held_by(op: Op, saved: Mapping[str, Collection[str]]) -> Collection[str]:
    """The values that are held for the backward of an op."""
    if isinstance(op.call, FunctionCall) and op.call.function is checkpoint:
        return op.inputs
    return saved.get(op.name, ())


class _Memory:
    """The storages of a method's tensors, by number."""

    def __init__(self, graph: Graph, values: Iterable[str]) -> None:
        self.of: dict[str, int] = {}
        self._bytes: dict[int, int] = {}
        for value in values:
            known = graph.values.get(value)
            if known is not None and known.kind is ValueKind.TENSOR:
                self.of[value] = known.storage
                size = max(self._bytes.get(known.storage, 0), known.bytes)
                self._bytes[known.storage] = size

    def keys(self, values: Iterable[str]) -> set[int]:
        return {self.of[value] for value in values if value in self.of}

    def large(self) -> set[int]:
        largest = max(self._bytes.values(), default=0)
        return {key for key, size in self._bytes.items() if size * SMALL >= largest > 0}
