"""The last steps of lowering: tuples unpacked, sizes tidied, dead ops removed, names given."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gpipe_compiler.dispatching import PlainDispatchMode
from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.frontend.naming import rename
from gpipe_compiler.ir import (
    Argument,
    Call,
    FunctionCall,
    Graph,
    MethodCall,
    Op,
    Ref,
    RegionBody,
    RegionCall,
    Result,
)
from gpipe_compiler.ir.arguments import map_argument, value_names
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.ir.ops import with_arguments
from gpipe_compiler.runtime.core.random import draws

_PURE = frozenset({operator.getitem, builtins.getattr, torch._assert})
_PURE_METHODS = frozenset({"size", "dim", "numel", "stride", "is_contiguous"})


def simplify_graph(graph: Graph, entry: Entry) -> Graph:
    """The graph as every frontend hands it out."""
    seen = functools.cache(lambda: observe(graph, entry))
    ends = (graph.outputs, _loss_ref(graph))
    ops, (outputs, loss_ref) = untuple(graph.ops, ends, _examples(graph, seen))
    ops = remove_dead(ops, (outputs, loss_ref), _effects(seen))
    loss = graph.loss
    if loss is not None:
        loss = dataclasses.replace(loss, value=loss_ref.name)
    return rename(graph.replace(ops=ops, outputs=outputs, loss=loss))


def _loss_ref(graph: Graph) -> Argument:
    return None if graph.loss is None else Ref(graph.loss.value)


def _examples(graph: Graph, seen: Callable[[], ObservedOps]) -> Callable[[Op], Any]:
    """What ops return: as the frontend noted it, otherwise from a run on fake tensors.

    Only ops whose result is taken apart, or returned or passed on as a tuple, are worth that run.
    """
    apart = {
        call.args[0].name
        for call in (op.call for op in graph.ops)
        if isinstance(call, FunctionCall)
        and call.function in (operator.getitem, builtins.getattr)
        and hasattr(call.args[0], "name")
    }

    def example(op: Op) -> Any:
        meta = getattr(op.origin, "meta", {})
        for key in ("val", "example_value"):
            if meta.get(key) is not None:
                return meta[key]
        if op.name in apart or _may_return_many(op):
            return seen().returned.get(op.name)
        return None

    return example


def _may_return_many(op: Op) -> bool:
    """Whether an op may return a tuple that is passed on whole."""
    call = op.call
    name = getattr(call, "method", "") or getattr(getattr(call, "function", None), "__name__", "")
    return name in ("split", "chunk", "unbind", "tensor_split", "broadcast_tensors", "meshgrid")


def _effects(seen: Callable[[], ObservedOps]) -> Callable[[Op], bool]:
    def has_effect(op: Op) -> bool:
        call = op.call
        if isinstance(call, FunctionCall) and call.function in _PURE:
            return False
        if isinstance(call, MethodCall) and call.method in _PURE_METHODS:
            return False
        if isinstance(call, FunctionCall) and isinstance(call.function, torch._ops.OpOverload):
            return writes(call.function) or draws(call.function, call.args, dict(call.kwargs))
        observed = seen()
        return op.name not in observed.returned or op.name in observed.effects

    return has_effect


def remove_dead(
    ops: Sequence[Op], ends: Argument, has_effect: Callable[[Op], bool]
) -> tuple[Op, ...]:
    """The ops that something depends on or that have an effect; unread results are not bound."""
    needed = set(value_names(ends))
    kept: list[Op] = []
    for op in reversed(ops):
        if not needed.intersection(op.outputs) and not has_effect(op):
            continue
        call = op.call
        if isinstance(call, RegionCall):
            body = remove_dead(call.body.ops, call.body.outputs, _unless_pure)
            call = dataclasses.replace(call, body=dataclasses.replace(call.body, ops=body))
        kept.append(dataclasses.replace(op, call=call, result=_needed(op.result, needed)))
        needed.update(op.inputs)
    return tuple(reversed(kept))


def _unless_pure(op: Op) -> bool:
    """Inside a region nothing was observed: what is not known to be pure stays."""
    return not isinstance(op.call, FunctionCall) or op.call.function not in _PURE


def _needed(result: Result, needed: set[str]) -> Result:
    """A result with a name only for what is read."""
    if isinstance(result, str):
        return result if result in needed else None
    if isinstance(result, tuple):
        parts = tuple(_needed(item, needed) for item in result)
        return parts if any(part is not None for part in parts) else None
    return None


@dataclass(frozen=True)
class ObservedOps:
    """What was seen of each op.

    Attributes:
        returned: what the op returned, by its name.
        effects: names of the ops that write to a tensor or draw random numbers.
        complete: whether the whole graph ran; otherwise nothing is known of the rest.
    """

    returned: Mapping[str, Any]
    effects: frozenset[str]
    complete: bool


def observe(graph: Graph, entry: Entry) -> ObservedOps:
    """Runs a graph once on fake tensors, at a batch of 2."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    watcher = _Watcher()
    returned: dict[str, Any] = {}

    def look(op: Op, execute: Callable[[], Any]) -> Any:
        watcher.current = op.name
        returned[op.name] = execute()
        return returned[op.name]

    inputs = {
        source.name: mode.from_tensor(tensor)
        for source, tensor in zip(graph.inputs, entry.signature.samples(2), strict=True)
    }
    tensors = {
        name: mode.from_tensor(tensor.detach(), static_shapes=True)
        for name, tensor in graph.tensors.items()
    }
    # Graphs name no device: what they create goes where the model is.
    device = torch.device("meta") if entry.states.on_meta else contextlib.nullcontext()
    complete = True
    try:
        with torch.no_grad(), mode, watcher, device:
            Interpreter(graph, tensors, entry.training).run(inputs, look)
    except Exception:  # an op without a fake kernel: what was seen so far must do
        complete = False
    return ObservedOps(returned, frozenset(watcher.effects), complete)


