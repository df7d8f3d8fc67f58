"""Names of values: those of the user's statements, else of the ops that make them."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from gpipe_compiler.codegen.functions import changed_by
from gpipe_compiler.codegen.sources import (
    UserStatement,
    alias_after,
    names_of_parts,
    names_returned,
    statement_at,
)
from gpipe_compiler.errors import SourceLocation
from gpipe_compiler.ir import (
    Call,
    FunctionCall,
    Graph,
    MethodCall,
    ModuleCall,
    Op,
    Ref,
    ValueKind,
)
from gpipe_compiler.ir.arguments import value_names
from gpipe_compiler.ir.contents import class_of_torch, is_under, prefixes
from gpipe_compiler.ir.left_out import may_leave_out
from gpipe_compiler.ir.ops import Bound

_NUMBER = re.compile(r"_\d+$")
_NUMBER_PART = re.compile(r"\d+")

_LISTS = (None, "ModuleList", "ModuleDict")
"""Classes of modules that are not called."""

_CASTS = frozenset({"to", "type_as", "float", "double", "half", "bfloat16", "int", "long"})
"""Methods of a tensor that make the same numbers in another type."""

_SHAPES = frozenset(
    {"contiguous", "expand", "flatten", "permute", "reshape", "squeeze", "transpose", "unsqueeze"}
)
"""Methods of a tensor that make the same numbers in another shape."""


@dataclass(frozen=True, slots=True)
class StatementRun:
    """Ops that one statement of the user makes in one module, in a row.

    Attributes:
        nested: whether the statement spells each of its ops, so that they may nest as there.
        last: the ops whose results no other of them reads, in order; those that make what such an
            op changes in place.
        ends: the same, without that.
    """

    statement: UserStatement | None
    nested: bool
    last: tuple[str, ...]
    ends: tuple[str, ...] = ()

    def ending(self, op: str) -> StatementRun:
        """The run, of which an op makes what it changes in place anew."""
        pairs = zip(self.last, self.ends, strict=False)
        return replace(self, last=tuple(op if op == end else own for own, end in pairs))


def find_runs(ops: Sequence[Op]) -> dict[str, StatementRun]:
    """The run of every op, by name."""
    runs: list[tuple[UserStatement | None, list[Op]]] = []
    current: dict[str, int] = {}
    for op in ops:
        statement = statement_at(op.source)
        index = current.get(op.module)
        if index is None or runs[index][0] != statement or (op.source and not statement):
            current[op.module] = len(runs)
            runs.append((statement, [op]))
        else:
            runs[index][1].append(op)
    table: dict[str, StatementRun] = {}
    place = {op.name: position for position, op in enumerate(ops)}
    for statement, members in (part for run in runs for part in _rounds(*run)):
        span = ops[place[members[0].name] : place[members[-1].name] + 1]
        read = {name for op in span for name in op.inputs}
        makers = {value: op.name for op in members for value in op.outputs}
        changed = {op.name: makers.get(changed_by(op.call) or "") for op in members}
        ends = tuple(op.name for op in members if not read.intersection(op.outputs))
        last = tuple(_before(changed, name) for name in ends)
        # Ops without any source are the compiler's own, a default loss: they nest as they come.
        unsourced = all(op.source is None for op in members)
        nested = len(members) <= statement.operations if statement else unsourced
        table.update(
            dict.fromkeys((op.name for op in members), StatementRun(statement, nested, last, ends))
        )
    return table


def _before(changed: Mapping[str, str | None], op: str) -> str:
    """The op that makes what an op changes in place, and others before it; else itself."""
    while before := changed.get(op):
        op = before
    return op


def _rounds(
    statement: UserStatement | None, members: list[Op]
) -> Iterator[tuple[UserStatement | None, list[Op]]]:
    """The ops of a statement by rounds of the loop that it stands in, where they are alike."""
    size = len(members)
    if statement is not None and statement.rebinds and size > statement.operations:
        kinds = [kind_of(op) for op in members]
        size = next(n for n in range(1, size + 1) if kinds == (kinds[:n] * size)[:size])
    for start in range(0, len(members), size):
        yield statement, members[start : start + size]


def kind_of(op: Op) -> object:
    """What an op calls, whichever layer it is in."""
    match op.call:
        case FunctionCall(function=function):
            return function
        case MethodCall(method=method):
            return method
        case ModuleCall(module=path):
            return _NUMBER_PART.sub("", path)


def wishes(op: Op, run: StatementRun) -> tuple[str | None, ...]:
    """The user's names for the values of an op, None where there is none."""
    nothing = (None,) * len(op.outputs)
    if run.statement is None or not op.outputs:
        return nothing
    targets = run.statement.targets
    match op.call:
        case MethodCall(method="size", args=(_, int(place))) if run.statement.names_size:
            return (run.statement.size_named(place) or None,)
    if len(op.outputs) > 1:
        parts = targets if len(targets) == len(op.outputs) else None
        return parts or names_of_parts(op.source, len(op.outputs)) or nothing
    chained = run.statement.rebinds and not run.nested
    if len(targets) == 1:
        if run.statement.listed:
            return nothing
        if not chained and run.last != (op.name,):
            return nothing
        if isinstance(op.call, ModuleCall) and op.source is not None and "()" not in op.module:
            return (_called_by_callers(op.source, run.statement),)
        return (targets[0],)
    if run.statement.listed and len(targets) == len(run.last) and op.name in run.last:
        return (targets[run.last.index(op.name)],)
    match op.call:
        case FunctionCall(function=operator.getitem, args=(_, int(index))):
            if op.name in run.last and 0 <= index < len(targets):
                return (targets[index],)
    return nothing


