"""The last steps of lowering: tuples unpacked, sizes tidied, dead ops removed, names given."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gpipe_compiler.dispatching import PlainDispatchMode
from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.frontend.naming import rename
from gpipe_compiler.frontend.untuple import untuple
from gpipe_compiler.ir import Argument, FunctionCall, Graph, MethodCall, Op, RegionCall, Result
from gpipe_compiler.ir.arguments import value_names
from gpipe_compiler.ir.interpret import Interpreter
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
    from gpipe_compiler.ir import Ref

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
