"""The user's names for what methods and constructors are given."""

from __future__ import annotations

import ast
import builtins
import inspect
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpipe_compiler.codegen.construction import WrittenBlock
from gpipe_compiler.codegen.names import Identifiers, identifier
from gpipe_compiler.codegen.sources import method_at, parameters_of, place_at
from gpipe_compiler.ir import Graph, MethodCall, ModuleCall, Op, RegionCall, ValueKind
from gpipe_compiler.ir.arguments import leaves
from gpipe_compiler.ir.blocks import BlockCall, BlockClass, Parameter
from gpipe_compiler.ir.contents import class_of_torch, is_under
from gpipe_compiler.ir.forms import ConstantSlot
from gpipe_compiler.ir.ops import Bound, SeenName, called


def _aligned(op: Op) -> list[tuple[object, ast.expr]]:
    """The leaves of a call's arguments that are arguments themselves, and how the user has them."""
    place, made = place_at(op.source), op.call
    if place is None or isinstance(made, RegionCall):
        return []
    own = made.module.rpartition(".")[2] if isinstance(made, ModuleCall) else called(made)
    operator = _OPERATORS.get(own)
    found: list[tuple[ast.expr, ...]] = []
    for node in ast.walk(place.node):
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


_CONTAINERS = ("Sequential", "ModuleList")


@dataclass(frozen=True)
class InnerBlocks:
    """The blocks that a block may call, all of which are written.

    Attributes:
        of_path: by the paths of their modules.
        written: as they are written, by their ids.
    """

    of_path: Mapping[str, BlockClass]
    written: Mapping[int, WrittenBlock]

    def slots(self, slots: Iterable[ConstantSlot]) -> Iterator[ConstantSlot]:
        """Where a number stands, within blocks too that are written where they are called."""
        for slot in slots:
            block = self.of_path.get(slot.owner)
            if block is None or not isinstance(slot.key, int) or not self.written[id(block)].inline:
                yield slot
                continue
            for inner in block.parameters[slot.key].slots:
                path = slot.owner + inner.owner.removeprefix(block.first.path)
                yield from self.slots([ConstantSlot(path, inner.key)])

    def names(self, slots: Iterable[ConstantSlot]) -> Iterator[tuple[str, str]]:
        """What inner blocks call a number that they are given, by their paths."""
        for slot in slots:
            block = self.of_path.get(slot.owner)
            if block is not None and isinstance(slot.key, int):
                number, written = block.parameters[slot.key], self.written[id(block)].parameters
                yield slot.owner, next(own for own, item in written.items() if item is number)


def constructor_names(
    graph: Graph, block: BlockClass, inside: InnerBlocks, names: Identifiers
) -> dict[str, Parameter]:
    """The numbers that a block is constructed with, by what they are called.

    Args:
        names: gives out the names, each once.
    """
    found: dict[str, Parameter] = {}
    for item in block.parameters:
        slots = [*inside.slots(item.slots)]
        known = _number_names(graph, block.first, slots, dict(inside.names(slots)))
        wanted = [own for own in (*known, item.name) if own]
        found[names.take(next((own for own in wanted if own not in names), wanted[0]))] = item
    return found


def _number_names(
    graph: Graph, call: BlockCall, slots: Sequence[ConstantSlot], inner: Mapping[str, str]
) -> Iterator[str]:
    """What a number of a block may be called, the best first; "" where one is not known.

    The user's names come first, and then what the number is to torch's modules: `out_features`.

    Args:
        slots: where the number stands in a call of the block.
        inner: what blocks in it call the number, by their paths.
    """
    ops = ((graph.op_of[slot.owner], slot.key) for slot in slots if slot.owner in graph.op_of)
    yield from (number_name(op, int(key)) for op, key in ops)
    arguments = [slot for slot in slots if isinstance(slot.key, str)]
    sizes = [slot for slot in slots if slot.owner in graph.state]
    made = _constructor(graph, call.path, call)
    if made is not None:
        found = Counter(
            own
            for slot in (*arguments, *sizes)
            for value in _values(made, slot.owner.removeprefix(f"{call.path}."))
            for own in _names(_written(graph, slot, value))
        )
        yield max(found, key=lambda own: found[own], default="")
        yield from (_passed(graph, call, made, path, own) for path, own in inner.items())
    yield from (str(slot.key) for slot in arguments)
    yield from inner.values()