def plain_name(op: Op, value: str, statement: UserStatement | None = None) -> str:
    """The name of a value by what makes it: a module, a function of the user, or an op.

    Args:
        statement: the user's, where the value is all that it makes.
    """
    if len(op.outputs) > 1 or value == "loss":
        return value
    if statement is not None and statement.function and statement.function != "forward":
        return f"{statement.function.strip('_')}_out"
    if isinstance(op.call, ModuleCall):
        return name_of_module(op.call.module) or value
    if statement is not None and statement.function and name_of_module(op.module):
        return name_of_module(op.module)
    return _NUMBER.sub("", value)


def name_of_module(path: str) -> str:
    """`gate_proj_out` for what `layers.1.mlp.gate_proj` makes, `layers_1` for `layers.1`.

    That of `layers.1.0` is `layers_1_0`. What a call of the user's function makes,
    `layers.1.rotate()mul_1`, is `rotate_out`.
    """
    around, _, last = path.partition("()")[0].rpartition(".")
    if not last.isdecimal():
        return f"{last}_out" if last and not f"_{last}".endswith("_out") else last
    while (inner := around.rpartition("."))[2].isdecimal():
        around, last = inner[0], f"{inner[2]}_{last}"
    return f"{inner[2]}_{last}" if inner[2] else ""


def list_name(graph: Graph, value: str) -> str:
    """The user's name for the list to which a value is added, else one for several such values."""
    source, own = graph.producer[value].source, argument_name(graph, value)
    lines = () if source is None else (source, *(line for _, line in source.calls[::-1]))
    for statement in filter(None, map(statement_at, lines)):
        here = [*ast.walk(statement.node)]
        for node in ast.walk(statement.method):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id=kept), attr="append"), args=[item]
                ) if item in here or getattr(item, "id", "") == own:
                    return kept
                case ast.BinOp(
                    ast.Name(id=kept), ast.Add(), ast.Tuple([item]) | ast.List([item])
                ) if getattr(item, "id", "") == own:
                    return kept
    return f"all_{own}"


