"""Which variable holds each value: the user's own names where they are known, reused once dead."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from gpipe_compiler.codegen.names import Identifiers
from gpipe_compiler.ir import ValueKind

END = 1 << 60
"""The position after the last statement: what is returned is used there."""


class Variables:
    """Gives values their variables, in program order.

    A name is bound anew (`x = self.conv(x)`) once every value that it holds is dead.

    Args:
        last_use: the position of each value's last reader.
        kind: what a value is; a name keeps to one kind.
    """

    def __init__(
        self, names: Identifiers, last_use: Mapping[str, int], kind: Callable[[str], object]
    ) -> None:
        self._names = names
        self._last_use = last_use
        self._kind = kind
        self._holds: dict[str, set[str]] = {}
        self._like: dict[str, list[str]] = {}
        self._of: dict[str, str] = {}
        self._watched: dict[str, None] = {}

    def assign(self, value: str, wish: str, position: int) -> str:
        """The variable for a value made at `position`, -1 for what the method is given."""
        variable = self._reused(value, wish, position)
        if variable is None:
            return self.fresh(value, wish)
        self._holds[variable].clear()
        return self._bind(value, variable)

    @property
    def named(self) -> frozenset[str]:
        """All variables so far."""
        return frozenset(self._holds)

    def is_numbered(self, value: str, wish: str, position: int) -> bool:
        """Whether a value that asks for a name would get one with a number behind it."""
        return wish in self._like and self._reused(value, wish, position) is None

    def dead(self, position: int) -> Iterator[tuple[str, frozenset[str]]]:
        """The variables of which nothing is read after a position, and what they hold."""
        for variable in self._watched:
            held = self._holds[variable]
            if all(self._last_use.get(old, -1) <= position for old in held):
                yield variable, frozenset(held)

    def tensors(self) -> Iterator[tuple[str, frozenset[str]]]:
        """The variables that hold tensors, the latest first, and the values that they hold."""
        for variable, held in reversed(self._holds.items()):
            if held and all(self._kind(value) is ValueKind.TENSOR for value in held):
                yield variable, frozenset(held)

    def forget(self, variable: str) -> None:
        """The variable may go on holding what it does."""
        self._watched.pop(variable, None)

    def release(self, variable: str) -> frozenset[str]:
        """The variable holds nothing any more; what it held."""
        held = frozenset(self._holds[variable])
        self._holds[variable].clear()
        self.forget(variable)
        return held

    def fresh(self, value: str, wish: str) -> str:
        """A variable that holds nothing yet."""
        variable = self._names.take(wish)
        for asked in {wish, variable}:
            self._like.setdefault(asked, []).append(variable)
        return self._bind(value, variable)

    def rename(self, variable: str, new: str, position: int) -> bool:
        """Lets a variable that is free before a position hold what another does, if it can."""
        held, old = self._holds.get(variable, set()), self._holds.get(new)
        if old is None and (new in self._names or self._names.take(new) != new):
            return False
        kinds = {self._kind(value) for value in (*held, *(old or ()))}
        if not held or len(kinds) > 1 or (old and not self.free(new, position - 1)):
            return False
        self._like.setdefault(new, [new])
        self._holds[new], self._holds[variable] = held, set()
        self._of.update(dict.fromkeys(held, new))
        self._watched[new] = None
        return True

    def alias(self, value: str, of: str) -> str | None:
        """The variable of the value `of` for `value` too: both are one tensor."""
        variable = self._of.get(of)
        return None if variable is None else self._bind(value, variable)

    def hold(self, values: Mapping[str, str]) -> None:
        """Variables from here on hold these values, and nothing else."""
        for variable in values.values():
            self._holds[variable].clear()
        for value, variable in values.items():
            self._holds[self._of[value]].discard(value)
            self._bind(value, variable)

    def held(self, variable: str) -> Collection[str]:
        """The values that a variable holds."""
        return self._holds.get(variable, frozenset())

    def holder(self, value: str) -> str | None:
        """The variable that still holds a value."""
        variable = self._of.get(value)
        return variable if variable and value in self._holds[variable] else None

    def free(self, variable: str, position: int) -> bool:
        """Whether nothing that a variable holds is read after a position."""
        return all(self._last_use.get(old, -1) <= position for old in self._holds[variable])

    def _reused(self, value: str, wish: str, position: int) -> str | None:
        """A variable of that name, or of it with a number, that holds nothing of use any more."""
        for variable in self._like.get(wish, ()):
            if all(self._dead(value, old, position) for old in self._holds[variable]):
                return variable
        return None

    def _bind(self, value: str, variable: str) -> str:
        self._holds.setdefault(variable, set()).add(value)
        self._of[value] = variable
        self._watched[variable] = None
        return variable

    def _dead(self, value: str, old: str, position: int) -> bool:
        return self._last_use.get(old, -1) <= position and self._kind(old) == self._kind(value)