def writes(func: Any) -> bool:
    """Whether a kernel may write to a tensor.

    Normalisation writes running statistics though its schema does not say so.
    """
    return bool(func._schema.is_mutable) or "batch_norm" in str(func)


class _Watcher(PlainDispatchMode):
    """Notes which op runs a kernel that writes or draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.current = ""
        self.effects: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if writes(func) or draws(func, args, kwargs or {}):
            self.effects.add(self.current)
        return func(*args, **(kwargs or {}))


# --- no tuple is a value: results are bound by unpacking ------------------------------------------

Example = Callable[[Op], Any]
"""What an op returns, on some example; None where that is not known."""


def untuple(
    ops: Sequence[Op], outputs: Argument, example: Example
) -> tuple[tuple[Op, ...], Argument]:
    """The ops with results unpacked, and the outputs in terms of the new values."""
    tidied = list(_tidy_sizes(ops, outputs))
    untupling = _Untupling(example, _taken_apart(tidied))
    untupled = tuple(op for old in tidied for op in untupling.op(old))
    return untupled, untupling.substitute(outputs)


class _Untupling:
    """Goes over the ops in order and remembers what every untupled name stands for."""

    def __init__(self, example: Example, apart: frozenset[str]) -> None:
        self._example = example
        self._apart = apart
        self._stands_for: dict[str, Argument] = {}
        self._fields: dict[str, tuple[str, ...]] = {}

    def substitute(self, argument: Argument) -> Argument:
        """An argument in terms of the new values."""

        def replace(leaf: Any) -> Argument:
            return self._stands_for.get(leaf.name, leaf) if isinstance(leaf, Ref) else leaf

        return map_argument(replace, argument)

    def op(self, op: Op) -> Iterator[Op]:
        """The op anew; nothing where it only took a tuple apart."""
        if not isinstance(op.result, str):
            yield dataclasses.replace(op, call=with_arguments(op.call, self.substitute))
            return
        item = self._item(op.call)
        if item is not None:
            self._stands_for[op.result] = item[0]
            return
        call = with_arguments(op.call, self.substitute)
        if isinstance(call, RegionCall):
            call = dataclasses.replace(call, body=self._block(call.body))
            returned: Any = tuple(_TENSOR for _ in call.body.outputs)
        else:
            returned = self._example(op)
        if not _unpackable(returned) or (len(returned) > _MANY and op.name not in self._apart):
            yield dataclasses.replace(op, call=call)
            return
        result, stands_for = _unpack(op.result, returned)
        self._stands_for[op.result] = stands_for
        self._fields[op.result] = _field_names(returned)
        yield dataclasses.replace(op, call=call, result=result)

    def _block(self, block: RegionBody) -> RegionBody:
        ops, outputs = untuple(block.ops, block.outputs, self._example)
        return RegionBody(block.inputs, ops, outputs)

    def _item(self, call: Call) -> tuple[Argument] | None:
        """What `getitem` or a field's name takes out of an unpacked result."""
        if not isinstance(call, FunctionCall) or len(call.args) != 2:
            return None
        source, key = call.args
        whole = self.substitute(source)
        if not isinstance(source, Ref) or not isinstance(whole, tuple | list):
            return None
        if call.function is operator.getitem and isinstance(key, int):
            return (whole[key],)
        if call.function is operator.getitem and isinstance(key, slice) and not _has_refs(key):
            return (whole[key],)
        fields = self._fields.get(source.name, ())
        if call.function is builtins.getattr and key in fields:
            return (whole[fields.index(str(key))],)
        return None


