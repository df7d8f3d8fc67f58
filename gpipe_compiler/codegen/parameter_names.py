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
from gpipe_compiler.codegen.sources import UserStatement, method_at, parameters_of, place_at
from gpipe_compiler.ir import Graph, MethodCall, ModuleCall, Op, Ref, RegionCall, ValueKind
from gpipe_compiler.ir.arguments import leaves
from gpipe_compiler.ir.blocks import BlockCall, BlockClass, Parameter
from gpipe_compiler.ir.contents import class_of_torch, is_under
from gpipe_compiler.ir.forms import ConstantSlot
from gpipe_compiler.ir.ops import called


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
    return _named(graph, call)[0] or _of_torch(graph, call)


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


def _named(graph: Graph, call: BlockCall) -> tuple[dict[str, str], ast.FunctionDef | None]:
    given = {value for value in call.inputs if _is_tensor(graph, value)}
    # The lines of what a module of torch runs are those that call it.
    of_torch = class_of_torch(graph, call.path) is not None
    found, spare = _recorded(call, given)
    places: dict[int, tuple[UserStatement, set[str]]] = {}
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
        read = places.setdefault(id(place.node), (place, set()))[1]
        others = given.intersection(part.inputs).difference(written)
        read.update(v for v in others if not (of_torch and _is_made_at(graph, v, place)))
        meant.extend((value, place.meant(own)) for value, own in written.items())
    for value, names in sorted(meant, key=lambda item: len(item[1])):
        _match(names - {*found.values()}, {value}, found)
    for place, values in places.values():
        _match(place.read, values, found)
    method = _method_of(graph, call)
    if method is not None:
        for part in call.parts:
            if isinstance(part, BlockCall):
                _match_passed(graph, method, call, part, found)
    for value, own in spare.items():
        if own not in found.values():
            found.setdefault(value, own)
    order = parameters_of(method) if method is not None else []
    ranks = {v: [own == o or own.startswith(f"{o}_") for o in order] for v, own in found.items()}
    return dict(sorted(found.items(), key=lambda item: ranks[item[0]], reverse=True)), method


def _recorded(call: BlockCall, given: Collection[str]) -> tuple[dict[str, str], dict[str, str]]:
    """The names of what is given to a user's function or `forward`, as its calls were seen; and
    such as are used where there are no better ones.

    What is taken out of a list `x` is called as functions inside call it, or `x_0` and `x_1`.
    """
    inner, called, _ = call.path.rpartition(".")[2].partition("()")
    scope = inner if called else call.path.count(".") + 1
    found: dict[str, str] = {}
    inside: dict[str, str] = {}
    for op in call.ops:
        for place, whose, own in op.given:
            value = op.inputs[place] if place < len(op.inputs) else ""
            if value not in given:
                continue
            if whose == scope and own not in found.values():
                found.setdefault(value, own)
            elif own.isidentifier() and _is_within(whose, scope):
                inside.setdefault(value, own)
    sure = {value: own for value, own in found.items() if own.isidentifier()}
    items = {value: own for value, own in found.items() if "[" in own}
    names = [inside.get(value, "") for value in items]
    if "" not in names and len({*names} - {*sure.values()}) == len(names):
        items = dict(zip(items, names, strict=True))
    rest = {value: own for value, own in found.items() if value not in sure}
    return sure, {value: identifier(own) for value, own in {**rest, **items}.items()}


def _is_within(whose: int | str, scope: int | str) -> bool:
    """Whether a function is one that another calls; both are told as in `Op.given`."""
    return whose != scope and (isinstance(whose, str) or (isinstance(scope, int) and whose > scope))


def _is_made_at(graph: Graph, value: str, place: UserStatement) -> bool:
    """Whether a statement makes a value itself, other than in an earlier round of a loop."""
    maker = graph.producer.get(value)
    made = place_at(maker.source) if maker is not None else None
    return made is not None and made.node is place.node and not place.rebinds


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
        lines = [place.node for place in frames if place and place.method is method]
        calls = [node for line in lines for node in ast.walk(line) if node in nodes]
    if len(calls) != 1:
        return
    (made,) = calls
    place = UserStatement(ast.Expr(made, lineno=made.lineno), method, ())
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
