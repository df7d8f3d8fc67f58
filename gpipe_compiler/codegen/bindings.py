"""Binds the results of ops to variables: the user's names, those of free operands, or `_`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpipe_compiler.codegen.expressions import ExpressionWriter, OwnModule, runs_again
from gpipe_compiler.codegen.functions import AUGMENTED, BINARY, chains, changed_by
from gpipe_compiler.codegen.layout import Binding, Expression, name
from gpipe_compiler.codegen.loops import Loop, loop_begun
from gpipe_compiler.codegen.releases import DelWriter
from gpipe_compiler.codegen.sizes import users_name, usual_name
from gpipe_compiler.codegen.sources import UserStatement, alias_of, names_returned, statement_at
from gpipe_compiler.codegen.statements import shape_text
from gpipe_compiler.codegen.value_names import (
    StatementRun,
    argument_name,
    called_as,
    called_for,
    cast_by,
    is_operand,
    is_result,
    plain_name,
    reshaped_by,
    wishes,
)
from gpipe_compiler.codegen.variables import END, Uses, Variables
from gpipe_compiler.ir import (
    FunctionCall,
    Graph,
    Mode,
    ModuleCall,
    Op,
    Ref,
    Result,
    ValueKind,
)
from gpipe_compiler.ir.arguments import value_names
from gpipe_compiler.ir.contents import is_under
from gpipe_compiler.ir.left_out import may_leave_out
from gpipe_compiler.ir.ops import result_names
from gpipe_compiler.passes.value_splits import sized_by_values
from gpipe_compiler.runtime.sizes import Dim


@dataclass
class Bindings:
    """Binds the results of the ops of a method.

    Attributes:
        size_of: the number of samples (1) or the free size that a value is; else None.
        unnoted: the values whose sizes no comment states.
        told: names that values have elsewhere too.
        loop: the innermost one that is being written.
        shape: the one that was noted last.
        renamed: variables that what the next statement binds takes over, and the new names of what
            they held.
    """

    graph: Graph
    writer: ExpressionWriter
    variables: Variables
    uses: Uses
    dels: DelWriter
    size_of: Callable[[str], Dim | None]
    unnoted: Collection[str] = ()
    told: Mapping[str, str] = field(default_factory=dict)
    loop: Loop | None = None
    shape: str = ""
    renamed: list[tuple[str, str]] = field(default_factory=list)

    def of(
        self, op: Op, run: StatementRun, expression: Expression, position: int
    ) -> tuple[str, Expression, str]:
        """The statement of an op, whose variables are known from here on.

        What stands before the expression, `x, y = `, "" where nothing is bound; the expression; and
        the shape of what is bound, "" where it is that of the statement before.
        """
        read = [value for value in op.outputs if value in self.uses.count]
        run = run.ending(op.name) if chains(op.call) else run
        here = op.name in self.graph.op_of
        inner = here and any(is_operand(self.graph, op, value) for value in op.outputs)
        asked: Mapping[str, str | None] = dict(zip(op.outputs, wishes(op, run), strict=True))
        if inner or self._is_cut(op):
            asked = dict.fromkeys(op.outputs)
        elif not here and op.outputs:
            asked = self._sorted(asked, run.statement)
        for value in read:
            wish = self.told.get(value) or self.named(op, value, asked[value])
            wish = wish or self._changed(op, position)
            if wish is None:
                alone = run.statement if run.last == (op.name,) and not inner else None
                if not here and value in self.graph.producer:  # a block's value
                    wish = argument_name(self.graph, value)
                else:
                    outer = called_for(self.graph, op, value) if alone else ""
                    if here and not outer and self._is_read_by_caller(op.name, value):
                        outer = called_as(self.graph, self.graph.op_of[op.name], value)
                    wish = outer or plain_name(op, value, alone)
            wish = self._other_name(op, value, wish, position, expression)
            variable = self._variable(value, wish, position)
            self.writer.variables[value] = name(variable)
            self.dels.bound(variable)
        result, expression = self._read_alone(op.result, expression)
        target = f"{self._target(result)} = " if read else ""
        return target, expression, self._note(read[0]) if len(read) == 1 else ""

    def _is_read_by_caller(self, name: str, value: str) -> bool:
        """Whether the module that calls the one of an op reads what the op makes."""
        op = self.graph.op_of[name]  # the one at hand knows its place in its block alone
        around = op.module.rpartition(".")[0]
        readers = self.graph.consumers.get(value, ())
        own = not isinstance(op.call, ModuleCall)
        return own and any(reader.module == around for reader in readers)

    def _is_cut(self, op: Op) -> bool:
        """Whether an op is the call of a module of which another stage has the rest."""
        if op.name in self.graph.op_of:
            return False
        called = op.call.args[0] if runs_again(op.call) else op.call
        path = called.path if isinstance(called, OwnModule) else getattr(called, "module", "")
        return bool(path) and not all(self._leaves(value, path) for value in op.outputs)

    def _leaves(self, value: str, path: str) -> bool:
        """Whether a value is what a module returns, which may read it, too."""
        readers = self.graph.consumers.get(value, ())
        outside = any(not is_under(f"{reader.module}.", path) for reader in readers)
        return outside or is_result(self.graph, value, path)

    def _sorted(
        self, asked: Mapping[str, str | None], statement: UserStatement | None
    ) -> Mapping[str, str | None]:
        """The user's names for the results of a block, which makes them in an order of its own, and
        not those that nobody reads.

        Args:
            asked: their names if they were in the user's order.
        """
        own = {value: argument_name(self.graph, value) for value in asked}
        makers = (self.graph.producer.get(value) for value in asked)
        found = (names_returned(op.source) for op in makers if op)
        returned = next((names for names in found if len(names) > 1), ())
        targets = statement.targets if statement is not None else ()
        names = dict(zip(returned, targets, strict=False))
        if len(returned) > len(asked) and len(returned) == len(targets):
            return {value: names.get(own[value]) for value in asked}
        if len(returned) != len(asked) or len(asked) == 1:
            return asked if len(asked) == 1 else dict.fromkeys(asked)
        named = {name: value for value, name in own.items() if name in returned}
        others = (value for value in asked if value not in named.values())
        ordered = [named[name] if name in named else next(others) for name in returned]
        return dict(zip(ordered, asked.values(), strict=True))

    def _other_name(
        self, op: Op, value: str, wish: str, position: int, expression: Expression
    ) -> str:
        """A name in place of one that still holds something else.

        Where the user has a second name for what is held, and the statement does not read what
        that holds by now, it is given to it: `residual = x`.
        """
        if not self.variables.is_numbered(value, wish, position):
            return wish
        alias = alias_of(op.source, wish)
        movable = self.loop is None or self.loop.own.issuperset(self.variables.held(wish))
        movable = movable and op.mode is Mode.ALWAYS
        movable = movable and not re.search(rf"\b{alias}\b", expression.flat)
        if alias and movable and self.variables.rename(wish, alias, position):
            self.renamed.append((wish, alias))
            return wish
        if isinstance(op.call, ModuleCall):
            return plain_name(op, value)
        return (self._typed(wish, value) if cast_by(op.call) else None) or wish

    def nests(
        self, op: Op, position: int, ops: Sequence[Op], runs: Mapping[str, StatementRun]
    ) -> bool:
        """Whether the result of an op has no name, as its only reader spells what makes it.

        So it is where the user wrote it so, and for calls of blocks as `_is_part` has it.
        """
        value = op.result
        if not isinstance(value, str) or self.uses.count.get(value) != 1:
            return False
        reader = self.uses.reader.get(value)
        if self.uses.is_condition(op, self.uses.count, self.uses.reader):
            return True
        if reader is None or value in self.uses.chosen or reader.mode is not op.mode:
            return False
        layer = may_leave_out(reader.call)  # which is called, again or not, where it is not
        if reader.regions != op.regions or loop_begun(reader):
            return False
        if runs_again(op.call) and not layer:
            return False
        if value in self.dels.releases.asked or self.dels.ending(position):
            return False
        if changed_by(reader.call) == value:
            goes_on = isinstance(reader.result, str) and reader.result in self.uses.count
            if not chains(reader.call) or not goes_on:
                return False
        if isinstance(op.call, ModuleCall) and op.name not in self.graph.op_of:
            if isinstance(reader.call, ModuleCall) and reader.call.module == op.call.module:
                return False  # one module, two times
            part = reader is ops[position + 1] and self._is_part(value, reader, position)
            if part and not self._outlived(op, position, value):
                return True
        if layer:
            return reader.call.args[1] == Ref(value) and not self._outlived(op, position, value)
        run = runs[op.name]
        decides = self.uses.is_condition(reader, self.uses.count, self.uses.reader)
        spelled = (run.nested and runs[reader.name] is run) or (decides and run.statement is None)
        if spelled or not self._ends(value, position, ops):
            return spelled
        return not self._outlived(op, position, value)

    def _ends(self, value: str, position: int, ops: Sequence[Op]) -> bool:
        """Whether a value worth letting go of ends with ops that read one another in a row."""
        end = self.dels.releases.ends.get(value, END)
        made = [op.result for op in ops[position:end]]
        return end < len(ops) and all(
            isinstance(own, str) and self.uses.count.get(own) == 1 and self.uses.last[own] == place
            for place, own in enumerate(made, position + 1)
        )

    def _outlived(self, op: Op, position: int, value: str) -> bool:
        """Whether variables that an op is the last to read would have to be deleted.

        Args:
            value: what the op makes, which nests in its reader.
        """
        done, last = self.dels.releases.done, self.uses.last[value]
        held = (self.variables.holder(own) for own in op.inputs if done([own], last))
        return any(own and self.variables.free(own, position) for own in held)

    def _is_part(self, value: str, reader: Op, position: int) -> bool:
        """Whether what a block makes needs no name for the next op: `x + self.block(x)`."""
        made, wish = reader.call, argument_name(self.graph, value)
        adds = isinstance(made, FunctionCall) and made.function in (*BINARY, *AUGMENTED)
        return adds or self.variables.is_numbered(value, wish, position)

    def named(self, op: Op, value: str, wish: str | None) -> str | None:
        """The user's name for a value; `batch` or `length` for a size that the user gave none."""
        size = self.size_of(value)
        if size is None:
            return wish
        statement = statement_at(op.source)
        # Any other statement names what it makes of the size.
        names = statement is not None and statement.names_size
        own = users_name(self.graph, op, statement) if statement is not None and names else ""
        return own or usual_name(size)

    def _read_alone(self, result: Result, expression: Expression) -> tuple[Result, Expression]:
        """The part of a result that is bound: values to be freed at once get no variable."""
        if not isinstance(result, tuple) or len(result) == 1:
            return result, expression
        read = [index for index, item in enumerate(result) if self._is_read(item)]
        unread = [value for value in result_names(result) if value not in self.uses.count]
        if len(read) != 1 or not self.dels.releases.worth(unread):
            return result, expression
        end = f"[{read[0]}]"
        return result[read[0]], replace(
            expression, flat=expression.within(Binding.ATOM) + end, closing=expression.closing + end
        )

    def _is_read(self, result: Result) -> bool:
        return any(value in self.uses.count for value in result_names(result))

    def _changed(self, op: Op, position: int) -> str | None:
        """The name for a tensor in another type or shape: its own, if nothing reads it again.

        And for what a layer makes that may be left out: that of what it was given.
        """
        layer = may_leave_out(op.call)
        source = next(value_names(op.call.args[2])) if layer else cast_by(op.call)
        source = source or reshaped_by(op.call)
        if source is None:
            return None
        variable = self.writer.variables[source].flat
        if not variable.isidentifier() or not isinstance(op.result, str):
            return None
        if layer:
            return variable
        held = self.variables.holder(source) == variable
        if held and self.variables.free(variable, position):
            return variable
        return self._typed(variable, op.result) if cast_by(op.call) else None

    def _typed(self, name: str, value: str) -> str | None:
        """A name with a value's type behind it; None where that is not known."""
        known = self.graph.values.get(value)
        return None if known is None else f"{name}_{str(known.dtype).removeprefix('torch.')}"

    def _variable(self, value: str, wish: str, position: int) -> str:
        partner = self.uses.partner.get(value)
        if partner is not None and self.variables.holder(partner):
            shared = self.variables.alias(value, partner)
            assert shared is not None
            return shared
        if self.loop is not None and value in self.loop.after.difference(
            self.loop.carried.values()
        ):
            return self.variables.fresh(value, wish)  # what a round is given may take another back
        return self.variables.assign(value, wish, position)

    def _target(self, result: Result) -> str:
        """The left-hand side for a result; `_` where nothing reads a part of it."""
        if isinstance(result, tuple):
            parts = [
                f"({self._target(item)})" if isinstance(item, tuple) else self._target(item)
                for item in result
            ]
            return f"{parts[0]}," if len(parts) == 1 else ", ".join(parts)
        if result is None or result not in self.uses.count:
            return "_"
        return self.writer.variables[result].flat

    def _note(self, value: str) -> str:
        """The shape of a value, where it is not that of the statement before."""
        known = self.graph.values.get(value)
        if known is None or known.kind is not ValueKind.TENSOR or not known.shape:
            return ""
        unlike = self.loop is not None and value in self.loop.unlike
        if unlike or value in self.unnoted or value in sized_by_values(self.graph):
            self.shape = ""
            return ""
        text = shape_text(known, self.graph.batch_size)
        if text == self.shape:
            return ""
        self.shape = text
        return text


def returned(writer: ExpressionWriter, uses: Uses, makers: Mapping[str, Op], value: str) -> str:
    """What is returned for a value: in a mode that does not make it, nothing to look at.

    Args:
        makers: of the values that the method makes.
    """
    variable = writer.variables[value].flat
    mode = makers[value].mode if value in makers else Mode.ALWAYS
    pairs = ({train, evaluation} for evaluation, train in uses.partner.items())
    held = ({writer.variables[one].flat for one in pair} for pair in pairs if value in pair)
    shared = any(len(variables) == 1 for variables in held)
    if mode is Mode.ALWAYS or shared:
        return variable
    writer.imports.module("torch")
    condition = "self.training" if mode is Mode.TRAIN else "not self.training"
    return f"{variable} if {condition} else torch.empty(0)"
