"""Writes the ops of one method as statements."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from gpipe_compiler.codegen.bindings import Bindings, returned
from gpipe_compiler.codegen.expressions import (
    ExpressionWriter,
    context_of,
    outer_argument,
    reads_in_order,
)
from gpipe_compiler.codegen.functions import AUGMENTED, SIGNS, is_in_place
from gpipe_compiler.codegen.layout import WIDTH, Binding, Expression, name
from gpipe_compiler.codegen.loop_lines import LoopLines
from gpipe_compiler.codegen.loops import loop_begun, loop_ended
from gpipe_compiler.codegen.method_text import MethodBody, is_tensor, value_kind, with_type
from gpipe_compiler.codegen.methods import Method, drop_dead
from gpipe_compiler.codegen.names import RESERVED, Identifiers
from gpipe_compiler.codegen.releases import DelWriter, Releases
from gpipe_compiler.codegen.sizes import SizeReader, with_sizes_of_arguments
from gpipe_compiler.codegen.statements import Statement
from gpipe_compiler.codegen.uses import Uses, is_attribute, with_callers
from gpipe_compiler.codegen.value_names import argument_name, find_runs, name_of_result, plain_name
from gpipe_compiler.codegen.variables import Variables
from gpipe_compiler.errors import EmitError, SourceLocation
from gpipe_compiler.frontend.own_statements import UnwritableError
from gpipe_compiler.ir import (
    Call,
    FunctionCall,
    Graph,
    MethodCall,
    Mode,
    ModuleCall,
    Op,
    Ref,
    RegionCall,
    StateRef,
    ValueKind,
)
from gpipe_compiler.ir.arguments import value_names
from gpipe_compiler.ir.forms import states_read
from gpipe_compiler.runtime.sizes import Dim

_LONGEST_NESTED = WIDTH - 16
"""Columns that nested calls may fill; longer ones are written one by one."""

_LONGEST_SUM = WIDTH - 24
"""The same where the user has a name for what nests: it is to fit on a line."""


def write_body(
    graph: Graph,
    method: Method,
    writer: ExpressionWriter,
    worth: Collection[int] = (),
    unlike: Mapping[str, int] = MappingProxyType({}),
    *,
    direct: bool = False,
    reserved: Iterable[str] = (),
) -> MethodBody:
    """The statements of a method.

    Args:
        direct: whether what is returned needs no name.
        worth: the storages that are worth letting go of before the method ends.
        unlike: values whose sizes differ from call to call; how many of the first ones do not.
        reserved: names that no variable takes.

    Raises:
        EmitError: naming the user's line, for an op that has no spelling.
    """
    written = with_callers(method.ops)
    ops, sizes = with_sizes_of_arguments(
        graph, method.arguments, method.multiples, written, method.returns, unlike
    )
    functions = filter(str.isidentifier, writer.modules.values())
    names = Identifiers((*RESERVED, *reserved, *functions))
    releases = Releases.of(graph, ops, method, worth)
    uses = Uses.of(ops, method.returns, releases.asked)
    variables = Variables(
        names, uses.last, lambda v: ValueKind.OTHER if v in sizes else value_kind(graph, v)
    )
    arguments = tuple(_argument(graph, method, variables, v) for v in method.arguments)
    writer.variables.update(zip(method.arguments, map(name, arguments), strict=True))
    pairs = zip(method.arguments, arguments, strict=True)
    tensors = (own for value, own in pairs if is_tensor(graph, value))
    writer.anchor = next(tensors, "")
    reader = SizeReader(graph, writer, variables, uses, method.multiples, ops)
    reader.give(method.given, [value for value in method.arguments if value in graph.values])
    reader.give_sizes(sizes)
    writing = _BodyWriter(
        graph, writer, variables, names, uses, releases, method.size_of, unlike, method.names
    )
    writing.statements.extend(reader.statements)
    writing.write(ops)
    makers = {value: op for op in ops for value in op.outputs}
    returns = tuple(returned(writer, uses, makers, value) for value in method.returns)
    body = MethodBody(arguments, tuple(writing.statements), returns)
    if len(returns) > 1 or not all(is_tensor(graph, v) for v in method.returns):
        return body
    return with_type(body, tuple(writer.modules.values()), direct=direct)


def _argument(graph: Graph, method: Method, variables: Variables, value: str) -> str:
    """The variable of an argument: the user's name, else that of what makes it."""
    size = "batch" if method.size_of(value) == 1 else ""
    wish = method.names.get(value) or size or argument_name(graph, value)
    maker = graph.producer.get(value)
    if maker and isinstance(maker.call, ModuleCall) and variables.is_numbered(value, wish, -1):
        wish = name_of_result(graph, value, maker.call.module) or wish
    return variables.fresh(value, wish)


@dataclass(slots=True)
class _Pending:
    """An op whose expression waits for its one reader.

    Attributes:
        named: whether the user has a name for something that nests in it.
    """

    op: Op
    made: FunctionCall | MethodCall | ModuleCall
    position: int
    sources: tuple[SourceLocation | None, ...]
    named: bool


