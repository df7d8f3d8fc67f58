"""Writes ops as statements, nested as the user nested them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpipe_compiler.codegen.bindings import Bindings
from gpipe_compiler.codegen.expressions import context_of, reads_in_order
from gpipe_compiler.codegen.functions import chains, changed_by, is_in_place, sign_of
from gpipe_compiler.codegen.layout import WIDTH, Binding, Expression, call, name
from gpipe_compiler.codegen.left_out import Ways, draws_within
from gpipe_compiler.codegen.loop_lines import LoopLines
from gpipe_compiler.codegen.loops import gather, loop_begun, loop_ended
from gpipe_compiler.codegen.methods import is_tensor
from gpipe_compiler.codegen.names import Identifiers
from gpipe_compiler.codegen.statements import Statement, in_blocks
from gpipe_compiler.codegen.value_names import find_runs
from gpipe_compiler.codegen.variables import is_attribute
from gpipe_compiler.errors import EmitError, SourceLocation
from gpipe_compiler.frontend.own_statements import UnwritableError
from gpipe_compiler.ir import (
    Call,
    FunctionCall,
    MethodCall,
    ModuleCall,
    Op,
    Ref,
    Region,
    StateRef,
)
from gpipe_compiler.ir.arguments import value_names
from gpipe_compiler.ir.left_out import may_leave_out
from gpipe_compiler.ir.ops import regions_kept

_LONGEST_NESTED = WIDTH - 16
"""Columns that nested calls may fill; longer ones are written one by one."""

_LONGEST_SUM = WIDTH - 24
"""The same where the user has a name for what nests: it is to fit on a line."""


@dataclass(slots=True)
class _Pending:
    """An op whose expression waits for its one reader.

    Attributes:
        named: whether the user has a name for something that nests in it.
        nested: the names of the ops that nest in it, and its own.
    """

    op: Op
    made: FunctionCall | MethodCall | ModuleCall
    position: int
    sources: tuple[SourceLocation | None, ...]
    named: bool
    nested: frozenset[str]


@dataclass
class BodyWriter:
    """Writes the ops of one method in order.

    Ops that the user nested in one statement nest here too: an op with a single reader waits in
    `pending` until its reader comes, as long as the order in which ops run stays what it was.
    """

    bindings: Bindings
    names: Identifiers
    draws: Mapping[str, int] | None = None
    statements: list[Statement] = field(default_factory=list)
    pending: list[_Pending] = field(default_factory=list)
    entered: tuple[tuple[Region, Statement], ...] = ()

    def __post_init__(self) -> None:
        bindings = self.bindings
        self.graph, self.writer, self.dels = bindings.graph, bindings.writer, bindings.dels
        self.variables, self.uses = bindings.variables, bindings.uses
        self.loops = LoopLines(self.names, bindings)

    def write(self, ops: Sequence[Op]) -> None:
        self.ops, self.runs = ops, find_runs(ops)
        self.dels.last = len(ops) - 1
        self.dels.modes = {value: op.mode for op in ops for value in op.outputs}
        for position, op in enumerate(ops):
            self._enter(op)
            try:
                self._op(op, position)
            except UnwritableError as error:
                raise EmitError(
                    f"the op {op.name} cannot be written as source code: {error}",
                    location=op.source,
                    hint="use an operator of torch",
                ) from error
            self._settle()
        self._flush()
        self._settle()
        self.statements = [*in_blocks(self.statements)]

    def _enter(self, op: Op) -> None:
        """Leaves the regions that an op does not run in, and enters those that it does."""
        kept = regions_kept((region for region, _ in self.entered), op.regions)
        if kept == len(self.entered) == len(op.regions):
            return
        self._flush()
        self._settle()
        lines = (
            (region, Statement("with ", context_of(region.context, self.writer), module=op.module))
            for region in op.regions[kept:]
        )
        self.entered = (*self.entered[:kept], *lines)

    def _settle(self) -> None:
        """Puts the newest statements into the regions that are entered."""
        around = tuple(line for _, line in self.entered)
        for place in reversed(range(len(self.statements))):
            if self.statements[place].around is not None:
                break
            self.statements[place] = replace(self.statements[place], around=around)

    def _op(self, op: Op, position: int) -> None:
        made = op.call
        if loop := loop_begun(op):
            self._flush()
            self.statements = self.loops.begin(op, loop, position, self.statements)
            return
        if loop := loop_ended(op):
            self._flush()
            self.statements = self.loops.end(op, loop, position, self.statements)
            return
        drawn = {pending.op.result for pending in self.pending}.intersection(op.inputs)
        if not drawn and isinstance(made, FunctionCall) and self._inlines(op, made):
            assert isinstance(op.result, str)
            self.writer.variables[op.result] = self.writer.call(made)
            return
        if not self._chains(op, position) and self._statement(op, made):
            self.dels.after(op, position, self.statements)
            return
        if may_leave_out(made):
            self._layer(op, position)
            return
        taken = self._take(op)
        expression = self.writer.call(made)
        run = self.runs[op.name]
        named = any(pending.named or self.runs[pending.op.name] is not run for pending in taken)
        longest = _LONGEST_SUM if named else _LONGEST_NESTED
        while taken and not self._fits(expression, taken, made, longest):
            self._write_out([taken.pop(0)])
            expression, named = self.writer.call(made), named and bool(taken)
        sources = tuple(source for pending in taken for source in pending.sources)
        if self.bindings.nests(op, position, self.ops, self.runs):
            assert isinstance(op.result, str)
            self.writer.variables[op.result] = expression
            nested = frozenset({op.name}.union(*(pending.nested for pending in taken)))
            self.pending.append(_Pending(op, made, position, (*sources, op.source), named, nested))
            return
        self._flush()
        self._finish(op, expression, position, sources)

    def _chains(self, op: Op, position: int) -> bool:
        """Whether what is written in place stands in a statement: `self.gate(x).sigmoid_() * y`."""
        changed = changed_by(op.call) if chains(op.call) else None
        if changed is None or not isinstance(op.result, str) or not is_tensor(self.graph, changed):
            return False
        if self.pending and self.pending[-1].op.result == changed:
            return True
        alone = self.uses.last[changed] == position
        return alone and self.bindings.nests(op, position, self.ops, self.runs)

    def _layer(self, op: Op, position: int) -> None:
        """Writes an op that may leave out its layer, which nests in it if it can."""
        decides = [*value_names(op.call.args[0])]
        waits = len(self.pending) > 1 and self.pending[-2].op.result in decides
        drawn = [self.pending.pop(-2)] if waits else []
        taken = self._take(op)
        value = op.call.args[1]
        layer = next((pending for pending in taken if Ref(str(pending.op.result)) == value), None)
        draws = layer and draws_within(op, self.ops, self.draws, layer.nested)
        if draws is None:
            self._write_out([*drawn, *taken])
        self._flush()
        ways = Ways.of(self.graph, self.writer, op, draws or 0)
        made = self.writer.argument(value)
        sources = tuple(source for pending in taken for source in pending.sources)
        if draws is None:
            self._assign(op, ways.chosen(made), position, ())
        else:
            self._assign(op, made, position, sources, ways.statements)

    def _fits(
        self, expression: Expression, taken: Sequence[_Pending], made: Call, longest: int
    ) -> bool:
        """Whether an expression with what nests in it can be read.

        It fits on a line, or is a sum or product that is broken in the call at its end, or what
        nests are items of one list, which has a line for each.
        """
        if len(expression.flat) <= longest:
            return True
        if expression.items and expression.binding in (Binding.SUM, Binding.PRODUCT):
            inside = ", ".join(item.flat for item in expression.items)
            return max(map(len, (expression.opening, inside))) <= longest
        items = [[*value_names(part)] for part in made.args if isinstance(part, list)]
        values = [pending.op.result for pending in taken]
        texts = (self.writer.variables[str(value)].flat for value in values)
        return values in items and len(values) > 1 and max(map(len, texts)) <= longest

    def _statement(self, op: Op, made: Call) -> bool:
        """Writes what adds to a list, or writes in place; False where the op does neither."""
        if isinstance(made, FunctionCall) and made.function is gather:
            sources = self._take_only(op, made.args[2])
            append = f"{self.loops.open[-1].lists[int(str(made.args[1]))]}.append"
            self._append(op, "", call(append, [self.writer.argument(made.args[2])]), sources)
        elif isinstance(made, FunctionCall) and made.function is operator.setitem:
            sources = self._take_only(op, made.args[2])
            target = self.writer.subscript(*made.args[:2])
            self._append(op, f"{target.flat} = ", self.writer.argument(made.args[2]), sources)
        else:
            return self._in_place(op, made)
        return True

    def _inlines(self, op: Op, made: FunctionCall) -> bool:
        """Whether it is written where it is used: an attribute, or what decides on a layer."""
        known = isinstance(op.result, str) and op.result not in self.dels.releases.asked
        if known and self.uses.is_condition(op, self.uses.count, self.uses.reader):
            return True
        if op.result in self.uses.spelled:
            return True
        if not known or not is_attribute(made):
            return False
        argument = made.args[0]
        if isinstance(argument, Ref):
            return self.writer.variables[argument.name].flat.isidentifier()
        return True

    def _take(self, op: Op) -> list[_Pending]:
        """Pending ops that nest into this one without changing the order in which ops run."""
        taken: list[_Pending] = []
        for value in reversed(list(reads_in_order(op.arguments))):
            if self.pending and value == self.pending[-1].op.result:
                taken.insert(0, self.pending.pop())
        if {pending.op.result for pending in self.pending}.intersection(op.inputs):
            # One waits below another that this op does not read: nothing nests.
            self._write_out(taken)
            return []
        return taken

    def _take_only(self, op: Op, argument: object) -> tuple[SourceLocation | None, ...]:
        """What nests into one argument of an op that writes in place, all else written before."""
        elsewhere = set(op.inputs) - set(value_names(argument))
        if elsewhere.intersection(pending.op.result for pending in self.pending):
            self._flush()
        taken = self._take(op)
        self._flush()
        if len(self.writer.argument(argument).flat) > _LONGEST_NESTED:
            self._write_out(taken)
            return ()
        return tuple(source for pending in taken for source in pending.sources)

    def _write_out(self, taken: list[_Pending]) -> None:
        """Writes ops as statements that were to nest, after all that wait before them."""
        self.pending.extend(taken)
        self._flush()

    def _flush(self) -> None:
        """Writes what is pending as statements of their own."""
        pending, self.pending = self.pending, []
        for waiting in pending:
            expression = self.writer.call(waiting.made)
            self._finish(waiting.op, expression, waiting.position, waiting.sources[:-1])

    def _in_place(self, op: Op, made: Call) -> bool:
        """Writes `x += y` or `x.add_(y)`; False where the op is no such thing."""
        if not is_in_place(made) or not isinstance(op.result, str | None):
            return False
        changed = made.args[0]
        if isinstance(changed, Ref) and not is_tensor(self.graph, changed.name):
            return False
        if not isinstance(changed, Ref | StateRef):
            return False
        sources = self._take_only(op, (made.args[1:], dict(made.kwargs)))
        variable = self.writer.argument(changed)
        sign = sign_of(made)
        if sign and (isinstance(made, FunctionCall) or variable.flat.isidentifier()):
            target = f"{variable.flat} {sign} "
            self._append(op, target, self.writer.argument(made.args[1]), sources)
        else:
            assert isinstance(made, MethodCall)
            self._append(op, "", self.writer.call(made), sources)
        self._alias(op, changed)
        return True

    def _alias(self, op: Op, changed: Ref | StateRef) -> None:
        """Lets what an op makes in place be what it has changed."""
        if op.result is None:
            return
        assert isinstance(op.result, str)
        if isinstance(changed, Ref):
            self.variables.alias(op.result, changed.name)
        self.writer.variables[op.result] = self.writer.argument(changed)

    def _finish(
        self,
        op: Op,
        expression: Expression,
        position: int,
        sources: tuple[SourceLocation | None, ...],
    ) -> None:
        """Writes an op with what nests in it; a variable that it changes keeps its name."""
        changed = changed_by(op.call)
        if changed is None or self.variables.holder(changed) is None:
            self._assign(op, expression, position, sources)
            return
        self._append(op, "", expression, sources)
        self._alias(op, Ref(changed))
        self.dels.after(op, position, self.statements)

    def _assign(
        self,
        op: Op,
        expression: Expression,
        position: int,
        sources: tuple[SourceLocation | None, ...],
        around: Callable[[Statement], tuple[Statement, ...]] = lambda statement: (statement,),
    ) -> None:
        run = self.runs[op.name]
        target, expression, note = self.bindings.of(op, run, expression, position)
        for old, new in self.bindings.renamed:
            self.writer.rename(old, new, op.outputs)
            self._append(op, f"{new} = ", name(old))
        self.bindings.renamed.clear()
        self.dels.before(op, self.statements)
        sources = (*sources, op.source)
        statement = Statement(target, expression, op.mode, op.module, sources, note)
        self.statements.extend(around(statement))
        self.dels.after(op, position, self.statements)

    def _append(
        self,
        op: Op,
        target: str,
        expression: Expression,
        sources: tuple[SourceLocation | None, ...] = (),
    ) -> None:
        self.dels.before(op, self.statements)
        self.statements.append(
            Statement(target, expression, op.mode, op.module, (*sources, op.source))
        )
