"""Finds the loops of a method: rounds of ops that are alike, one after another."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from gpipe_compiler.codegen.loops import DIGITS, call_arguments, form_of
from gpipe_compiler.codegen.rounds import LoopContext, Rounds
from gpipe_compiler.ir import FunctionCall, ModuleCall, Op
from gpipe_compiler.ir.arguments import leaves
from gpipe_compiler.ir.forms import structure
from gpipe_compiler.ir.ops import called

LONGEST = 200
"""Ops of a round, at most."""

TRIES = 4
"""Lengths of rounds that are tried at one op."""


@dataclass(frozen=True)
class LoopFinder:
    """Finds loops.

    Attributes:
        draws: how often ops draw, by their names.
    """

    around: LoopContext
    draws: Mapping[str, int]

    def looped(self, ops: Sequence[Op], returns: Sequence[str]) -> tuple[Op, ...]:
        """Ops of a method, with loops in place of what repeats."""
        return self.within(ops, returns, returns)

    def within(
        self, ops: Sequence[Op], kept: Collection[str], returns: Sequence[str]
    ) -> tuple[Op, ...]:
        """The same for ops of a method, or of a loop in it.

        Args:
            kept: what is read after them.
            returns: of that, what the method returns.
        """
        forms: dict[Hashable, int] = {}
        keys = [forms.setdefault(self._key(op), len(forms)) for op in ops]
        places: dict[int, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(key, []).append(place)
        makers = {value: place for place, op in enumerate(ops) for value in op.outputs}
        readers: dict[str, list[int]] = {}
        for place, read in enumerate([*(op.inputs for op in ops), kept]):
            for value in dict.fromkeys(read):
                readers.setdefault(value, []).append(place)
        found: list[Op] = []
        place = 0
        while place < len(ops):
            alike = places[keys[place]]
            index = bisect_right(alike, place)
            sizes = [other - place for other in alike[index : index + TRIES]]
            rounds = (
                Rounds(self.around, ops, returns, keys, place, size, makers, readers)
                for size in sizes
                if size <= LONGEST
            )
            made = next((item for item in rounds if item.find()), None)
            if made is None:
                found.append(ops[place])
                place += 1
            else:
                loop = made.written()
                found.extend((loop.begins, *self.within(loop.body, loop.kept, ()), loop.ends))
                place += made.size * made.count
        return tuple(found)

    def _key(self, op: Op) -> Hashable:
        """Equal for ops that may be those of one place in different rounds."""
        made = op.call
        own: Hashable = called(made)
        if isinstance(made, ModuleCall):
            own = self.around.functions.get(made.module) or DIGITS.sub("", made.module)
        elif isinstance(made, FunctionCall):
            own = id(made.function)
        arguments = call_arguments(made)
        return (
            type(made),
            op.mode,
            own,
            structure(arguments),
            tuple(map(form_of, leaves(arguments))),
            len(op.outputs),
            self.draws.get(op.name),
            bool(op.layer),
            tuple(region.context for region in op.regions),
        )
