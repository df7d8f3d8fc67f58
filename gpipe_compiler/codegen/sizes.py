"""Sizes that a method reads from its arguments' shapes, instead of receiving them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpipe_compiler.codegen.constants import write_constant, write_nest
from gpipe_compiler.codegen.expressions import ExpressionWriter
from gpipe_compiler.codegen.layout import Binding, Expression, call, name
from gpipe_compiler.codegen.sources import UserStatement, place_at, size_name_in, statement_at
from gpipe_compiler.codegen.statements import Statement
from gpipe_compiler.codegen.variables import Uses, Variables, makes_only
from gpipe_compiler.errors import EmitError
from gpipe_compiler.ir import Argument, Call, Graph, MethodCall, Op, Ref
from gpipe_compiler.ir.arguments import BatchMultiple
from gpipe_compiler.ir.ops import without_unread
from gpipe_compiler.ir.sizes import BATCH, asked, is_free, is_told
from gpipe_compiler.passes.duplicate import StageDevice
from gpipe_compiler.runtime.sizes import Dim, Operation, Operator, Size
from gpipe_compiler.runtime.sizes import Expression as SizeExpression


def write_template(
    template: Argument, graph: Graph, writer: ExpressionWriter, arguments: Sequence[str]
) -> Expression | None:
    """A template in terms of a method's arguments; None where their shapes do not tell."""
    if not is_told(template, graph.told(arguments)):
        return None
    base = _base(graph, writer, arguments)
    sizes: dict[Dim, Expression] = {}
    if base is not None:
        sizes[BATCH] = _multiple(*base, 1)
    for argument in arguments:
        for place, dim in enumerate(graph.values[argument].dims):
            if is_free(dim):
                own = writer.variables[argument].flat
                sizes.setdefault(dim, Expression(f"{own}.shape[{place}]"))

    def leaf(item: object) -> Expression:
        match item:
            case BatchMultiple(factor=factor) if base is not None:
                return _multiple(*base, factor)
            case SizeExpression():
                return _computed(item, sizes)
            case StageDevice():
                return name(writer.device)
            case _:
                return write_constant(item, writer.imports)

    return write_nest(template, leaf)


def _base(
    graph: Graph, writer: ExpressionWriter, arguments: Iterable[str]
) -> tuple[str, int] | None:
    """The size that gives the batch, and how many times the batch it is."""
    found = batch_argument(graph, arguments)
    if found is None:
        return None
    value = graph.values[found]
    assert value.batch_dim is not None
    text = f"{writer.variables[found].flat}.shape[{value.batch_dim}]"
    return text, value.shape[value.batch_dim] // graph.batch_size


def batch_argument(graph: Graph, arguments: Iterable[str]) -> str | None:
    """The argument with the size that is the fewest times the batch."""
    found: dict[str, int] = {}
    for argument in arguments:
        value = graph.values[argument]
        if value.samples_dim is None:
            continue
        times, rest = divmod(value.shape[value.samples_dim], graph.batch_size)
        if times and not rest:
            found[argument] = times
    return min(found, key=found.__getitem__, default=None)


def _computed(dim: Dim, sizes: Mapping[Dim, Expression]) -> Expression:
    """A number that follows from sizes, in terms of how these are written."""
    if dim in sizes:
        return sizes[dim]
    if not isinstance(dim, Operation):
        return Expression(str(dim))
    left, right = _computed(dim.left, sizes), _computed(dim.right, sizes)
    if dim.applied in _CALLS:
        return call(_CALLS[dim.applied], [left, right])
    binding = Binding.SUM if dim.applied in _SUMS else Binding.PRODUCT
    sides = left.within(binding), right.within(Binding(binding + 1))
    return Expression(f" {dim.applied.value} ".join(sides), binding)


def _multiple(size: str, times: int, factor: int) -> Expression:
    if factor == times:
        return Expression(size)
    if factor % times == 0:
        return Expression(f"{size} * {factor // times}", Binding.PRODUCT)
    if times % factor == 0:
        return Expression(f"{size} // {times // factor}", Binding.PRODUCT)
    return Expression(f"{size} * {factor} // {times}", Binding.PRODUCT)


_CALLS: Mapping[Operator, str] = {Operator.SMALLER: "min", Operator.LARGER: "max"}
_SUMS = frozenset({Operator.ADD, Operator.SUBTRACT})


def usual_name(dim: Dim) -> str:
    """What a size is called where the user has no name for it."""
    if isinstance(dim, Size):
        return dim.name if dim.name.isidentifier() else "length"
    return "batch" if dim == 1 else "rows" if isinstance(dim, int) else "size"


def users_name(graph: Graph, op: Op, statement: UserStatement) -> str:
    """What the user's statement calls the size that an op asks a tensor for, or what follows from
    one; "" where it has no name for that."""
    match op.call:
        case MethodCall("size", (Ref(tensor), int(place))):
            return statement.size_named(place, len(graph.values[tensor].shape))
    return statement.targets[0] if statement.names_size and len(statement.targets) == 1 else ""


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
    multiples: Mapping[str, Dim],
    ops: Sequence[Op],
    returns: Iterable[str],
    alike: Mapping[str, int],
) -> tuple[tuple[Op, ...], dict[str, FirstSizes]]:
    """The ops, views of which take their first sizes from arguments; by name, what they are.

    Args:
        multiples: of values that grow with the samples, how many times these they are; of those
            that follow from other sizes, what they are.
        returns: values that are read after the ops.
        alike: of arguments whose sizes are not the same in all calls, how many of the first are;
            sizes that are not the same are among its keys.
    """
    same = {value: dim for value, dim in multiples.items() if value not in alike}
    known = [graph.values[value] for value in arguments if value in graph.values]
    tensors = [value for value in known if value.samples_dim == 0]
    changed: list[Op] = []
    found: dict[str, FirstSizes] = {}
    for op in ops:
        made = op.call
        sizes = _sizes_asked(made)
        times = same.get(sizes[0].name, 0) if sizes else 0
        rows = graph.batch_size * times if isinstance(times, int) else 0
        dims = [_free_size(size, same) for size in sizes]
        pairs = [
            (_common(rows, dims, value.dims[: alike.get(value.name)]), value.name)
            for value in tensors
            if rows
        ]
        count, argument = max(pairs, key=lambda pair: pair[0], default=(0, ""))
        if count > 1 and isinstance(made, MethodCall):
            own = f"{argument}.shape[:{count}]"
            found[own] = FirstSizes(argument, count)
            made = dataclasses.replace(made, args=(made.args[0], Ref(own), *sizes[count:]))
        changed.append(dataclasses.replace(op, call=made))
    return without_unread(changed, returns, lambda op: makes_only(op, multiples)), found


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


