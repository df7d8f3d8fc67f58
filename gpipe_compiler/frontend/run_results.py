"""One run of a model, and of its graph, with all that is compared of them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gpipe_compiler.errors import ModelError
from gpipe_compiler.frontend.comparable_runs import GRADIENT, Results
from gpipe_compiler.frontend.encoders import unpacked
from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.frontend.probing import on_meta
from gpipe_compiler.frontend.python_state import changed, no_new_parameters, python_state
from gpipe_compiler.frontend.recompute import activations_kept
from gpipe_compiler.frontend.state import copied, isolated, put_tensors
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.trace_fakes import TraceFakes
from gpipe_compiler.ir import Graph, StateKind
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.ir.left_out import with_all_layers
from gpipe_compiler.runtime.core.nest import tensors_of

SEED = 20260

BUFFER = "buffer "
"""What the names of buffers begin with."""


@dataclass(frozen=True)
class ComparedRun:
    """What one run gave, by readable name.

    Attributes:
        assigned: the buffers, so named, that are another tensor than before.
        remembers: whether other attributes of modules are not what they were.
    """

    results: Results
    assigned: frozenset[str] = frozenset()
    remembers: bool = False


def run_model(
    graph: Graph,
    subject: Subject,
    entry: Entry,
    batch: int,
    *,
    double: bool = False,
    keeping: contextlib.AbstractContextManager[object] | None = None,
) -> ComparedRun:
    """The eager model on copies of everything, perhaps in double precision.

    What it checkpoints by itself runs once, unless `keeping` is another context: a second run in
    the backward would count twice in the running statistics of BatchNorm.
    """
    entry.model = isolated(subject.model).train(entry.training)
    if double:
        entry.model.double()
    # What asks tensors for values knows that fakes have none; of those on meta it does not.
    fakes = TraceFakes() if entry.states.on_meta else None
    if fakes is not None:
        put_tensors(entry.model, fakes.from_tensor)
    leaves, inputs = inputs_of(entry, batch, double=double, fakes=fakes)
    before = dict(entry.model.named_buffers())
    attributes = {**python_state(entry.model, entry.loss_fn), **subject.began}
    sizes = {name: tensor.shape for name, tensor in before.items()}
    torch.manual_seed(SEED)
    with (
        torch.set_grad_enabled(entry.has_loss),
        keeping or activations_kept(),
        no_new_parameters(),
        unpacked(),  # as evaluations compute, which run without gradients
        fakes or contextlib.nullcontext(),
    ):
        returned = entry(*inputs)
        loss = returned.pop(0) if entry.has_loss else None
        _backward(loss, entry)
    parameters = dict(entry.model.named_parameters())
    buffers = dict(entry.model.named_buffers())
    for name, tensor in buffers.items():
        if sizes.get(name, tensor.shape) != tensor.shape and before[name] is tensor:
            used = (op for op in graph.ops if name in op.states(graph.modules))
            raise ModelError(
                f"the buffer {name} gets its size when the model runs: {tuple(sizes[name])} "
                f"becomes {tuple(tensor.shape)}",
                location=next((op.source for op in used), None),
                hint="call the model once in build_model(), as observers of quantisation ask for",
            )
    run = _results(entry.outputs(returned), loss, parameters, buffers, leaves)
    assigned = [n for n in {**before, **buffers} if before.get(n) is not buffers.get(n)]
    return dataclasses.replace(
        run,
        assigned=frozenset(f"{BUFFER}{name}" for name in assigned),
        remembers=bool(changed(attributes, python_state(entry.model, entry.loss_fn))),
    )


def run_graph(graph: Graph, entry: Entry, batch: int, *, double: bool = False) -> ComparedRun:
    """The graph on copies of everything, perhaps in double precision."""
    fakes = TraceFakes() if entry.states.on_meta else None
    tensors = {}
    for name, tensor in graph.tensors.items():
        copy = _copy(tensor, double=double) if fakes is None else fakes.from_tensor(tensor)
        tensors[name] = copy.requires_grad_(graph.state[name].requires_grad)
    leaves, inputs = inputs_of(entry, batch, double=double, fakes=fakes)
    if entry.keeps is not None:
        graph = with_all_layers(graph)
    interpreter = Interpreter(graph, tensors, entry.training)
    torch.manual_seed(SEED)
    with torch.set_grad_enabled(entry.has_loss), fakes or contextlib.nullcontext():
        values = interpreter.run(
            {source.name: tensor for source, tensor in zip(graph.inputs, inputs, strict=True)},
            keep={*graph.output_values, *((graph.loss.value,) if graph.loss else ())},
        )
    loss = None if graph.loss is None else values[graph.loss.value]
    _backward(loss, entry)
    kinds: dict[StateKind, dict[str, torch.Tensor]] = {kind: {} for kind in StateKind}
    for name, tensor in tensors.items():
        kinds[graph.state[name].kind][name] = tensor
    unmade = (op.outputs for op in graph.ops if not interpreter.runs(op))
    values.update(dict.fromkeys(itertools.chain.from_iterable(unmade)))
    outputs = interpreter.resolve(graph.outputs, values)
    return _results(outputs, loss, kinds[StateKind.PARAMETER], kinds[StateKind.BUFFER], leaves)


def _copy(tensor: torch.Tensor, *, double: bool) -> torch.Tensor:
    copy = copied(tensor)
    return copy.double() if double and copy.is_floating_point() else copy


def inputs_of(
    entry: Entry, batch: int, *, double: bool, fakes: TraceFakes | None = None
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Leaves by name that collect gradients, and what to pass on: perhaps copies, to which the
    model may write.

    Args:
        fakes: of whose mode they are to be.
    """
    tensors = [_copy(tensor, double=double) for tensor in entry.signature.samples(batch)]
    if fakes is not None:
        tensors = [fakes.from_tensor(tensor, static_shapes=True) for tensor in tensors]
    leaves = {
        source.name: tensor.requires_grad_(entry.has_loss and entry.input_gradients)
        for source, tensor in zip(entry.signature.inputs, tensors, strict=True)
        if tensor.is_floating_point()
    }
    return leaves, tensors if entry.leaf_inputs else [tensor.clone() for tensor in tensors]


def _backward(loss: Any, entry: Entry) -> None:
    if entry.training and isinstance(loss, torch.Tensor) and loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own


def _results(
    outputs: object,
    loss: torch.Tensor | None,
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    leaves: Mapping[str, torch.Tensor],
) -> ComparedRun:
    found: dict[str, torch.Tensor | None] = {}
    for path, tensor in tensors_of(outputs):
        found[f"output {'.'.join(map(str, path))}".strip()] = tensor
    if loss is not None:
        found["loss"] = loss
    for name, tensor in parameters.items():
        found[f"{GRADIENT}{name}"] = tensor.grad
    for name, tensor in buffers.items():
        found[f"{BUFFER}{name}"] = tensor
    for name, tensor in leaves.items():
        found[f"{GRADIENT}the input {name}"] = tensor.grad
    return ComparedRun({name: None if t is None else _bare(t) for name, t in found.items()})


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    return on_meta(tensor) if isinstance(tensor, FakeTensor) else tensor.detach()