def name_of_one(path: str) -> str:
    """The name of one module of a list: `layer` for `model.layers`."""
    last = path.rpartition(".")[2]
    one = last.removesuffix("s")
    return one if one.isidentifier() and (len(one) > 1 or one == last) else "layer"


def name_of_result(graph: Graph, value: str, path: str) -> str:
    """The name of a value after the outermost module whose result it is: all read it outside."""
    called = (own for own in prefixes(path) if graph.module_classes.get(own) not in _LISTS)
    return name_of_module(next((own for own in called if is_result(graph, value, own)), path))


def names_apart(
    graph: Graph, stages: Iterable[tuple[Sequence[str], Sequence[str]]]
) -> dict[str, str]:
    """Names of values that the user calls alike: their other ones, or those of the modules that
    make them.

    Args:
        stages: the values that each is given and that it returns.
    """
    found: dict[str, str] = {}
    for given, returned in stages:
        alike: dict[str, list[str]] = {}
        for value in dict.fromkeys((*given, *returned)):
            alike.setdefault(argument_name(graph, value), []).append(value)
        pairs = [
            (own, value)
            for own, values in alike.items()
            if values[1:] and not _is_changed(graph, own, values, given)
            for value in values
        ]
        for own, value in pairs:
            maker = graph.producer.get(value)
            other = alias_after(maker.source, own) if maker is not None else ""
            if not other and maker is not None:
                whole = maker.call.module if isinstance(maker.call, ModuleCall) else ""
                other = name_of_result(graph, value, whole or maker.module)
                if not whole and _NUMBER.search(other):
                    other = ""
            found[value] = other
    return {value: own for value, own in found.items() if own}


def _is_changed(graph: Graph, own: str, values: Sequence[str], given: Collection[str]) -> bool:
    """Whether the user gives a name to a value that a stage makes in place of one it is given."""
    made = [value for value in values if value not in given]
    names = [held_as(graph, graph.producer[value], value) for value in made]
    return len(values) == 2 and names == [own]


def cast_by(call: Call) -> str | None:
    """The value of which a call makes the same numbers in another type."""
    return _receiver(call, _CASTS)


def reshaped_by(call: Call) -> str | None:
    """The value of which a call makes the same numbers in another shape."""
    return _receiver(call, _SHAPES)


def _receiver(call: Call, methods: Collection[str]) -> str | None:
    match call:
        case MethodCall(method=method, args=(Ref(name=value), *_)) if method in methods:
            return value
        case _:
            return None


def is_operand(graph: Graph, op: Op, value: str) -> bool:
    """Whether the statement of the user that makes a value is not done with it."""
    statement, module = statement_at(op.source), graph.producer[value].module
    if statement is None:
        return False
    known = graph.values.get(value)
    if statement.rebinds and (known is None or known.kind is ValueKind.TENSOR):
        return False  # what it makes once may be read by it again
    # What is in a module of torch is told to be of the line that calls it.
    return any(
        (reader.module == module or is_under(reader.module, module))
        and statement_at(reader.source) == statement
        for reader in graph.consumers.get(value, ())
        if changed_by(reader.call) != value
    )


def called_for(graph: Graph, op: Op, value: str) -> str:
    """The user's name for what a function returns; "" where a value is no result of one."""
    callers = op.source.callers if op.source is not None else ()
    readers = [reader.source for reader in graph.consumers.get(value, ()) if reader.source]
    for depth, site in enumerate(callers, 1):
        if any(source.callers[:depth] == callers[:depth] for source in readers):
            continue
        statement = statement_at(site)
        done = all(statement_at(source) != statement for source in readers)
        return statement.targets[0] if statement and len(statement.targets) == 1 and done else ""
    return ""


def is_result(graph: Graph, value: str, path: str) -> bool:
    """Whether a value is what the module at a path makes: no op of it, in any stage, reads it."""
    readers = graph.consumers.get(value, ())
    return not any(f"{reader.module}.".startswith(f"{path}.") for reader in readers)


