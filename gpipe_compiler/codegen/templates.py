"""Numbers that follow from shapes, read off a tensor that the stage has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpipe_compiler.codegen.constants import write_constant, write_nest
from gpipe_compiler.codegen.expressions import Writer
from gpipe_compiler.codegen.layout import Binding, Expression, name
from gpipe_compiler.ir import Argument, Graph, Value
from gpipe_compiler.ir.arguments import leaves
from gpipe_compiler.passes.duplicate import BatchMultiple, StageDevice


def contains_batch(template: Argument) -> bool:
    """Whether a template changes with the batch size."""
    return any(isinstance(leaf, BatchMultiple) for leaf in leaves(template))


def tells_batch(value: Value) -> bool:
    """Whether the number of samples can be read off the value's shape."""
    return value.splittable and value.batch_dim is not None and value.shape[value.batch_dim] > 0


def write_template(
    template: Argument, graph: Graph, writer: Writer, arguments: Sequence[str]
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
                return name(f"{writer.anchor}.device")
            case _:
                return write_constant(item, writer.imports)

    return write_nest(template, leaf)


def _base(graph: Graph, writer: Writer, arguments: Iterable[str]) -> tuple[str, int] | None:
    """The size that tells the batch, and how many times the batch it is."""
    found: list[tuple[int, str]] = []
    for argument in arguments:
        value = graph.values[argument]
        if value.batch_dim is None or not tells_batch(value):
            continue
        times, rest = divmod(value.shape[value.batch_dim], graph.batch_size)
        if times and not rest:
            found.append((times, f"{writer.variables[argument].flat}.shape[{value.batch_dim}]"))
    if not found:
        return None
    times, text = min(found, key=lambda item: item[0])
    return text, times


def _multiple(size: str, times: int, factor: int) -> Expression:
    if factor == times:
        return Expression(size)
    if factor % times == 0:
        return Expression(f"{size} * {factor // times}", Binding.PRODUCT)
    return Expression(f"{size} * {factor} // {times}", Binding.PRODUCT)