def _free_size(size: Argument, multiples: Mapping[str, Dim]) -> Argument:
    """What a size that a view asks for follows from, where that is from free sizes; else itself."""
    known = multiples.get(size.name) if isinstance(size, Ref) else None
    return known if is_free(known) else size


def _common(rows: int, sizes: Sequence[Argument], shape: Sequence[Dim]) -> int:
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
    """

    graph: Graph
    writer: ExpressionWriter
    variables: Variables
    uses: Uses
    multiples: Mapping[str, Dim]
    ops: Sequence[Op]
    statements: list[Statement] = field(default_factory=list)

    def give(self, given: Sequence[ReadSize], arguments: Sequence[str]) -> None:
        """Reads sizes off the arguments; what does not vary is written as it is.

        Raises:
            EmitError: when the arguments do not tell a size.
        """
        found: dict[str, list[ReadSize]] = {}
        for item in given:
            expression = write_template(item.template, self.graph, self.writer, arguments)
            if expression is None:
                raise EmitError(
                    f"no tensor of the stage tells the size that {item.op.name} needs",
                    location=item.op.source,
                )
            self.writer.variables[item.value] = expression
            if asked(item.template):
                found.setdefault(expression.flat, []).append(item)
        for items in found.values():
            values = [item.value for item in items if item.value in self.uses.count]
            wish = self._size_name(items[0], arguments)
            if values and (wish or not self._stays(values, self._base(items[0], arguments))):
                usual = usual_name(self.multiples.get(values[0], 0))
                variable = self.variables.assign(values[0], wish or usual, -1)
                self._begin(variable, self.writer.variables[values[0]])
                self.writer.variables.update((value, name(variable)) for value in values)

    def give_sizes(self, sizes: Mapping[str, FirstSizes]) -> None:
        """Reads the first sizes of arguments, those of each once."""
        longest: dict[str, tuple[int, str]] = {}
        for value, first in sorted(sizes.items(), key=lambda item: -item[1].count):
            argument = first.argument
            whole, read = longest.get(argument, (0, ""))
            if not read:
                whole = len(self.graph.values[argument].shape)
                read = f"{self.writer.variables[argument].flat}.shape"
            read += "" if first.count == whole else f"[:{first.count}]"
            if argument not in longest and not self._stays([value], argument):
                readers = (other for other, own in sizes.items() if own.argument == argument)
                self.uses.last[value] = max(map(self.uses.last.__getitem__, readers))
                variable = self.variables.assign(value, "shape", -1)
                self._begin(variable, name(read))
                read = variable
                longest[argument] = first.count, variable
            self.writer.variables[value] = name(f"*{read}")

    def _begin(self, variable: str, expression: Expression) -> None:
        self.statements.append(Statement(f"{variable} = ", expression))

    def _base(self, item: ReadSize, arguments: Sequence[str]) -> str | None:
        """The argument off which all that varies in a template can be read."""
        if not any(map(is_free, asked(item.template))):
            return batch_argument(self.graph, arguments)
        return next((a for a in arguments if is_told(item.template, self.graph.told([a]))), None)

    def _size_name(self, item: ReadSize, arguments: Sequence[str]) -> str:
        """The user's name for a size that a method reads off its arguments; "" for none.

        Where it stands for sizes of several tensors, it is that of the one it is read off.
        """
        read = self.writer.variables[item.value].flat
        places = ((at, place_at(at)) for at in (op.source for op in self.ops) if at is not None)
        methods = dict.fromkeys((near.method, at.file) for at, near in places if near is not None)
        for argument in arguments:
            rank, variable = len(self.graph.values[argument].dims), self.writer.variables[argument]
            asked_of = [p for p in range(rank) if read == f"{variable.flat}.shape[{p}]"]
            for place, (method, file) in itertools.product(asked_of, methods):
                told = size_name_in(method, file, variable.flat, place, rank)
                if told:
                    return told
        statement = statement_at(item.op.source)
        readers = filter(None, (statement_at(op.source) for op in self.ops))
        here = statement is not None and any(r.method is statement.method for r in readers)
        own = users_name(self.graph, item.op, statement) if statement is not None and here else ""
        return own or ("shape" if isinstance(item.template, tuple) else "")

    def _stays(self, sizes: Sequence[str], base: str | None) -> bool:
        """Whether what is read once can be read off an argument where it is."""
        if sum(self.uses.count[size] for size in sizes) != 1 or base is None:
            return False
        statements = (statement_at(op.source) for op in self.ops)
        bound = {target for item in statements if item is not None for target in item.targets}
        if self.writer.variables[base].flat in bound:
            return False
        last = self.uses.until(max(self.uses.last[size] for size in sizes))
        self.uses.last[base] = max(self.uses.last.get(base, -1), last)
        return True
