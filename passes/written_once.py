"""State that goes on once a mini-batch: what forward writes to without looking at samples.

Such as a counter of calls, the vectors of a power iteration, a teacher that follows its student.
Each micro-batch comes to the same there, from the state before the mini-batch, so the runtime lets
each begin with that, and what they leave behind is what one forward of the mini-batch would.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from gpipe_compiler.errors import ModelError
from gpipe_compiler.ir import FunctionCall, Graph, MethodCall, Op, Ref, StateKind, StateRef
from gpipe_compiler.ir.arguments import leaves, storage_key, tensors_in
from gpipe_compiler.ir.graph import found_once
from gpipe_compiler.passes.dry_run import DryRun
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.fakes import HostFakes
from gpipe_compiler.passes.observe import observed
from gpipe_compiler.passes.op_watch import written_by

_OF_BATCHNORM = "num_batches_tracked"
"""What `--batchnorm` decides about, with the running statistics."""


@found_once
def written_once(graph: Graph) -> frozenset[str]:
    """The buffers and frozen parameters that are written without looking at samples.

    Nor at how many there are: it runs at the graph's batch size and at twice that, and what a
    kernel is given besides tensors has to be the same. None where each micro-batch is a call.
    """
    if graph.one_by_one:
        return frozenset()
    writes = effects(graph).state_writes
    normalising = {
        name
        for name, op in observed(graph).ops.items()
        if name in writes and any("batch_norm" in kernel.name for kernel in op.kernels)
    }
    trained = {name for name, state in graph.state.items() if state.requires_grad}
    found = {
        name
        for name in effects(graph).written_states - trained
        if name.rpartition(".")[2] != _OF_BATCHNORM
    }.difference(*(writes[op] for op in normalising))
    for training in (True, False) if graph.loss is not None else (False,):
        if found:
            found &= _without_samples(graph, found, training=training)
    return frozenset(found)


def sample_writers(graph: Graph) -> Mapping[str, frozenset[str]]:
    """Op -> the states that each micro-batch makes it write to; ops without any are left out."""
    once = written_once(graph)
    writes = effects(graph).state_writes.items()
    return {op: states - once for op, states in writes if not states <= once}


def _without_samples(graph: Graph, names: Collection[str], *, training: bool) -> set[str]:
    """Those of some states that are not written, or without looking at samples, in one mode."""
    try:
        once, twice = (_Kernels.of(graph, size, training) for size in (1, 2))
    except ModelError:  # which the graph raises at other sizes
        return set()
    if len(once.runs) != len(twice.runs):
        return set()
    sized = [one.given != other.given for one, other in zip(once.runs, twice.runs, strict=True)]
    written = effects(graph).written_states
    carried = {once.states[name] for name in written if name not in names}
    found = set(names)
    while True:
        seen = once.inputs | carried
        for run, differs in zip(once.runs, sized, strict=True):
            if not seen.isdisjoint(run.read) or (differs and not run.views):
                seen.update(run.made)
        again = {name for name in found if once.states[name] in seen}
        if not again:
            return found
        found -= again
        carried |= {once.states[name] for name in again}


@dataclass(frozen=True, slots=True)
class _Run:
    """A kernel that ran, with the storages that it read and that it made or wrote.

    Attributes:
        given: what it was given besides tensors, and the shapes of these.
    """

    read: frozenset[int]
    made: frozenset[int]
    given: str
    views: bool


@dataclass(frozen=True, slots=True)
class _Kernels:
    """The kernels of a dry run.

    Attributes:
        inputs: the storages of what has samples.
        states: that of each state.
        alive: tensors that are kept for the numbers of storages to stay their own.
    """

    runs: list[_Run]
    inputs: set[int]
    states: Mapping[str, int]
    alive: list[object]

    @classmethod
    def of(cls, graph: Graph, times: int, training: bool) -> _Kernels:
        """The kernels of a run of so many times the graph's batch."""
        fakes = HostFakes()
        run = DryRun.of(graph, training=training, mode=fakes)
        runs: list[_Run] = []
        alive: list[object] = [run]

        def saw(
            func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], returned: object
        ) -> None:
            results = tensors_in(returned)
            made = [*results, *tensors_in(written_by(func, args, kwargs))]
            alive.extend(tensor.untyped_storage() for tensor in results)
            runs.append(
                _Run(
                    frozenset(map(storage_key, tensors_in((args, kwargs)))),
                    frozenset(map(storage_key, made)),
                    repr(tree_map_only(torch.Tensor, _shape, (func, args, kwargs, results))),
                    bool(func.is_view),
                )
            )

        with fakes.watched(saw):
            values = run.run(times * graph.batch_size)
        batched = [values[source.name] for source in graph.inputs if source.batched]
        states = {name: storage_key(tensor) for name, tensor in run.states.items()}
        return cls(runs, set(map(storage_key, tensors_in(batched))), states, alive)


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


# --- weights that forward writes to, and other calls of the model read as they were ---------------


def freeze_followers(graph: Graph) -> Graph:
    """Parameters that forward writes to and that get no gradients are as frozen ones are.

    Such as those of `torch.optim.swa_utils.AveragedModel`, which ask for gradients and are read
    where autograd does not record.
    """
    if graph.loss is None:
        return graph
    trains = {
        name
        for op in graph.ops
        if any(graph.values[output].requires_grad for output in op.outputs)
        for name in op.states(graph.modules)
    }
    found = {
        name: dataclasses.replace(graph.state[name], requires_grad=False)
        for name in effects(graph).written_states - trains
        if graph.state[name].requires_grad
    }
    return graph.replace(state={**graph.state, **found}) if found else graph