def _passed(graph: Graph, call: BlockCall, made: ast.FunctionDef, inner: str, own: str) -> str:
    """The user's name in a block for what the block at a path in it calls `own`; "" for none."""
    below = _constructor(graph, inner, call)
    order = parameters_of(below)[1:] if below is not None else []
    values = _values(made, inner.removeprefix(f"{call.path}.")) if own in order else []
    found = (_argument(value, order.index(own), own) for value in values)
    return next(_names(found), "")


def _constructor(graph: Graph, path: str, call: BlockCall) -> ast.FunctionDef | None:
    files = (op.source.file for op in call.ops if op.source is not None)
    return method_at(files, graph.module_classes.get(path, ""), "__init__")


def _values(made: ast.FunctionDef, path: str) -> list[ast.expr]:
    """What a constructor sets an attribute to, or an item of one, wherever it does so."""
    first, *rest = path.split(".")
    found = [value for own, value in _attributes(made) if own == first]
    for word in rest:
        found = [item for value in found for item in _item(value, word)]
    return found


def _attributes(made: ast.FunctionDef) -> Iterator[tuple[str, ast.expr]]:
    """The attributes of `self` that a constructor sets, and what to."""
    for node in ast.walk(made):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                pairs = [*zip(targets, values, strict=False)]
            case ast.Assign(targets=[target], value=value):
                pairs = [(target, value)]
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                pairs = [(target, value)]
            case ast.Call(
                func=ast.Attribute(attr="register_buffer" | "register_parameter" | "add_module"),
                args=[ast.Constant(value=str(own)), value, *_],
            ):
                yield own, value
                continue
            case _:
                continue
        for target, value in pairs:
            match target:
                case ast.Attribute(value=ast.Name(id="self"), attr=own):
                    yield own, value


def _item(value: ast.expr, word: str) -> list[ast.expr]:
    """An item of a container as its constructor is given it."""
    if not (isinstance(value, ast.Call) and _called(value) in _CONTAINERS and word.isdecimal()):
        return []
    match value.args:
        case [ast.List(elts=items) | ast.Tuple(elts=items)]:
            pass
        case [ast.ListComp(elt=item) | ast.GeneratorExp(elt=item)]:
            return [item]
        case items:
            pass
    plain = not any(isinstance(item, ast.Starred) for item in items)
    return [items[int(word)]] if plain and int(word) < len(items) else []


def _written(graph: Graph, slot: ConstantSlot, value: ast.expr) -> Iterator[ast.expr]:
    """What a number is written as, in the expression that makes a module or a tensor."""
    if isinstance(slot.key, int):
        dims = len(graph.state[slot.owner].shape)
        for node in ast.walk(value):
            match node:
                case ast.Call(args=[ast.Tuple(elts=sizes) | ast.List(elts=sizes)]):
                    pass
                case ast.Call(args=sizes):
                    pass
                case _:
                    continue
            if len(sizes) == dims:
                yield sizes[slot.key]
    elif isinstance(value, ast.Call):
        order = [*inspect.signature(graph.modules[slot.owner].cls).parameters]
        found = _argument(value, order.index(slot.key), slot.key)
        if found is not None:
            yield found


def _argument(value: ast.expr, place: int, own: str) -> ast.expr | None:
    if not isinstance(value, ast.Call):
        return None
    by_keyword = (item.value for item in value.keywords if item.arg == own)
    plain = not any(isinstance(item, ast.Starred) for item in value.args)
    return next(by_keyword, value.args[place] if plain and place < len(value.args) else None)


def _called(value: ast.Call) -> str:
    return getattr(value.func, "attr", "") or getattr(value.func, "id", "")


def _names(written: Iterable[ast.expr | None]) -> Iterator[str]:
    """`dim` for `dim`, `self.dim` and `config.dim`; letters alone say too little."""
    for node in written:
        own = getattr(node, "id", "") or getattr(node, "attr", "")
        if len(own) > 1:
            yield own