_TENSOR = object()

_MANY = 8
"""So many values, and nothing that looks at one of them, stay together in a list."""


def _taken_apart(ops: Iterable[Op]) -> frozenset[str]:
    """The values of which `getitem` or a field's name takes a part."""
    return frozenset(
        op.call.args[0].name
        for op in ops
        if isinstance(op.call, FunctionCall)
        and op.call.function in (operator.getitem, builtins.getattr)
        and op.call.args
        and isinstance(op.call.args[0], Ref)
    )


def _unpackable(returned: Any) -> bool:
    """Whether a result is a tuple or list of tensors, possibly nested."""
    if not isinstance(returned, tuple | list) or isinstance(returned, torch.Size) or not returned:
        return False
    return all(
        item is None or item is _TENSOR or isinstance(item, torch.Tensor) or _unpackable(item)
        for item in returned
    )


def _unpack(name: str, returned: Any) -> tuple[Result, Argument]:
    """A result tree with names, and the argument that the whole of it stands for."""
    results: list[Result] = []
    arguments: list[Argument] = []
    for index, item in enumerate(returned):
        if item is None:
            results.append(None)
            arguments.append(None)
        elif isinstance(item, tuple | list):
            result, argument = _unpack(f"{name}.{index}", item)
            results.append(result)
            arguments.append(argument)
        else:
            results.append(f"{name}.{index}")
            arguments.append(Ref(f"{name}.{index}"))
    whole = arguments if isinstance(returned, list) else tuple(arguments)
    return tuple(results), whole


def _field_names(returned: Any) -> tuple[str, ...]:
    """The names of a named tuple's fields, torch's own kind included."""
    names: tuple[str, ...] = getattr(returned, "_fields", ())
    return names or getattr(type(returned), "__match_args__", ())


def _has_refs(argument: Argument) -> bool:
    return next(value_names(argument), None) is not None


def _is_size(call: Call) -> bool:
    """Whether a call gives all sizes of a tensor."""
    if isinstance(call, MethodCall):
        return call.method == "size" and len(call.args) == 1 and not call.kwargs
    return (
        isinstance(call, FunctionCall)
        and call.function is builtins.getattr
        and call.args[1:] == ("shape",)
    )


def _tidy_sizes(ops: Sequence[Op], outputs: Argument) -> Iterator[Op]:
    """The ops with sizes taken one by one, all of a tensor only where they are needed whole."""
    sizes = {op.name: op for op in ops if _is_size(op.call) and op.result == op.name}
    taken = {op.name: _taken_size(op.call, sizes) for op in ops}
    whole = set(value_names(outputs))
    whole.update(name for op in ops if taken[op.name] is None for name in op.inputs)
    for op in ops:
        found = taken[op.name]
        if found is not None:
            receiver = sizes[found[0]].call.args[0]
            yield dataclasses.replace(op, call=MethodCall("size", (receiver, found[1])))
        elif op.name not in sizes or op.name in whole:
            yield op


def _taken_size(call: Call, sizes: Iterable[str]) -> tuple[str, int] | None:
    """Which size a call takes out of which sizes."""
    match call:
        case FunctionCall(function=operator.getitem, args=(Ref(name=name), int() as index)):
            return (name, index) if name in sizes else None
        case _:
            return None
