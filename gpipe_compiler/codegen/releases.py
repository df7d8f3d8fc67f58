"""When a method can let go of its values.

A local variable holds its tensor to the end of the method, unless it is bound anew or deleted. For
what the stage has no room to hold so long (`peaks`), the body binds names anew where it can, writes
ops that would nest as statements of their own where a variable would outlive its use in them, and
deletes the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpipe_compiler.codegen.expressions import ExpressionWriter
from gpipe_compiler.codegen.layout import WIDTH, name
from gpipe_compiler.codegen.methods import Method
from gpipe_compiler.codegen.statements import Statement
from gpipe_compiler.codegen.uses import is_attribute
from gpipe_compiler.codegen.variables import END, Variables
from gpipe_compiler.ir import Graph, Mode, Op


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
        cls, graph: Graph, ops: Sequence[Op], method: Method, worth: Collection[int]
    ) -> Releases:
        """Those of a method; who calls it holds its arguments to the end."""
        last: dict[str, int] = {}
        for position, op in enumerate(ops):
            last.update(dict.fromkeys((*op.outputs, *op.inputs), position))
        last.update(dict.fromkeys((*method.returns, *method.arguments), END))
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


_DELETE = "del "
_LONGEST = WIDTH - 12
"""Characters of a statement, which may stand inside of others."""


@dataclass
class DelWriter:
    """Deletes the variables of a method that hold what nobody reads any more.

    Attributes:
        modes: of the ops that make the values; arguments are there in both.
        last: the position of the last op, after which all variables die.
        idle: variables to be deleted as soon as a statement is one of both modes.
    """

    variables: Variables
    releases: Releases
    writer: ExpressionWriter
    modes: Mapping[str, Mode] = field(default_factory=dict)
    last: int = END
    idle: list[str] = field(default_factory=list)

    def ending(self, position: int) -> list[str]:
        """The variables that nobody reads from here on and whose memory is worth letting go of."""
        found = []
        for variable, held in tuple(self.variables.dead(position)):
            if self.releases.done(held, position):
                found.append(variable)
            elif not self.releases.worth(held):
                self.variables.forget(variable)
        return found

    def before(self, op: Op, statements: list[Statement]) -> None:
        """Deletes before the statement of an op what has waited for one of both modes."""
        if self.idle and op.mode is Mode.ALWAYS:
            _delete(self.idle, op, Mode.ALWAYS, statements)
            self.idle.clear()

    def bound(self, variable: str) -> None:
        """A variable has just been bound anew."""
        if variable in self.idle:
            self.idle.remove(variable)

    def after(self, op: Op, position: int, statements: list[Statement]) -> None:
        """Deletes after the statement of an op what has ended with it."""
        for variable in self.ending(position) if position < self.last else ():
            if variable == self.writer.anchor and not self._other_anchor():
                self.variables.forget(variable)
                continue
            made = {
                self.modes.get(value, Mode.ALWAYS) for value in self.variables.release(variable)
            }
            if made == {op.mode} or (len(made) == 1 and op.mode is Mode.ALWAYS):
                _delete((variable,), op, made.pop(), statements)
            else:
                self.idle.append(variable)

    def _other_anchor(self) -> bool:
        """Lets the device be read off another tensor, if one is there in both modes."""
        for variable, held in self.variables.tensors():
            modes = {self.modes.get(value, Mode.ALWAYS) for value in held}
            if variable != self.writer.anchor and modes == {Mode.ALWAYS}:
                self.writer.follow(variable)
                return True
        return False


def _delete(variables: Sequence[str], op: Op, mode: Mode, statements: list[Statement]) -> None:
    """Adds `del a, b`, or the variables to such a statement that stands there and has room."""
    listed = ", ".join(variables)
    before = statements[-1]
    longer = f"{before.expression.flat}, {listed}"
    if longer.startswith(_DELETE) and before.mode is mode and len(longer) <= _LONGEST:
        statements.pop()
    else:
        longer = _DELETE + listed
    statements.append(Statement("", name(longer), mode, op.module))
