"""What the ops of a graph return and change, seen by running it on tensors without memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gpipe_compiler.dispatching import PlainDispatchMode
from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.ir import Graph, Op
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.runtime.core.random import draws


@dataclass(frozen=True)
class Observed:
    """What was seen of each op.

    Attributes:
        returned: what the op returned, by its name.
        effects: names of the ops that write to a tensor or draw random numbers.
        complete: whether the whole graph ran; otherwise nothing is known of the rest.
    """

    returned: Mapping[str, Any]
    effects: frozenset[str]
    complete: bool


def observe(graph: Graph, entry: Entry) -> Observed:
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
    return Observed(returned, frozenset(watcher.effects), complete)


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