def refuse_written_weights(graph: Graph) -> None:
    """Holds an annotated graph that is trained on several micro-batches to it that no forward
    changes what the backward of another reads.

    Raises:
        ModelError: naming the weight, and the line that writes to it.
    """
    kept = {item.name.name for op in observed(graph).ops.values() for item in op.saved if item.own}
    for op in graph.ops if graph.loss is not None else ():
        for name in sorted(_written_by(graph, op) & kept):
            if graph.state[name].requires_grad and not _settles(graph, op, name):
                raise ModelError(
                    f"{op.name} writes to {name}, which is trained, in every forward: the backward "
                    "of another micro-batch reads it as it was",
                    location=op.source,
                    hint="compile with --microbatches 1; or write to it between steps, in a "
                    "training loop of your own",
                )


def _settles(graph: Graph, op: Op, name: str) -> bool:
    """Whether an op writes to a weight what it leaves as it is when it is run again.

    So it is with numbers between which it clamps the `.data` of the weight, of which no backward
    is told, before anything else of a forward reads it.
    """
    call = op.call
    if not isinstance(call, MethodCall) or call.method not in ("clamp_", "clip_"):
        return False
    source, *bounds = call.args
    made = graph.producer.get(source.name) if isinstance(source, Ref) else None
    plain = not any(
        isinstance(leaf, Ref | StateRef) for leaf in leaves((bounds, dict(call.kwargs)))
    )
    data = FunctionCall(getattr, (StateRef(name), "data"))
    if made is None or not plain or made.call != data:
        return False
    before = itertools.takewhile(lambda other: other is not op, graph.ops)
    return all(other is made or name not in other.states(graph.modules) for other in before)


def refuse_written_in_eval(graph: Graph) -> None:
    """Holds a graph that is trained to it that its parameters do not change when it is evaluated.

    Raises:
        ModelError: naming the parameter, and the line that writes to it.
    """
    if graph.loss is None or not any(_written_by(graph, op) for op in graph.ops):
        return
    evaluated = observed(graph, training=False).ops
    for op in (op for op in graph.ops if op.name in evaluated):
        written = {storage.name.name for storage in evaluated[op.name].written}
        for name in sorted(_written_by(graph, op) & written):
            raise ModelError(
                f"forward writes to the parameter {name} in eval mode too: every evaluation would "
                "change what is trained",
                location=op.source,
                hint="write to it under `if self.training:`, or between steps, in a training loop "
                "of your own",
            )


def _written_by(graph: Graph, op: Op) -> frozenset[str]:
    written = effects(graph).state_writes.get(op.name, frozenset())
    return frozenset(n for n in written if graph.state[n].kind is StateKind.PARAMETER)


# --- state that shares memory under several names -------------------------------------------------


def refuse_overlaps(graph: Graph, model: nn.Module) -> None:
    """Holds an annotated graph to it: what changes is in memory of its own.

    Tied weights are one tensor under several names, which the graph knows as one. A buffer that is
    a view of another, or a parameter that was given the `.data` of another, is a tensor of its own:
    what is written to one shows in the other, and a package holds both apart.

    Args:
        model: as its author made it; the graph's tensors are copies.

    Raises:
        ModelError: naming both states, and the line of the op that writes to one.
    """
    by_memory: dict[int, list[str]] = {}
    tensors = {name: tensor for name in graph.state if (tensor := _tensor(model, name)) is not None}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        by_memory.setdefault(storage.data_ptr() or storage._cdata, []).append(name)
    shared = [
        pair
        for names in by_memory.values()
        for pair in itertools.combinations(names, 2)
        if _overlap(*(tensors[name] for name in pair))
    ]
    if not shared:
        return
    writers = effects(graph).state_writes
    for one, other in shared:
        pair = {one, other}
        writing = [op for op in graph.ops if pair & writers.get(op.name, frozenset())]
        trained = graph.loss is not None and any(graph.state[n].requires_grad for n in pair)
        if writing or trained:
            raise ModelError(
                f"{one} and {other} are two tensors in the same memory, and "
                f"{'one of them is written to' if writing else 'training changes it'}: a stage "
                "holds each by itself, and would not see the other change",
                location=writing[0].source if writing else None,
                hint="hold one of them alone, and slice or reshape it in forward; weights are tied "
                "by giving both modules the same nn.Parameter",
            )


def _tensor(model: nn.Module, name: str) -> torch.Tensor | None:
    """A tensor with memory, by its name; None for what has none, or is no attribute."""
    try:
        found = operator.attrgetter(name)(model)
    except (AttributeError, RuntimeError):
        return None
    plain = isinstance(found, torch.Tensor) and found.layout is torch.strided and found.numel()
    return found if plain else None


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of the same storage have an element in common."""
    if one.dtype != other.dtype:
        (start, end), (from_, to) = _bytes(one), _bytes(other)
        return start < to and from_ < end
    count = max(_bytes(one)[1], _bytes(other)[1]) // one.itemsize
    places = torch.zeros(count, dtype=torch.bool)
    places.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(places.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor begins and ends in its storage, in bytes."""
    first = int(tensor.storage_offset())
    last = first + sum(
        int((size - 1) * step) for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return first * tensor.itemsize, (last + 1) * tensor.itemsize