@dataclass
class _BodyWriter:
    """Writes the ops of one method, or of one region, in order.

    Ops that the user nested in one statement nest here too: an op with a single reader waits in
    `pending` until its reader comes, as long as the order in which ops run stays what it was.
    """

    graph: Graph
    writer: ExpressionWriter
    variables: Variables
    names: Identifiers
    uses: Uses
    releases: Releases
    size_of: Callable[[str], Dim | None] = lambda _: None
    unnoted: Collection[str] = ()
    told: Mapping[str, str] = field(default_factory=dict)
    statements: list[Statement] = field(default_factory=list)
    pending: list[_Pending] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dels = DelWriter(self.variables, self.releases, self.writer)
        self.bindings = Bindings(
            self.graph,
            self.writer,
            self.variables,
            self.uses,
            self.dels,
            self.size_of,
            self.unnoted,
            self.told,
        )
        self.loops = LoopLines(self.graph, self.writer, self.variables, self.names, self.bindings)

    def write(self, ops: Sequence[Op]) -> None:
        self.ops, self.runs = ops, find_runs(ops)
        self.dels.last = len(ops) - 1
        self.dels.modes = {value: op.mode for op in ops for value in op.outputs}
        for position, op in enumerate(ops):
            try:
                self._op(op, position)
            except UnwritableError as error:
                raise EmitError(
                    f"the op {op.name} cannot be written as source code: {error}",
                    location=op.source,
                    hint="use an operator of torch",
                ) from error
        self._flush()

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
        if isinstance(made, FunctionCall) and self._inlines(op, made):
            assert isinstance(op.result, str)
            self.writer.variables[op.result] = self.writer.call(made)
            return
        if self._statement(op, made):
            self.dels.after(op, position, self.statements)
            return
        assert not isinstance(made, RegionCall)
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
            self.pending.append(_Pending(op, made, position, (*sources, op.source), named))
            return
        self._flush()
        self._assign(op, expression, position, sources)

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
        """Writes a region or a write in place; False where the op is none of these."""
        if isinstance(made, RegionCall):
            self._flush()
            self._region(op, made)
        elif isinstance(made, FunctionCall) and made.function is operator.setitem:
            sources = self._take_only(op, made.args[2])
            target = self.writer.subscript(*made.args[:2])
            self._append(op, f"{target.flat} = ", self.writer.argument(made.args[2]), sources)
        else:
            return self._in_place(op, made)
        return True

    def _inlines(self, op: Op, made: FunctionCall) -> bool:
        """Whether it is an attribute of a variable or a state, written where it is used."""
        known = isinstance(op.result, str) and op.result not in self.releases.asked
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
            self._assign(waiting.op, expression, waiting.position, waiting.sources[:-1])

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
        sign = _sign(made)
        if sign and (isinstance(made, FunctionCall) or variable.flat.isidentifier()):
            target = f"{variable.flat} {sign} "
            self._append(op, target, self.writer.argument(made.args[1]), sources)
        else:
            assert isinstance(made, MethodCall)
            self._append(op, "", self.writer.call(made), sources)
        if op.result is not None:
            if isinstance(changed, Ref):
                self.variables.alias(op.result, changed.name)
            self.writer.variables[op.result] = variable
        return True

    def _assign(
        self,
        op: Op,
        expression: Expression,
        position: int,
        sources: tuple[SourceLocation | None, ...],
    ) -> None:
        run = self.runs[op.name]
        target, expression, note = self.bindings.of(op, run, expression, position)
        for old, new in self.bindings.renamed:
            self.writer.rename(old, new, op.outputs)
            self._append(op, f"{new} = ", name(old))
        self.bindings.renamed.clear()
        self._append(op, target, expression, sources, note)
        self.dels.after(op, position, self.statements)

    def _append(
        self,
        op: Op,
        target: str,
        expression: Expression,
        sources: tuple[SourceLocation | None, ...] = (),
        note: str = "",
    ) -> None:
        self.dels.before(op, self.statements)
        self.statements.append(
            Statement(target, expression, op.mode, op.module, (*sources, op.source), note)
        )

    def _region(self, op: Op, made: RegionCall) -> None:
        """Writes a block under its context, its results straight into the op's variables."""
        block = made.body
        results = op.result if isinstance(op.result, tuple) else (op.result,) * len(block.outputs)
        bound = [self.writer.argument(argument) for argument in made.args]
        around = self.writer.variables
        given = {key: around[key] for key in map(outer_argument, states_read(op)) if key in around}
        within = {**given, **dict(zip(block.inputs, bound, strict=True))}
        inner = replace(self.writer, variables=within)
        ops = drop_dead(block.ops, value_names(block.outputs))
        uses = Uses.of(ops, tuple(value_names(block.outputs)))
        variables = Variables(self.names, uses.last, lambda _: None)
        writing = _BodyWriter(
            self.graph, inner, variables, self.names, uses, Releases({}, frozenset())
        )
        writing.write(ops)
        body = list(writing.statements)
        for target, argument in zip(results, block.outputs, strict=True):
            if not isinstance(target, str) or target not in self.uses.count:
                continue
            made_inside = isinstance(argument, Ref) and argument.name not in block.inputs
            expression = inner.argument(argument)
            if made_inside and expression.flat.isidentifier():
                self.writer.variables[target] = expression
                continue
            variable = self.variables.fresh(target, plain_name(op, target))
            self.writer.variables[target] = name(variable)
            body.append(Statement(f"{variable} = ", expression, Mode.ALWAYS, op.module))
        self.names.give_back(variables.named - {own.flat for own in around.values()})
        context = context_of(made.context, self.writer)
        self.statements.append(
            Statement("with ", context, op.mode, op.module, (op.source,), body=tuple(body))
        )


def _sign(made: Call) -> str:
    """The sign of an assignment that changes its target, `+=`; "" for methods without one."""
    match made:
        case FunctionCall(function=function):
            return AUGMENTED[function]
        case MethodCall(method=method, args=(Ref(), _)) if not made.kwargs:
            return SIGNS.get(method, "")
        case _:
            return ""
