"""Sizes that a method reads off its arguments, instead of asking whoever computes them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpipe_compiler.codegen.constants import write_constant, write_nest
from gpipe_compiler.codegen.expressions import ExpressionWriter
from gpipe_compiler.codegen.layout import Binding, Expression, name
from gpipe_compiler.codegen.sources import statement_at
from gpipe_compiler.codegen.statements import Statement
from gpipe_compiler.codegen.uses import Uses
from gpipe_compiler.codegen.variables import Variables
from gpipe_compiler.errors import EmitError
from gpipe_compiler.ir import Argument, Call, Graph, MethodCall, Op, Ref, Value
from gpipe_compiler.ir.arguments import BatchMultiple, leaves
from gpipe_compiler.passes.duplicate import StageDevice


def contains_batch(template: Argument) -> bool:
    """Whether a template changes with the batch size."""
    return any(isinstance(leaf, BatchMultiple) for leaf in leaves(template))


def tells_batch(value: Value) -> bool:
    """Whether the number of samples can be read off the value's shape."""
    return value.splittable and value.batch_dim is not None and value.shape[value.batch_dim] > 0


def write_template(
    template: Argument, graph: Graph, writer: ExpressionWriter, arguments: Sequence[str]
) -> Expression | None:
    """A template in terms of a method's arguments; None where none of them has a batch dimension.

    Args:
        arguments: the values to read from.
    """
    base = _base(graph, writer, arguments)
    if base is None and contains_batch(template):
        return None

    def leaf(item: object) -> Expression:
        match item:
            case BatchMultiple(factor=factor) if base is not None:
                return _multiple(*base, factor)
            case StageDevice():
                return name(writer.device)
            case _:
                return write_constant(item, writer.imports)

    return write_nest(template, leaf)


def _base(
    graph: Graph, writer: ExpressionWriter, arguments: Iterable[str]
) -> tuple[str, int] | None:
    """The size that tells the batch, and how many times the batch it is."""
    found = batch_argument(graph, arguments)
    if found is None:
        return None
    value = graph.values[found]
    assert value.batch_dim is not None
    text = f"{writer.variables[found].flat}.shape[{value.batch_dim}]"
    return text, value.shape[value.batch_dim] // graph.batch_size


def batch_argument(graph: Graph, arguments: Iterable[str]) -> str | None:
    """The argument of which a size tells the batch best: it is the fewest times the batch."""
    found: dict[str, int] = {}
    for argument in arguments:
        value = graph.values[argument]
        if value.batch_dim is None or not tells_batch(value):
            continue
        times, rest = divmod(value.shape[value.batch_dim], graph.batch_size)
        if times and not rest:
            found[argument] = times
    return min(found, key=found.__getitem__, default=None)


def _multiple(size: str, times: int, factor: int) -> Expression:
    if factor == times:
        return Expression(size)
    if factor % times == 0:
        return Expression(f"{size} * {factor // times}", Binding.PRODUCT)
    if times % factor == 0:
        return Expression(f"{size} // {times // factor}", Binding.PRODUCT)
    return Expression(f"{size} * {factor} // {times}", Binding.PRODUCT)


@dataclass(frozen=True, slots=True)
class ReadSize:
    """A value that the stage reads off the shapes of what it has, instead of asking its maker.

    Attributes:
        template: what it is; see `passes.duplicate.shape_values`.
    """

    value: str
    template: Argument
    op: Op


@dataclass(frozen=True, slots=True)
class FirstSizes:
    """The first sizes of an argument, the number of samples among them."""

    argument: str
    count: int


def with_sizes_of_arguments(
    graph: Graph,
    arguments: Iterable[str],
    multiples: Mapping[str, int],
    ops: Sequence[Op],
    returns: Iterable[str],
) -> tuple[list[Op], dict[str, FirstSizes]]:
    """The ops, views of which take their first sizes from arguments; by name, what they are.

    Args:
        multiples: of values that grow with the samples, how many times these they are.
        returns: values that are read after the ops.
    """
    known = [graph.values[value] for value in arguments if value in graph.values]
    tensors = [value for value in known if tells_batch(value) and value.batch_dim == 0]
    changed: list[Op] = []
    found: dict[str, FirstSizes] = {}
    for op in ops:
        made = op.call
        sizes = _sizes_asked(made)
        times = multiples.get(sizes[0].name, 0) if sizes else 0
        rows = graph.batch_size * times
        pairs = [(_common(rows, sizes, value.shape), value.name) for value in tensors if times]
        count, argument = max(pairs, key=lambda pair: pair[0], default=(0, ""))
        if count > 1 and isinstance(made, MethodCall):
            own = f"{argument}.shape[:{count}]"
            found[own] = FirstSizes(argument, count)
            made = dataclasses.replace(made, args=(made.args[0], Ref(own), *sizes[count:]))
        changed.append(dataclasses.replace(op, call=made))
    return _without_unread(changed, multiples.keys(), returns), found


