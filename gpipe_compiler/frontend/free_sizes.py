"""Which dimensions of the inputs stay free in a trace, and what the model demands of them."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from gpipe_compiler.errors import ModelError, Notice, SourceLocation, UsageError, at_code
from gpipe_compiler.frontend.noted_sizes import NotedSizes
from gpipe_compiler.frontend.signature import Signature
from gpipe_compiler.frontend.subject import Wish
from gpipe_compiler.ir import Graph, Input, MethodCall, Op, Ref
from gpipe_compiler.ir.ops import reading
from gpipe_compiler.ir.sizes import BATCH, SMALLEST
from gpipe_compiler.ir.symbolic import (
    InexpressibleError,
    dim_of,
    expression_of,
    is_symbolic,
    requirements,
)
from gpipe_compiler.runtime.sizes import Dim, Relation, Requirement, Size
from gpipe_compiler.runtime.wording import listed

Place: TypeAlias = tuple[str, int]
"""A dimension of an input of the graph: its name, and the number of the dimension."""

FreePlaces: TypeAlias = Mapping[Place, str]
"""Dimensions that are to stay free, with the names of their sizes; those of one name are equal."""


def wanted(wish: Wish, signature: Signature) -> FreePlaces:
    """The dimensions that are to be free.

    Raises:
        UsageError: for one that there is not, or that cannot be free.
    """
    able = {
        named(place): place
        for place in (
            (source.name, dim)
            for source, example in zip(signature.inputs, signature.examples, strict=True)
            for dim, size in enumerate(example.shape)
            if dim != source.batch_dim and size >= SMALLEST
        )
    }
    for option, names in (("--free", wish.must), ("--fix", wish.fixed)):
        for name in sorted(names - able.keys()):
            raise UsageError(
                f"{option} {name}: no input has such a dimension, which is not the batch and at "
                f"least {SMALLEST} in the example",
                hint=f"what can be free: {', '.join(able) or 'nothing'}",
            )
    every = {name: name for name in able if name not in wish.fixed} if wish.everything else {}
    called = {name: size for name, size in _called(wish, signature).items() if name in every}
    return {able[name]: size for name, size in {**every, **called, **wish.places}.items()}


def _called(wish: Wish, signature: Signature) -> dict[str, str]:
    """What `--input` calls the sizes of dimensions such as `input_ids.1`.

    Raises:
        UsageError: where the example is another.
    """
    examples, found = dict(signature.named()), dict[str, str]()
    sizes: dict[str, int] = {}
    for name, told in wish.names.items():
        example = examples.get(name, torch.empty(0))
        dtype = str(example.dtype).removeprefix("torch.")
        pairs = tuple(zip(told.words, example.shape, strict=False))
        wanted_sizes = [int(w) if w.isdigit() else sizes.setdefault(w, n) for w, n in pairs]
        same = name in examples and len(told.words) == example.dim()
        if not same or told.dtype not in (None, dtype) or wanted_sizes != list(example.shape):
            inputs = (f"{key} {tuple(item.shape)}" for key, item in examples.items())
            raise UsageError(
                f"--input {told.text}: the example has no such input",
                hint=f"sizes of one name are equal, and there are {', '.join(inputs)}",
            )
        found.update((named((name, d)), w) for d, w in enumerate(told.words) if not w.isdigit())
    return found


def named(place: Place) -> str:
    """`input_ids.1`."""
    return f"{place[0]}.{place[1]}"


@dataclass(frozen=True)
class FoundSizes:
    """What a trace left free.

    Attributes:
        inputs: of the graph, with a `Size` at every dimension that is free.
        places: these dimensions.
        requires: what the model demands of them.
    """

    inputs: tuple[Input, ...]
    places: FreePlaces
    requires: tuple[Requirement, ...]


def ties(signature: Signature, free: FreePlaces) -> list[list[tuple[int, int]]]:
    """Dimensions that are of one size: the batch, and those of one name, by numbers of inputs."""
    number = {source.name: index for index, source in enumerate(signature.inputs)}
    batch = [(i, s.batch_dim) for i, s in enumerate(signature.inputs) if s.batch_dim is not None]
    groups: dict[str, list[tuple[int, int]]] = {}
    for (name, dim), size in free.items():
        groups.setdefault(size, []).append((number[name], dim))
    return [batch, *groups.values()]


def read_sizes(
    signature: Signature,
    placeholders: Sequence[fx.Node],
    values: Iterable[Any],
    free: FreePlaces,
    where: Callable[[Any], str],
) -> FoundSizes:
    """What a trace left free of the dimensions that were to be.

    Those that it fixed, those of which it relied on what cannot be checked, and those from which
    the size of a tensor follows in a way that has no expression, are not: from then on the trace
    is one at the number that each of them is in the example.

    Args:
        values: of all nodes of the trace.
        where: the user's line behind a guard of torch's, in words.
    """
    shapes = {
        source.name: tuple(node.meta["val"].shape)
        for source, node in zip(signature.inputs, placeholders, strict=True)
    }
    environment = next(
        (n.node.shape_env for shape in shapes.values() for n in shape if is_symbolic(n)), None
    )
    computed = [
        size
        for value in values
        if isinstance(value, torch.Tensor)
        for size in value.shape
        if is_symbolic(size)
    ]
    places = free
    while environment is not None and places:
        _fix_others(environment, signature, shapes, places)
        symbols = _symbols(signature, shapes, places)
        batch = {symbol for symbol, size in symbols.items() if size is BATCH}
        inputs, places = _inputs(signature, shapes, symbols, places)
        try:
            found = tuple(dict.fromkeys(requirements(environment, symbols, where)))
            if _make_one(environment, symbols, found):
                continue
            for size in computed:
                if not symbols.keys().isdisjoint(expression_of(size).free_symbols - batch):
                    dim_of(size, symbols)
        except InexpressibleError as error:
            lost = {symbols[item] for item in error.symbols if item in symbols} - {BATCH}
            gone = {size.of for size in lost if isinstance(size, Size)}
            names = {places[place] for place in gone if place in places} or set(places.values())
            places = {place: name for place, name in places.items() if name not in names}
            continue
        return FoundSizes(inputs, places, found)
    if environment is not None:
        _fix_others(environment, signature, shapes, {})
    return FoundSizes(signature.inputs, {}, ())


def _make_one(
    environment: ShapeEnv, symbols: Mapping[Any, Dim], found: Iterable[Requirement]
) -> bool:
    """Has torch take two sizes for one where the model demands that they be equal, as after both
    were flattened with the batch; whether there were such."""
    of = {size: symbol for symbol, size in symbols.items()}
    for demand in found:
        if demand.relation is Relation.EQUAL and {demand.left, demand.right} <= of.keys() - {BATCH}:
            environment._set_replacement(of[demand.right], of[demand.left], "equal")
            return True
    return False


def _fix_others(
    environment: ShapeEnv,
    signature: Signature,
    shapes: Mapping[str, Sequence[Any]],
    places: FreePlaces,
) -> None:
    """Makes numbers of the sizes of dimensions that are neither the batch nor among these."""
    numbers: dict[Any, int] = {}
    fixed: set[Any] = set()
    for source, example in zip(signature.inputs, signature.examples, strict=True):
        for dim, size in enumerate(shapes[source.name]):
            if is_symbolic(size):
                expression = expression_of(size)
                if expression.is_Symbol:
                    numbers.setdefault(expression, example.shape[dim])
                if dim != source.batch_dim and (source.name, dim) not in places:
                    fixed.update(expression.free_symbols)
    for symbol in fixed & numbers.keys():
        environment._set_replacement(symbol, sympy.Integer(numbers[symbol]), "fixed")
    for guard in environment.guards if fixed else ():
        equation = environment.replace(guard.expr)
        if isinstance(equation, sympy.Eq) and len(equation.free_symbols) == 1:
            (symbol,) = equation.free_symbols
            difference = sympy.expand(equation.lhs - equation.rhs)
            if symbol in numbers and difference != 0 and difference.is_polynomial(symbol):
                environment._set_replacement(symbol, sympy.Integer(numbers[symbol]), "fixed")


def write_fixed(graph: fx.Graph) -> None:
    """Writes the numbers of a trace that follow from fixed sizes as what they are."""
    for node in reversed(graph.nodes):
        number = _number_of(node.meta.get("val"))
        if number is None or node.op == "placeholder":
            continue
        for user in list(node.users):
            if not isinstance(user.target, torch._ops.HigherOrderOperator):
                user.args = fx.node.map_arg(user.args, _written(node, number))
                user.kwargs = fx.node.map_arg(user.kwargs, _written(node, number))
        if not node.users:
            graph.erase_node(node)


def _written(node: fx.Node, number: complex) -> Callable[[fx.Node], Any]:
    return lambda read: number if read is node else read


def _number_of(value: object) -> float | None:
    """What is known of a number that torch computed with sizes; None where it varies."""
    if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return None
    expression = expression_of(value)
    if not (expression.is_number or expression.is_Boolean) or expression.free_symbols:
        return None
    match value:
        case torch.SymInt():
            return int(expression)
        case torch.SymFloat():
            return float(expression)
        case _:
            return bool(expression)


def asking_first(graph: Graph) -> Graph:
    """The graph, in which sizes that several inputs have are asked once, of the first of them.

    A trace asks any, be it the target, which inference has not.
    """
    size_of = {
        (source.name, dim): size
        for source in graph.inputs
        for dim, size in enumerate(source.shape or ())
        if isinstance(size, Size)
    }
    ops: list[Op] = []
    known: dict[tuple[str, int], str] = {}
    names: dict[str, str] = {}
    for op in (reading(op, names) for op in graph.ops):
        own = _place_asked(op)
        if own not in size_of:
            ops.append(op)
            continue
        first, place = of = size_of[own].of
        if of in known and op.outputs[0] not in graph.ends:
            names[op.outputs[0]] = known[of]
            continue
        known.setdefault(of, op.outputs[0])
        ops.append(dataclasses.replace(op, call=MethodCall("size", (Ref(first), place))))
    return graph.replace(ops=tuple(ops)) if size_of else graph


def _place_asked(op: Op) -> tuple[str, int] | None:
    """The value and the dimension that an op asks for its size."""
    match op:
        case Op(call=MethodCall("size", (Ref(name=name), int() as dim)), result=str()):
            return name, dim
        case _:
            return None


def refuse_fixed(must: Collection[str], found: FoundSizes, noted: NotedSizes) -> None:
    """Raises a ModelError where a dimension is not free that has to be, such as `input_ids.1`."""
    lost = sorted(set(must) - {named(place) for place in found.places})
    if lost:
        where = next(iter((*noted.fixed.values(), *noted.guards.values())), None)
        raise ModelError(
            f"the model works for one size of {', '.join(lost)} only{at_code(where)}",
            location=where,
            hint="take the size from the input (x.shape[1]) and leave -1 for it in view and "
            f"reshape; or leave out --free {lost[0]}",
        )


def say_fixed(problem: str, location: SourceLocation | None = None) -> None:
    """Tells the user that no size is free but those that have to be, and why."""
    where = "" if location is None else f" ({location.brief})"
    text = f"only the example's sizes are taken, the batch aside: at others, {problem}{where}"
    warnings.warn(Notice(text), stacklevel=2)


def say_fixing(lines: Mapping[Place, tuple[SourceLocation, str]]) -> None:
    """Tells the user which sizes are not free as a line of the model's fixes them, and how."""
    by_line: dict[str, list[str]] = {}
    for place, (line, how) in lines.items():
        by_line.setdefault(f"{line.brief} {how}", []).append(named(place))
    for why, names in by_line.items():
        taken = (
            "is taken at the example's size"
            if len(names) == 1
            else "are taken at the example's sizes"
        )
        warnings.warn(Notice(f"{listed(names)} {taken} only: {why}"), stacklevel=2)


