"""Equal calls that follow one another, as loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpipe_compiler.ir.blocks import BlockCall, BlockClass, Part


@dataclass(frozen=True, eq=False, slots=True)
class Loop:
    """Calls of one block in a row, each of which is given what the one before it made.

    Attributes:
        carried: for each output, the place among the inputs of the next call at which it goes in.
    """

    calls: tuple[BlockCall, ...]
    carried: tuple[int, ...]


def find_loops(
    parts: Sequence[Part],
    returns: Sequence[str],
    class_of: Callable[[BlockCall], BlockClass],
) -> list[Part | Loop]:
    """Parts of a method, with loops in place of the calls that they make."""
    last: dict[str, int] = {v: i for i, part in enumerate(parts) for v in part.inputs}
    last.update(dict.fromkeys(returns, len(parts)))
    found: list[Part | Loop] = []
    place = 0
    while place < len(parts):
        loop = _loop_at(parts, place, last, class_of)
        found.append(loop or parts[place])
        place += len(loop.calls) if loop else 1
    return found


def _loop_at(
    parts: Sequence[Part],
    place: int,
    last: dict[str, int],
    class_of: Callable[[BlockCall], BlockClass],
) -> Loop | None:
    first = parts[place]
    if not isinstance(first, BlockCall):
        return None
    calls = [first]
    carried: tuple[int, ...] | None = None
    for index in range(place + 1, len(parts)):
        call = parts[index]
        if not isinstance(call, BlockCall) or not _alike(calls[-1], call, class_of):
            break
        wires = _wires(calls[-1], call)
        if wires is None or carried not in (None, wires):
            break
        if any(last.get(value, -1) != index for value in calls[-1].outputs):
            break
        carried = wires
        calls.append(call)
    return None if carried is None else Loop(tuple(calls), carried)


def _alike(one: BlockCall, other: BlockCall, class_of: Callable[[BlockCall], BlockClass]) -> bool:
    """Whether two calls are of one block, by modules of one list."""
    (around, _, word), (other_around, _, other_word) = (
        call.path.rpartition(".") for call in (one, other)
    )
    listed = around == other_around and word.isdecimal() and other_word.isdecimal()
    equal = class_of(one) is class_of(other) and one.again is other.again
    return equal and listed and word != other_word


def _wires(one: BlockCall, other: BlockCall) -> tuple[int, ...] | None:
    """Where the outputs of a call go into the next one, which shares all else with it."""
    wires: dict[str, int] = {}
    for place, (before, after) in enumerate(zip(one.inputs, other.inputs, strict=True)):
        if after in one.outputs:
            wires[after] = place
        elif after != before:
            return None
    complete = one.outputs and len(wires) == len(one.outputs)
    return tuple(wires[value] for value in one.outputs) if complete else None
