"""Writes the ops of one method as statements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType

from gpipe_compiler.codegen.bindings import Bindings, returned
from gpipe_compiler.codegen.body_writer import BodyWriter
from gpipe_compiler.codegen.expressions import ExpressionWriter, grouped
from gpipe_compiler.codegen.layout import name
from gpipe_compiler.codegen.method_text import MethodBody, with_type, without_names
from gpipe_compiler.codegen.methods import Method, is_tensor, value_kind
from gpipe_compiler.codegen.names import RESERVED, Identifiers
from gpipe_compiler.codegen.releases import DelWriter, Releases
from gpipe_compiler.codegen.sizes import SizeReader, with_sizes_of_arguments
from gpipe_compiler.codegen.value_names import argument_name, name_of_result
from gpipe_compiler.codegen.variables import Uses, Variables, with_callers
from gpipe_compiler.ir import Graph, ModuleCall, ValueKind


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
        unlike: values whose sizes differ from call to call; how many of the first ones do not.

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
    uses = Uses.of(ops, method.returns, releases.asked, method.multiples)
    others = {*sizes, *uses.listed}
    variables = Variables(
        names, uses.last, lambda v: ValueKind.OTHER if v in others else value_kind(graph, v)
    )
    arguments = tuple(_arguments(graph, method, variables))
    writer.variables.update(zip(method.arguments, map(name, arguments), strict=True))
    pairs = zip(method.arguments, arguments, strict=True)
    tensors = (own for value, own in pairs if is_tensor(graph, value))
    writer.anchor = next(tensors, "")
    reader = SizeReader(graph, writer, variables, uses, method.multiples, ops)
    reader.give(method.given, [value for value in method.arguments if value in graph.values])
    reader.give_sizes(sizes)
    dels = DelWriter(variables, releases, writer)
    told = method.size_of, unlike, method.names
    bindings = Bindings(graph, writer, variables, uses, dels, *told)
    writing = BodyWriter(bindings, names, method.draws)
    writing.statements.extend(reader.statements)
    writing.write(ops)
    makers = {value: op for op in ops for value in op.outputs}
    returns = tuple(
        f"*{writer.lists[group]}"
        if group in writer.lists
        else returned(writer, uses, makers, group[0])
        for group in grouped(method.returns, writer.lists)
    )
    body = MethodBody(arguments, tuple(writing.statements), returns, writer.lists)
    if len(method.returns) > 1 and direct:
        return without_names(body)
    if len(method.returns) > 1 or not all(is_tensor(graph, v) for v in method.returns):
        return body
    return with_type(body, tuple(writer.modules.values()), direct=direct)


def _arguments(graph: Graph, method: Method, variables: Variables) -> Iterator[str]:
    """The variables of the arguments: the user's names, else those of what makes them; where
    several have one name, those that the stages before have for them."""
    wishes: list[str] = []
    for value in method.arguments:
        size = "batch" if method.size_of(value) == 1 else ""
        wishes.append(method.names.get(value) or size or argument_name(graph, value))
    counts = Counter(wishes)
    for value, own in zip(method.arguments, wishes, strict=True):
        before = method.before.get(value, own)
        wish = own if counts[own] == 1 or (counts[before] and before != own) else before
        maker = graph.producer.get(value)
        if maker and isinstance(maker.call, ModuleCall) and variables.is_numbered(value, wish, -1):
            wish = name_of_result(graph, value, maker.call.module) or wish
        yield variables.fresh(value, wish)
