"""The user's names for what calls are given: for the parameters of methods, and for numbers."""

from __future__ import annotations

import ast

from gpipe_compiler.codegen.sources import Place, method_at, parameters_of, place_at
from gpipe_compiler.ir import Graph, MethodCall, ModuleCall, Op, Ref, RegionCall, ValueKind
from gpipe_compiler.ir.arguments import leaves
from gpipe_compiler.ir.blocks import BlockCall
from gpipe_compiler.ir.ops import called


def _aligned(op: Op) -> list[tuple[object, ast.expr]]:
    """The leaves of a call's arguments that are arguments themselves, and how the user has them."""
    place, made = place_at(op.source), op.call
    if place is None or isinstance(made, RegionCall):
        return []
    own = made.module.rpartition(".")[2] if isinstance(made, ModuleCall) else called(made)
    operator = _OPERATORS.get(own)
    found: list[tuple[ast.expr, ...]] = []
    for node in ast.walk(place.statement):
        match node:
            case ast.BinOp(left=left, right=right) if operator and isinstance(node.op, operator):
                found.append((left, right))
            case ast.Call(func=ast.Attribute(value=value, attr=attr), args=args) if attr == own:
                receiver = (value,) if isinstance(made, MethodCall) else ()
                found.append((*receiver, *args))
    if len(found) != 1 or any(isinstance(item, ast.Starred) for item in found[0]):
        return []
    return [*zip(made.args, found[0], strict=False)]


_OPERATORS = {
    "add": ast.Add, "sub": ast.Sub, "mul": ast.Mult, "truediv": ast.Div, "matmul": ast.MatMult,
    "div": ast.Div,
}  # fmt: skip


def number_name(op: Op, number: int) -> str:
    """The user's name for a constant of an op; "" where it has none.

    Args:
        number: its place among the leaves of the arguments.
    """
    place = 0
    for argument, written in _aligned(op):
        if place == number and not isinstance(argument, list | tuple | dict | slice):
            return getattr(written, "id", "") or getattr(written, "attr", "")
        place += len([*leaves(argument)])
    return ""


def parameter_names(graph: Graph, call: BlockCall) -> dict[str, str]:
    """The user's names for values that a call of a block is given, where they can be told.

    They come in the order of the user's parameters.
    """
    return _named(graph, call)[0]


def _named(graph: Graph, call: BlockCall) -> tuple[dict[str, str], ast.FunctionDef | None]:
    given = {value for value in call.inputs if _is_tensor(graph, value)}
    found: dict[str, str] = {}
    places: dict[int, tuple[Place, set[str]]] = {}
    meant: list[tuple[str, set[str]]] = []
    for part in call.parts:
        place = place_at(part.source) if isinstance(part, Op) else None
        if place is None or isinstance(part, BlockCall):
            continue
        written = {
            argument.name: node.id
            for argument, node in _aligned(part)
            if isinstance(argument, Ref) and isinstance(node, ast.Name) and argument.name in given
        }
        read = places.setdefault(id(place.statement), (place, set()))[1]
        read.update(given.intersection(part.inputs).difference(written))
        meant.extend((value, place.meant(own)) for value, own in written.items())
    for value, names in sorted(meant, key=lambda item: len(item[1])):
        _match(names - {*found.values()}, {value}, found)
    for place, values in places.values():
        _match(place.read, values, found)
    method = _method_of(graph, call)
    if method is None:
        return found, None
    for part in call.parts:
        if isinstance(part, BlockCall):
            _match_passed(graph, method, call, part, found)
    order = parameters_of(method)
    ranks = {own: rank for rank, own in enumerate(order)}
    return dict(sorted(found.items(), key=lambda item: ranks.get(item[1], len(order)))), method


def _method_of(graph: Graph, call: BlockCall) -> ast.FunctionDef | None:
    """The user's `forward` of a module, or function, that makes a call's ops."""
    own = [part.source for part in call.parts if isinstance(part, Op) and part.source is not None]
    outer = min(filter(place_at, own), key=lambda source: len(source.callers), default=None)
    if outer is not None:
        place = place_at(outer)
        return None if place is None else place.method
    files = (op.source.file for op in call.ops if op.source is not None)
    return method_at(files, graph.module_classes.get(call.path, ""), "forward")


def _match_passed(
    graph: Graph, method: ast.FunctionDef, call: BlockCall, part: BlockCall, found: dict[str, str]
) -> None:
    """Adds the names of the parameters that a method passes to a module of its own, called once."""
    spelled = _spellings(part.path.removeprefix(call.path).removeprefix("."))
    nodes = [node for node in ast.walk(method) if isinstance(node, ast.Call)]
    calls = [node for node in nodes if ast.unparse(node.func) in spelled]
    if not calls and "()" in part.path:  # a function that the user has by another name
        sites = next((op.source.callers for op in part.ops if op.source), ())
        frames = map(place_at, sites)
        lines = [place.statement for place in frames if place and place.method is method]
        calls = [node for line in lines for node in ast.walk(line) if node in nodes]
    if len(calls) != 1:
        return
    (made,) = calls
    place = Place(method, ast.Expr(made, lineno=made.lineno))
    names, callee = _named(graph, part)
    order = [own for own in parameters_of(callee) if own != "self"] if callee is not None else []
    passed: dict[str, ast.expr] = dict(zip(order, made.args, strict=False))
    passed.update({item.arg: item.value for item in made.keywords if item.arg is not None})
    for value, own in names.items():
        written = passed.get(own)
        if isinstance(written, ast.Name) and _is_given(graph, call, value):
            _match(place.meant(written.id), {value}, found)
    own_names = (item.id for item in passed.values() if isinstance(item, ast.Name))
    unmatched = {own for own in own_names if place.holds(own, made)}
    unmatched -= {*found.values()}
    values = {v for v in part.inputs if _is_given(graph, call, v)}
    _match(unmatched, values, found)


def _is_given(graph: Graph, call: BlockCall, value: str) -> bool:
    return value in call.inputs and _is_tensor(graph, value)


def _spellings(path: str) -> set[str]:
    """How a method may call what stands at a path below its module: `self.layer[0]`, `rotate`."""
    words = path.split(".")
    if "()" in path:
        function = words[-1].partition("()")[0]
        return {function, f"self.{function}"}
    items = "".join(f"[{word}]" if word.isdecimal() else f".{word}" for word in words)
    return {f"self{items}", f"self.{path}"}


def _match(names: set[str], values: set[str], found: dict[str, str]) -> None:
    """Adds the name of a value, where one of each is left but for those that belong together."""
    names, values = names - {found.get(value) for value in values}, values - found.keys()
    if len(names) == len(values) == 1 and names.isdisjoint(found.values()):
        found[values.pop()] = names.pop()


def _is_tensor(graph: Graph, value: str) -> bool:
    known = graph.values.get(value)
    return known is not None and known.kind is ValueKind.TENSOR