def _without_unread(ops: Sequence[Op], sizes: Collection[str], returns: Iterable[str]) -> list[Op]:
    """The ops without those that only compute sizes which nothing reads."""
    needed = set(returns)
    kept: list[Op] = []
    for op in reversed(ops):
        if op.outputs and needed.isdisjoint(op.outputs) and all(v in sizes for v in op.outputs):
            continue
        kept.append(op)
        needed.update(op.inputs)
    return kept[::-1]


def _sizes_asked(made: Call) -> tuple[Argument, ...]:
    """The sizes of a view, where the first one is no constant."""
    match made:
        case MethodCall("view" | "reshape", (_, list(sizes) | tuple(sizes))):
            asked = tuple(sizes)
        case MethodCall("view" | "reshape", (_, *sizes)):
            asked = tuple(sizes)
        case _:
            return ()
    return asked if asked and isinstance(asked[0], Ref) else ()


def _common(rows: int, sizes: Sequence[Argument], shape: Sequence[int]) -> int:
    """How many of some sizes, the first of which is so large, are the first of a shape."""
    if not shape or shape[0] != rows:
        return 0
    pairs = zip(sizes[1:], shape[1:], strict=False)
    return 1 + len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])


@dataclass
class SizeReader:
    """Writes the statements with which a method begins, and what stands for sizes after them.

    Attributes:
        multiples: of values that grow with the samples, how many times these they are.
        ops: of the method.
    """

    graph: Graph
    writer: ExpressionWriter
    variables: Variables
    uses: Uses
    multiples: Mapping[str, int]
    ops: Sequence[Op]
    statements: list[Statement] = field(default_factory=list)

    def give(self, given: Sequence[ReadSize], arguments: Sequence[str]) -> None:
        """Reads batch sizes off the arguments; what they do not change is written as it is.

        Raises:
            EmitError: when no argument has a batch dimension.
        """
        found: dict[str, list[ReadSize]] = {}
        for item in given:
            expression = write_template(item.template, self.graph, self.writer, arguments)
            if expression is None:
                raise EmitError(
                    f"no tensor of the stage tells the batch size that {item.op.name} needs",
                    location=item.op.source,
                )
            self.writer.variables[item.value] = expression
            if contains_batch(item.template):
                found.setdefault(expression.flat, []).append(item)
        for items in found.values():
            values = [item.value for item in items if item.value in self.uses.count]
            base = batch_argument(self.graph, arguments)
            wish = self._size_name(items[0])
            if values and (wish or not self._stays(values, base)):
                usual = "batch" if self.multiples.get(values[0]) == 1 else "rows"
                variable = self.variables.assign(values[0], wish or usual, -1)
                self._begin(variable, self.writer.variables[values[0]])
                self.writer.variables.update((value, name(variable)) for value in values)

    def give_sizes(self, sizes: Mapping[str, FirstSizes]) -> None:
        """Reads the first sizes of arguments."""
        for value, first in sizes.items():
            tensor = self.writer.variables[first.argument].flat
            if first.count == len(self.graph.values[first.argument].shape):
                read = f"{tensor}.shape"
            else:
                read = f"{tensor}.shape[:{first.count}]"
            if not self._stays([value], first.argument):
                variable = self.variables.assign(value, "shape", -1)
                self._begin(variable, name(read))
                read = variable
            self.writer.variables[value] = name(f"*{read}")

    def _begin(self, variable: str, expression: Expression) -> None:
        self.statements.append(Statement(f"{variable} = ", expression))

    def _size_name(self, item: ReadSize) -> str:
        """The user's name for a size that a method reads off its arguments; "" for none."""
        statement = statement_at(item.op.source)
        if statement is not None and statement.names_size and len(statement.targets) == 1:
            return statement.targets[0]
        return "shape" if isinstance(item.template, tuple) else ""

    def _stays(self, sizes: Sequence[str], base: str | None) -> bool:
        """Whether what is read once can be read off an argument where it is."""
        if sum(self.uses.count[size] for size in sizes) != 1 or base is None:
            return False
        statements = (statement_at(op.source) for op in self.ops)
        bound = {target for item in statements if item is not None for target in item.targets}
        if self.writer.variables[base].flat in bound:
            return False
        last = max(self.uses.last[size] for size in sizes)
        self.uses.last[base] = max(self.uses.last.get(base, -1), last)
        return True