def _symbols(
    signature: Signature, shapes: Mapping[str, Sequence[Any]], places: FreePlaces
) -> dict[Any, Dim]:
    """The sizes by their symbols: of the batch, and of dimensions that are free by themselves."""
    found: dict[Any, Dim] = {}
    for source in signature.inputs:
        if source.batch_dim is not None and is_symbolic(shapes[source.name][source.batch_dim]):
            found[expression_of(shapes[source.name][source.batch_dim])] = BATCH
    examples = dict(signature.named())
    for (name, dim), size in places.items():
        traced = shapes[name][dim]
        if is_symbolic(traced) and expression_of(traced).is_Symbol:
            example = examples[name].shape[dim]
            found.setdefault(expression_of(traced), Size(size, (name, dim), example))
    return found


def _inputs(
    signature: Signature,
    shapes: Mapping[str, Sequence[Any]],
    symbols: Mapping[Any, Dim],
    places: FreePlaces,
) -> tuple[tuple[Input, ...], FreePlaces]:
    """The inputs with sizes where they are free, and these places."""
    kept: dict[Place, str] = {}
    inputs: list[Input] = []
    for source in signature.inputs:
        shape: list[Dim] = list(source.shape or ())
        for dim in range(len(shape)):
            place = (source.name, dim)
            if place not in places or not is_symbolic(shapes[source.name][dim]):
                continue
            with contextlib.suppress(InexpressibleError):
                found = dim_of(shapes[source.name][dim], symbols)
                if isinstance(found, int) or BATCH not in found.sizes():
                    shape[dim], kept[place] = found, places[place]
        inputs.append(dataclasses.replace(source, shape=tuple(shape)))
    return tuple(inputs), kept
