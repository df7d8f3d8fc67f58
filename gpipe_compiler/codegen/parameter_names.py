"""The user's names for what methods and constructors are given."""

from __future__ import annotations

import ast
import builtins
import inspect
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from gpipe_compiler.codegen.names import identifier
from gpipe_compiler.codegen.sources import method_at, parameters_of, place_at
from gpipe_compiler.ir import Graph, Op, ValueKind
from gpipe_compiler.ir.blocks import BlockCall
from gpipe_compiler.ir.contents import class_of_torch, is_under
from gpipe_compiler.ir.ops import Bound, SeenName


def parameter_names(graph: Graph, call: BlockCall) -> dict[str, str]:
    """The user's names for values that a call of a block is given, where they can be told.

    They come in the order of the user's parameters.
    """
    found = _named(graph, call) or _of_torch(graph, call)
    method = _method_of(graph, call)
    order = parameters_of(method) if method is not None else []

    def rank(own: str) -> int:
        """The place of its parameter; that of `x_0` is the place of the list `x`."""
        if own in order:
            return order.index(own)
        lists = (place for place, other in enumerate(order) if own.startswith(f"{other}_"))
        return next(lists, len(order))

    return dict(sorted(found.items(), key=lambda item: rank(item[1])))


def _of_torch(graph: Graph, call: BlockCall) -> dict[str, str]:
    """What a module of torch, of which the user has written nothing, calls the one it is given."""
    own = class_of_torch(graph, call.path)
    given = [value for value in call.inputs if _is_tensor(graph, value)]
    if own is None or len(given) != 1 or _is_made_in(graph, given[0], call.path):
        return {}
    _, *parameters = inspect.signature(own.forward).parameters
    return {given[0]: parameters[0]} if parameters and not hasattr(builtins, parameters[0]) else {}


def _is_made_in(graph: Graph, value: str, path: str) -> bool:
    maker = graph.producer.get(value)
    return maker is not None and is_under(f"{maker.module}.", path)


def _named(graph: Graph, call: BlockCall) -> dict[str, str]:
    """The names of what is given to a user's function or `forward`, as its calls were seen.

    What is taken out of a list `x` is called as functions inside call it, or `x_0` and `x_1`.
    """
    given = {value for value in call.inputs if _is_tensor(graph, value)}
    seen = [*_seen(call.ops, given)]
    scope = _scope(call)
    own = [(value, name) for value, name in seen if name.scope == scope]
    whole = [(value, name) for value, name in own if not name.path]
    names: dict[str, str] = {}
    _take(names, ((v, n.name) for v, n in whole if n.bound is Bound.PARAMETER))
    _take(names, _stated(whole))
    outside = (pair for pair in whole if not _is_made_in(graph, pair[0], call.path))
    _take(names, ((v, n.name) for v, n in outside if n.bound is Bound.PERHAPS))
    inner = {
        value: name.name
        for value, name in reversed(seen)
        if _is_within(name.scope, scope) and name.bound is Bound.PARAMETER and not name.path
    }
    items = {value: name for value, name in own if name.path and value not in names}
    alike = Counter([*names.values(), *(inner.get(value, "") for value in items)])
    if all(alike[inner.get(value, "")] == 1 and value in inner for value in items):
        _take(names, ((value, inner[value]) for value in items))
    _take(names, ((value, _with_path(name)) for value, name in items.items()))
    return names


def loss_names(ops: Sequence[Op], values: Sequence[str]) -> dict[str, str]:
    """What the user's loss function calls what it is given; nothing where the model has its own.

    Where one function calls another, the outer one's names are taken.
    """
    lines = (line for op in ops if op.source for line in (op.source, *op.source.callers))
    if any(line.function == "forward" for line in lines):
        return {}
    seen = [*_seen(ops, values)][::-1]
    names: dict[str, str] = {}
    _take(names, _stated([pair for pair in seen if not pair[1].path]))
    _take(names, ((value, name.name) for value, name in seen if not name.path))
    by_key = [pair for pair in seen if pair[1].path and isinstance(pair[1].path[0], str)]
    _take(names, ((value, identifier("_".join(map(str, name.path)))) for value, name in by_key))
    _take(names, ((value, _with_path(name)) for value, name in seen))
    return names


def _with_path(name: SeenName) -> str:
    """`x_0` for the first of a list `x`."""
    return identifier("_".join((name.name, *map(str, name.path))))


def _seen(ops: Iterable[Op], values: Collection[str]) -> Iterator[tuple[str, SeenName]]:
    """What the user's functions call some values, where ops read these."""
    for op in ops:
        for name in op.seen:
            if name.place < len(op.inputs) and op.inputs[name.place] in values:
                yield op.inputs[name.place], name


def _stated(seen: Sequence[tuple[str, SeenName]]) -> Iterator[tuple[str, str]]:
    """Names that statements give, each to one of the values: not that of a loop over a list."""
    values: dict[tuple[int | str, str], set[str]] = {}
    for value, name in seen:
        values.setdefault((name.scope, name.name), set()).add(value)
    for value, name in seen:
        if name.bound is Bound.STATEMENT and len(values[name.scope, name.name]) == 1:
            yield value, name.name


def _take(names: dict[str, str], pairs: Iterable[tuple[str, str]]) -> None:
    """Adds names of values that have none, each once."""
    for value, own in pairs:
        if value not in names and own not in names.values():
            names[value] = own


def _scope(call: BlockCall) -> int | str:
    """The function that a call is of, as in `SeenName`; where a module's `forward` is not the
    user's, the first that it calls."""
    name, is_function, _ = call.path.rpartition(".")[2].partition("()")
    if is_function:
        return name
    own = call.path.count(".") + 1
    scopes: dict[int | str, None] = {}
    for op in call.ops:
        around, _, inner = op.module.rpartition(".")
        if op.module == call.path or (around == call.path and "()" in inner):
            scopes.update(dict.fromkeys(seen.scope for seen in op.seen))
    return own if own in scopes else next((of for of in scopes if isinstance(of, str)), own)


def _is_within(scope: int | str, outer: int | str) -> bool:
    """Whether a function is one that another calls; both are told as in `SeenName`."""
    return scope != outer and (isinstance(scope, str) or (isinstance(outer, int) and scope > outer))


def _method_of(graph: Graph, call: BlockCall) -> ast.FunctionDef | None:
    """The user's `forward` of a module, or function, that makes a call's ops."""
    own = [part.source for part in call.parts if isinstance(part, Op) and part.source is not None]
    outer = min(filter(place_at, own), key=lambda source: len(source.callers), default=None)
    if outer is not None:
        place = place_at(outer)
        return None if place is None else place.method
    files = (op.source.file for op in call.ops if op.source is not None)
    return method_at(files, graph.module_classes.get(call.path, ""), "forward")


def _is_tensor(graph: Graph, value: str) -> bool:
    known = graph.values.get(value)
    return known is not None and known.kind is ValueKind.TENSOR
