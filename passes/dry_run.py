"""Runs a graph on fake tensors: everything but the numbers, and no memory.

The passes that ask what an op does (shapes, effects, saved tensors, cost) watch such a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from gpipe_compiler.dispatching import QuickFakes
from gpipe_compiler.errors import ModelError
from gpipe_compiler.ir import Graph, Input, Mode, Op
from gpipe_compiler.ir.arguments import map_argument
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.ir.ops import with_arguments
from gpipe_compiler.passes.fakes import HostFakes
from gpipe_compiler.quiet import quiet
from gpipe_compiler.runtime.core.precision import autocast
from gpipe_compiler.runtime.spec import Precision
from gpipe_compiler.runtime.wording import said

RunOp = Callable[[], Any]
Observer = Callable[[Op, RunOp], Any]

RAISED_BY_OPS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)
"""What a torch call raises when its arguments do not fit (fake tensors' own errors included)."""

_HOST = torch.device("cpu")


@dataclass
class DryRun:
    """A graph made ready to run on fake tensors, as often as wanted.

    Fake tensors say that they are on the host, whatever device the model is on; constants of the
    graph that name the meta device are taken to mean the host too.

    Attributes:
        mode: all tensors of the run belong to it.
        states: the fake parameters, buffers and constants, by canonical name.
    """

    graph: Graph
    training: bool
    mode: QuickFakes
    states: Mapping[str, torch.Tensor]
    interpreter: Interpreter

    @classmethod
    def of(cls, graph: Graph, *, training: bool, mode: QuickFakes | None = None) -> DryRun:
        """The graph with fake state; its trainable parameters need gradients when training.

        Args:
            mode: of the fakes; by default one that knows the memory that kernels of the host take.
        """
        mode = mode or HostFakes()
        graph = _on_host(graph)
        interpreter = Interpreter(graph, {}, training).prepare()
        with mode:
            states = {
                name: _empty(state.shape, _strides(graph, name, state.shape), state.dtype)
                for name, state in graph.state.items()
            }
        for name, tensor in states.items():
            tensor.requires_grad_(training and graph.state[name].requires_grad)
        interpreter.tensors = states
        return cls(graph, training, mode, states, interpreter)

    def inputs(self, batch_size: int) -> dict[str, torch.Tensor]:
        """Fake inputs for a batch of this size."""
        base = base_batch(self.graph)
        with self.mode:
            return {
                source.name: fake_input(self.graph, source, base, batch_size)
                for source in self.graph.inputs
            }

    def run(self, batch_size: int, observer: Observer | None = None) -> dict[str, Any]:
        """Every value of the graph by name; `observer` gets each op with a function that runs it.

        Raises:
            ModelError: naming the op that cannot run at this batch size.
        """
        selecting: list[Op] = []

        def watched(op: Op, execute: RunOp) -> Any:
            guesses = self.mode.guesses
            try:
                return execute() if observer is None else observer(op, execute)
            except RAISED_BY_OPS as error:
                before = self.graph.ancestors(op.inputs)
                behind = next((one for one in selecting if one.name in before), None)
                raise refusal(self.graph, op, batch_size, error, behind) from error
            finally:
                if self.mode.guesses > guesses:
                    selecting.append(op)

        inputs = self.inputs(batch_size)
        # What torch has to say about the model it has said when the model ran.
        with self.mode, torch.set_grad_enabled(self.training), self.autocast(), quiet():
            return self.interpreter.run(inputs, watched)

    def autocast(self, on: torch.device = _HOST) -> contextlib.AbstractContextManager[object]:
        """The precision that ops run in; on the host unless they run for real elsewhere.

        What autocast makes of some ops depends on the kind of device. Types may differ there: the
        runtime finds out for itself.
        """
        return autocast(self.graph.precision, on)


def modes(graph: Graph) -> tuple[bool, ...]:
    """The modes to run to see every op: the graph's own first (True is train).

    A graph with a loss is for training, one without for inference; the other mode is run only
    where some ops are guarded by it.
    """
    own = graph.loss is not None
    other = Mode.EVAL if own else Mode.TRAIN
    return (own, not own) if any(op.mode is other for op in graph.ops) else (own,)


def base_batch(graph: Graph) -> int:
    """The batch size of the example inputs, or the graph's own where no input is batched.

    Raises:
        ModelError: when an input has no example.
    """
    for source in graph.inputs:
        if source.name not in graph.example:
            raise ModelError(
                f"there is no example of the input {source.name}",
                hint="give `Graph.example` one tensor for every input",
            )
    sizes = [
        source.samples(graph.example[source.name]) for source in graph.inputs if source.batched
    ]
    return sizes[0] if sizes else graph.batch_size


def fake_input(graph: Graph, source: Input, base: int, batch_size: int) -> torch.Tensor:
    """An empty tensor like the example of an input, for a batch of this size.

    Raises:
        ModelError: when the example does not hold a whole number of rows per sample.
    """
    example = graph.example[source.name]
    shape = list(example.shape)
    if source.batch_dim is not None:
        rows = shape[source.batch_dim]
        shape[source.batch_dim], rest = divmod(rows * batch_size, base)
        if rest:
            raise ModelError(
                f"the input {source.name} has {rows} rows for {base} samples, which "
                f"does not scale to {batch_size} samples",
                hint="give every batched input as many samples as the others",
            )
    return _empty(shape, like_strides(example, shape), example.dtype)


def like_strides(example: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor of this shape whose dimensions lie as in the example, or as torch
    lays out one like it, where the example is expanded."""
    if 0 in example.stride():
        example = torch.empty_like(example, device="meta")
    inner_first = sorted(
        range(len(shape)), key=lambda d: (example.stride(d), example.shape[d] != 1, -d)
    )
    strides, step = [0] * len(shape), 1
    for dim in inner_first:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _empty(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device=_HOST)


def _strides(graph: Graph, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    tensor = graph.tensors.get(name)
    if tensor is None:
        tensor = torch.empty(shape, device="meta")
    return tensor.stride()


def _on_host(graph: Graph) -> Graph:
    """The graph with every constant `meta` device replaced by the host."""

    def host(leaf: object) -> object:
        return _HOST if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

    return graph.replace(ops=tuple(map_op(op, host) for op in graph.ops))


def map_op(op: Op, function: Callable[[Any], Any]) -> Op:
    """The op with `function` applied to every leaf of its arguments."""
    call = with_arguments(op.call, partial(map_argument, function))
    return dataclasses.replace(op, call=call)


def refusal(
    graph: Graph, op: Op, batch_size: int, error: Exception, selecting: Op | None = None
) -> ModelError:
    """The error of an op that fails, perhaps as what an earlier one selects may be any number."""
    match error:
        case DynamicOutputShapeException():
            problem = (
                f"how many elements {op.name} gives depends on the values of a tensor "
                f"({error.func}), so that no stage can be planned or sent anything behind it"
            )
            hint = (
                "keep the shape, and leave elements out by a mask: torch.where(mask, x, 0), or "
                "ignore_index in a loss, in place of x[mask] and torch.nonzero"
            )
        case DataDependentOutputException():
            problem = f"{op.name} makes a Python number of the values of a tensor ({error.func})"
            hint = "keep it a tensor: x.max() in place of x.max().item()"
        case _ if selecting is not None:
            problem = (
                f"how many elements {selecting.name} selects depends on the values of a mask, "
                f"and {op.name} takes a number that is known: {said(error)}"
            )
            hint = (
                "select by places, whose number is known: x[:, self.places], of a buffer that "
                "__init__ makes by mask.nonzero().squeeze(1); or keep the shape by torch.where"
            )
            op = selecting
        case _ if graph.precision is not Precision.FP32:
            precision = graph.precision.value
            problem = f"{op.name} fails in {precision}, on {batch_size} samples: {said(error)}"
            hint = (
                "plain PyTorch has to run the model under autocast: compute this in fp32, "
                "`with torch.autocast(x.device.type, enabled=False):` of x.float(), or compile it "
                "for another precision"
            )
        case _:
            problem = f"{op.name} fails on {batch_size} samples: {said(error)}"
            hint = "every stage runs micro-batches: the model has to accept that many samples"
    return ModelError(problem, location=op.source, hint=hint)
