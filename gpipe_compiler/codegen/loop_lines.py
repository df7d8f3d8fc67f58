"""The lines of loops: what stands before, around and at the end of their rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpipe_compiler.codegen.bindings import Bindings
from gpipe_compiler.codegen.expressions import ExpressionWriter
from gpipe_compiler.codegen.layout import Expression, call, consecutive, name
from gpipe_compiler.codegen.loops import Loop
from gpipe_compiler.codegen.names import Identifiers
from gpipe_compiler.codegen.statements import Statement, guarded
from gpipe_compiler.codegen.users_loops import names_in_loops
from gpipe_compiler.codegen.value_names import argument_name, list_name, name_of_one, plain_name
from gpipe_compiler.ir import FunctionCall, Mode, Op, Ref


@dataclass(frozen=True, slots=True)
class _OpenLoop:
    """A loop whose rounds are being written.

    Attributes:
        line: its first.
        statements: those before it.
        writer: as it is before it.
        given: the variables of what its rounds are given.
        lists: those of its lists.
    """

    loop: Loop
    line: Statement
    statements: list[Statement]
    writer: ExpressionWriter
    given: dict[str, str]
    lists: tuple[str, ...]


@dataclass
class LoopLines:
    """Writes the loops of a method; others write the ops of their rounds in between."""

    names: Identifiers
    bindings: Bindings
    open: list[_OpenLoop] = field(default_factory=list)

    def __post_init__(self) -> None:
        bindings = self.bindings
        self.graph, self.writer = bindings.graph, bindings.writer
        self.variables = bindings.variables

    def begin(
        self, op: Op, loop: Loop, position: int, statements: list[Statement]
    ) -> list[Statement]:
        """Writes what stands before a loop; returns the statements of its rounds, none yet."""
        assert isinstance(op.call, FunctionCall)
        given: dict[str, str] = {}
        initial = [value.name for value in op.call.args if isinstance(value, Ref)]
        for result, before in zip(op.outputs, initial, strict=True):
            wish = argument_name(self.graph, loop.carried[result])
            if self._has_other_name(before, loop.carried[result], wish) or not self._takes_over(
                result, before, position
            ):
                target = f"{self.variables.fresh(result, wish)} = "
                self._append(op, target, self.writer.variables[before], statements)
                self.writer.variables[result] = name(self.variables.holder(result) or wish)
            given[result] = self.writer.variables[result].flat
        lists = tuple(self._list(op, loop, values, statements) for values in loop.gathered)
        dels = self.bindings.dels
        dels.before(op, statements)
        dels.after(op, position, statements)
        self._keep_device(given, self.bindings.uses.until(position + 1))
        line, places = self._line(op, loop)
        self.open.append(_OpenLoop(loop, line, statements, replace(self.writer), given, lists))
        names = {loop.carried[value]: own for value, own in given.items()}
        self.bindings.told = {**self.bindings.told, **names}
        self.bindings.loop = loop
        self.writer.move(places)
        return []

    def _keep_device(self, given: Mapping[str, str], end: int) -> None:
        """Reads the device off a tensor that every round has: rounds may bind what holds nothing
        of use any more to something else, and delete that."""
        anchor, modes = self.writer.anchor, self.bindings.dels.modes
        if anchor in given.values() or not self.variables.held(anchor):
            return
        if not self.variables.free(anchor, end):
            return
        for variable, held in self.variables.tensors():
            carried = variable in given.values()
            always = all(modes.get(value, Mode.ALWAYS) is Mode.ALWAYS for value in held)
            if always and (carried or not self.variables.free(variable, end)):
                self.writer.follow(variable)
                return

    def _list(self, op: Op, loop: Loop, values: Sequence[str], statements: list[Statement]) -> str:
        """Writes an empty list for values of the rounds; returns its variable."""
        alone = [value for value in values if value not in loop.own]
        variable = self.variables.listed(alone, list_name(self.graph, values[-1]))
        self._append(op, f"{variable}: list[Tensor] = ", name("[]"), statements)
        return variable

    def _line(self, op: Op, loop: Loop) -> tuple[Statement, dict[str, str]]:
        """The first line of a loop, and the expressions in it for the modules that it runs over."""
        around = {path: self.writer.modules[path] for path in loop.lists}
        words = {path: path.rpartition(".")[2] for path in loop.lists}
        users, counted = names_in_loops(loop.source, [*words.values()])
        if loop.numbers is None and loop.lists and loop.whole:
            wanted = [
                self._free(users.get(own)) or name_of_one(path) for path, own in words.items()
            ]
            ones = [self.names.take(own) for own in wanted]
            each = [name(f"{place}.values()") for place in around.values()]
            expression = call("zip", [*each, name("strict=True")]) if len(each) > 1 else each[0]
        elif loop.numbers is None and not loop.lists:
            ones, expression = ["_"], name(f"range({loop.count})")
        else:
            index = self.names.take(self._free(counted) or "index")
            self.writer.counters[op.name] = index
            keys = loop.keys or [str(number) for number in loop.numbers or ()]
            expression = name(consecutive(keys) or f"({', '.join(keys)})")
            if loop.numbers is not None and loop.numbers.step != 1:
                expression = name(str(loop.numbers))
            ones = [f"{place}[str({index})]" for place in around.values()] or [index]
        last = (f"{path}.{loop.keys[-1]}".removeprefix(".") for path in around)
        places = dict(zip(last, ones, strict=False))
        target = self.writer.counters.get(op.name) or ", ".join(ones)
        return Statement(f"for {target} in ", expression, op.mode, op.module), places

    def _free(self, wish: str | None) -> str | None:
        """The user's name in a loop; None where it stands for something else here."""
        return wish if wish not in self.names else None

    def end(
        self, op: Op, loop: Loop, position: int, statements: list[Statement]
    ) -> list[Statement]:
        """Writes a loop, its rounds ending with what the next one is given; returns the statements
        up to it.
        """
        opened = self.open.pop()
        made = {loop.carried[value]: own for value, own in opened.given.items()}
        changed = {
            own: self.writer.variables[value]
            for value, own in made.items()
            if self.writer.variables[value].flat != own
        }
        if changed:
            values = ", ".join(expression.flat for expression in changed.values())
            self._append(op, f"{', '.join(changed)} = ", name(values), statements)
        self.variables.hold(made)
        dels = self.bindings.dels
        dels.before(op, statements)
        statement = replace(opened.line, body=tuple(guarded(statements, op.mode)))
        self.writer.modules, self.writer.states = opened.writer.modules, opened.writer.states
        self.bindings.loop = self.open[-1].loop if self.open else None
        self.writer.variables.update((value, name(own)) for value, own in made.items())
        self.writer.lists.update(zip(loop.gathered, opened.lists, strict=True))
        opened.statements.append(statement)
        dels.after(op, position, opened.statements)
        return opened.statements

    def _append(
        self, op: Op, target: str, expression: Expression, statements: list[Statement]
    ) -> None:
        self.bindings.dels.before(op, statements)
        statements.append(Statement(target, expression, op.mode, op.module, (op.source,)))

    def _has_other_name(self, value: str, carried: str, wish: str) -> bool:
        """Whether a value is an input of the model, in place of which the user's rounds make what
        has another name."""
        given = value not in self.graph.producer and value != wish
        return given and wish != plain_name(self.graph.producer[carried], carried)

    def _takes_over(self, result: str, value: str, position: int) -> bool:
        """Whether the variable of a value that nobody else reads becomes that of a result."""
        variable = self.variables.holder(value)
        if variable is None or self.writer.variables[value].flat != variable:
            return False
        if not self.variables.free(variable, position):
            return False
        self.variables.alias(result, value)
        self.writer.variables[result] = name(variable)
        return True
