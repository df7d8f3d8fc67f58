"""When a method can let go of its values.

A local variable holds its tensor to the end of the method, unless it is bound anew or deleted. For
what the stage has no room to hold so long (`peaks`), the body binds names anew where it can, writes
ops that would nest as statements of their own where a variable would outlive its use in them, and
deletes the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpipe_compiler.codegen.uses import is_attribute
from gpipe_compiler.codegen.variables import END
from gpipe_compiler.ir import Graph, Op


@dataclass(frozen=True, slots=True)
class Releases:
    """The ends of the memory of a method's values.

    Attributes:
        ends: for each value that is worth letting go of, the position of the last op that reads it
            or what shares its memory.
        asked: results of `x.shape` and the like that are used when the memory of x has ended, and
            so are not to be written where they are used.
    """

    ends: Mapping[str, int]
    asked: frozenset[str]

    @classmethod
    def of(
        cls, graph: Graph, ops: Sequence[Op], returns: Sequence[str], worth: Collection[int]
    ) -> Releases:
        """Those of a method.

        Args:
            worth: the storages that are worth letting go of.
        """
        last: dict[str, int] = {}
        for position, op in enumerate(ops):
            last.update(dict.fromkeys((*op.outputs, *op.inputs), position))
        last.update(dict.fromkeys(returns, END))
        values = graph.values
        storages = {value: values[value].storage for value in last if value in values}
        ends: dict[int, int] = {}
        for value, storage in storages.items():
            ends[storage] = max(ends.get(storage, -1), last[value])
        found = {v: ends[storage] for v, storage in storages.items() if storage in worth}
        asked = {
            value
            for op in ops
            if is_attribute(op.call)
            for value in op.outputs
            if any(found.get(name, END) < last[value] for name in op.inputs)
        }
        return cls(found, frozenset(asked))

    def worth(self, values: Iterable[str]) -> bool:
        """Whether something of these is worth letting go of, now or later."""
        return not self.ends.keys().isdisjoint(values)

    def done(self, values: Iterable[str], position: int) -> bool:
        """Whether something worth it has ended with the op at a position or before."""
        return any(self.ends.get(value, END) <= position for value in values)
