"""What the numbers that a block is constructed with are called."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from gpipe_compiler.codegen.construction import WrittenBlock
from gpipe_compiler.codegen.keywords import number_of
from gpipe_compiler.codegen.names import Identifiers
from gpipe_compiler.codegen.sources import method_at, parameters_of, place_at, torch_base
from gpipe_compiler.ir import Graph, MethodCall, ModuleCall, Op, Ref
from gpipe_compiler.ir.arguments import leaves
from gpipe_compiler.ir.blocks import BlockCall, BlockClass, Parameter
from gpipe_compiler.ir.forms import ConstantSlot
from gpipe_compiler.ir.ops import called


def _is_made_at_right(graph: Graph, op: Op, node: ast.BinOp) -> bool:
    """Whether the tensor of a sum or product, which stands first in the op, is what the user's
    statement makes behind the sign: `keep + torch.rand(shape)`."""
    first = op.call.args[0] if op.call.args else None
    maker = graph.producer.get(first.name) if isinstance(first, Ref) else None
    here = maker is not None and place_at(maker.source) == place_at(op.source)
    return here and isinstance(node.left, ast.Name | ast.Attribute | ast.Constant)


def _aligned(graph: Graph, op: Op) -> list[tuple[object, ast.expr]]:
    """The leaves of a call's arguments that are arguments themselves, and how the user has them."""
    place, made = place_at(op.source), op.call
    if place is None:
        return []
    own = made.module.rpartition(".")[2] if isinstance(made, ModuleCall) else called(made)
    operator = _OPERATORS.get(own.removeprefix("i"))
    method = isinstance(made, MethodCall) or operator is not None
    found: list[tuple[ast.expr, ...]] = []
    for node in ast.walk(place.node):
        match node:
            case ast.BinOp(left=left, right=right) if operator and isinstance(node.op, operator):
                turned = isinstance(node.op, ast.Add | ast.Mult) and _is_made_at_right(
                    graph, op, node
                )
                found.append((right, left) if turned else (left, right))
            case ast.Call(func=ast.Attribute(value=value, attr=attr), args=args) if attr in (
                own,
                own.removeprefix("true"),
            ):
                found.append((*((value,) if method else ()), *args))
    if len(found) != 1 or any(isinstance(item, ast.Starred) for item in found[0]):
        return []
    return [*zip(made.args, found[0], strict=False)]


_OPERATORS = {
    "add": ast.Add, "sub": ast.Sub, "mul": ast.Mult, "truediv": ast.Div, "matmul": ast.MatMult,
    "div": ast.Div,
}  # fmt: skip


def number_name(graph: Graph, op: Op, number: int) -> str:
    """The user's name for a constant of an op; "" where it has none.

    Args:
        number: its place among the leaves of the arguments.
    """
    place = 0
    pending = _aligned(graph, op)
    while pending:
        argument, written = pending.pop(0)
        match argument, written:
            case list() | tuple(), ast.List(elts=items) | ast.Tuple(elts=items) if len(
                items
            ) == len(argument):
                pending[:0] = zip(argument, items, strict=True)
                continue
        if place == number and not isinstance(argument, list | tuple | dict | slice):
            return getattr(written, "id", "") or getattr(written, "attr", "")
        place += len([*leaves(argument)])
    return ""


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
        wanted = [*filter(None, known)] or [item.name]
        found[names.take(next((own for own in wanted if own not in names), wanted[0]))] = item
    return found


def inputs_first(found: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """`in_features` and `out_features` in the order that torch has them in."""
    order = [*found]
    for place, own in enumerate(order):
        other = own.replace("out_", "in_", 1)
        if own.startswith("out_") and other in order[place:]:
            there = order.index(other)
            order[place], order[there] = other, own
    return {own: found[own] for own in order}


def _number_names(
    graph: Graph, call: BlockCall, slots: Sequence[ConstantSlot], inner: Mapping[str, str]
) -> Iterator[str]:
    """What a number of a block may be called, the best first; "" where one is not known.

    The user's names come first, and then what the number is to torch's modules: `out_features`.

    Args:
        slots: where the number stands in a call of the block.
        inner: what blocks in it call the number, by their paths.
    """
    of_ops = [slot for slot in slots if slot.owner in graph.op_of]
    ops = ((graph.op_of[slot.owner], slot.key) for slot in of_ops)
    yield from (number_name(graph, op, int(key)) for op, key in ops)
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
    path, _, _ = f"{call.path}.".partition(f".{_PARTS}.")  # of the layer that is parametrized
    path = path.removesuffix(".")
    cls = graph.module_classes.get(path, "")
    base = torch_base(_files(call), cls)
    if cls.startswith(_PARAMETRIZED):
        base = getattr(nn, cls.removeprefix(_PARAMETRIZED), None)
    if base is not None:
        prefix = f"{path}."
        yield from (_of_layer(base, slot, slot.owner.removeprefix(prefix)) for slot in sizes)
    yield from (str(slot.key) for slot in arguments)
    yield from inner.values()
    yield from (number_of(graph.op_of[slot.owner].call, int(slot.key)) for slot in of_ops)


_PARTS, _PARAMETRIZED = "parametrizations", "Parametrized"
"""Where torch puts the tensors of which it computes a weight, and how it renames the layer."""


def _of_layer(base: type[nn.Module], slot: ConstantSlot, own: str) -> str:
    """What a class of torch calls a size of its weight or bias; "" where that is not told."""
    known = inspect.signature(base).parameters
    names = [next((item for item in known if item.startswith(w)), "") for w in ("out_", "in_")]
    own = own.removeprefix(f"{_PARTS}.").partition(".")[0]
    if own == "weight" and "Transpose" in base.__name__:
        names.reverse()
    names += ["kernel_size"] * (len(known) if "kernel_size" in known else 0)
    return dict(enumerate(names)).get(int(slot.key), "") if own in ("weight", "bias") else ""


def _passed(graph: Graph, call: BlockCall, made: ast.FunctionDef, inner: str, own: str) -> str:
    """The user's name in a block for what the block at a path in it calls `own`; "" for none."""
    below = _constructor(graph, inner, call)
    order = parameters_of(below)[1:] if below is not None else []
    values = _values(made, inner.removeprefix(f"{call.path}.")) if own in order else []
    found = (_argument(value, order.index(own), own) for value in values)
    return next(_names(found), "")


def _files(call: BlockCall) -> list[str]:
    return [op.source.file for op in call.ops if op.source is not None]


def _constructor(graph: Graph, path: str, call: BlockCall) -> ast.FunctionDef | None:
    return method_at(_files(call), graph.module_classes.get(path, ""), "__init__")


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