def _leaving(graph: Graph) -> Mapping[str, Collection[str]]:
    """The values that ops outside of a module read of it, by its path."""
    found: dict[str, set[str]] = {}
    for op in graph.ops:
        for value in op.outputs:
            readers = graph.consumers.get(value, ())
            for path in prefixes(op.module):
                if any(not f"{reader.module}.".startswith(f"{path}.") for reader in readers):
                    found.setdefault(path, set()).add(value)
    return found


def called_as(graph: Graph, op: Op, value: str) -> str:
    """The user's name for what a module returns; "" where a value is not all that one returns."""
    leaving = graph.once("values that leave modules", lambda: _leaving(graph))
    words = op.module.split(".")
    readers = graph.consumers.get(value, ())
    for count, line in op.source.calls if op.source is not None else ():
        path = ".".join(words[:count])
        statement = statement_at(line)
        if statement is None or not is_result(graph, value, path) or len(leaving.get(path, ())) > 1:
            continue
        around = {statement_at(source) for reader in readers if (source := reader.source)}
        around |= {statement_at(own) for r in readers if r.source for _, own in r.source.calls}
        alone = len(statement.targets) == 1 and not statement.listed
        again = statement.rebinds and statement.operations == 1  # `x = layer(x)` in a loop
        if not alone or (statement in around and not again):
            return ""
        return _called_by_callers(line, statement)
    return ""


def _called_by_callers(line: SourceLocation, statement: UserStatement) -> str:
    """The user's name for what a statement makes; where it stands in a function that returns just
    that, the one of its caller."""
    for caller in reversed(line.callers):
        outer = statement_at(caller)
        if outer is None or len(outer.targets) != 1 or outer.operations > 1:
            break
        if names_returned(line) != statement.targets:
            break
        line, statement = caller, outer
    return statement.targets[0]


def argument_name(graph: Graph, value: str) -> str:
    """The name for a value that a method is given."""
    op = graph.producer.get(value)
    while op is not None and may_leave_out(op.call):
        value = next(value_names(op.call.args[2]))  # one name, whether the layer runs or not
        op = graph.producer.get(value)
    if op is None:  # an input, or a state from outside
        return value.rpartition(".")[2] or value
    outer = called_as(graph, op, value) or called_for(graph, op, value)
    if outer:
        return outer
    cast = cast_by(op.call)
    if cast is not None and is_operand(graph, op, value):
        return argument_name(graph, cast)
    statement = statement_at(op.source)
    if statement is None or is_operand(graph, op, value):
        return held_as(graph, op, value) or plain_name(op, value)
    run = StatementRun(statement, False, (op.name,))
    wish = wishes(op, run)[op.outputs.index(value)] or held_as(graph, op, value)
    return wish or _name_of_chain(graph, op, value) or plain_name(op, value, statement)


def held_as(graph: Graph, op: Op, value: str) -> str:
    """What the outermost `forward` that goes on with a value calls it; "" where it has no name
    there, or several."""
    names: dict[int, set[str]] = {}
    for reader in graph.consumers.get(value, ()):
        for seen in reader.seen:
            own = seen.place < len(reader.inputs) and reader.inputs[seen.place] == value
            if not own or seen.path or not isinstance(seen.scope, int):
                continue
            around = reader.module.split(".")[: seen.scope]
            if seen.bound is not Bound.PARAMETER and is_under(f"{op.module}.", ".".join(around)):
                names.setdefault(seen.scope, set()).add(seen.name)
    found = names[min(names)] if names else set()
    return found.pop() if len(found) == 1 else ""


def _name_of_chain(graph: Graph, op: Op, value: str) -> str:
    """`to_logits_out` for what the last module of the nn.Sequential `to_logits` makes."""
    chain = op.call.module.rpartition(".")[0] if isinstance(op.call, ModuleCall) else ""
    known = class_of_torch(graph, chain) is nn.Sequential
    return name_of_module(chain) if known and is_result(graph, value, chain) else ""
