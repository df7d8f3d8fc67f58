"""The segments of a stage that run again in the backward, as methods of their own."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch.utils.checkpoint import checkpoint

from gpipe_compiler.codegen.expressions import OwnMethod
from gpipe_compiler.codegen.facts import Facts
from gpipe_compiler.codegen.methods import Method
from gpipe_compiler.codegen.names import Names
from gpipe_compiler.codegen.templates import contains_batch
from gpipe_compiler.ir import Call, FunctionCall, Graph, ModuleCall, Op, Ref, ValueKind
from gpipe_compiler.plan import Stage


@dataclass(frozen=True, slots=True)
class Segment:
    """A method that `forward` calls through torch's checkpoint.

    Attributes:
        module: the path of the module whose forward it is, "" where it is none.
    """

    name: str
    module: str
    method: Method


def split_off(
    facts: Facts, stage: Stage, forward: Method, attributes: Iterable[str]
) -> tuple[Method, tuple[Segment, ...]]:
    """The `forward` that calls the segments of its stage, and these.

    Args:
        attributes: what the stage calls its modules and tensors.
    """
    names = Names(attributes)
    of_op = {name: index for index, ops in enumerate(stage.segments) for name in ops}
    dead = set(stage.ops).difference(op.name for op in forward.ops)
    ops: list[Op] = []
    segments: list[Segment] = []
    unnamed = 0
    for index, run in _runs(forward.ops, of_op):
        method = None if index is None else _method(facts.graph, run, forward)
        if method is None:
            ops.extend(run)
            continue
        module = _module_of(facts.graph, run, dead)
        unnamed += not module
        wanted = module or f"segment_{unnamed}"
        segment = Segment(names.take(wanted), module, method)
        segments.append(segment)
        ops.append(_call(facts.graph, segment))
    return dataclasses.replace(forward, ops=tuple(ops)), tuple(segments)


def buffers_of(
    facts: Facts, segment: Segment, writes: Sequence[str], own: Mapping[str, str]
) -> tuple[str, ...]:
    """The buffers that a stage writes to, those that a segment of it reads or writes.

    Args:
        writes: all of them, by the stage's own names.
        own: the stage's own names to the model's.
    """
    touched = {
        name for op in segment.method.ops for name in facts.effects.states_of(facts.graph, op)
    }
    return tuple(name for name in writes if own[name] in touched)


def _runs(ops: Sequence[Op], of_op: Mapping[str, int]) -> list[tuple[int | None, list[Op]]]:
    """The ops of each segment, and those between them."""
    runs: list[tuple[int | None, list[Op]]] = []
    for op in ops:
        index = of_op.get(op.name)
        if runs and runs[-1][0] == index:
            runs[-1][1].append(op)
        else:
            runs.append((index, [op]))
    return runs


def _method(graph: Graph, ops: Sequence[Op], forward: Method) -> Method | None:
    """What a segment computes; None where nothing of it is used."""
    made = {value for op in ops for value in op.outputs}
    inside = {op.name for op in ops}
    read_after = {value for op in forward.ops if op.name not in inside for value in op.inputs}
    returns = tuple(v for op in ops for v in op.outputs if v in read_after.union(forward.returns))
    if not returns:
        return None
    fixed = tuple(item for item in forward.given if not contains_batch(item.template))
    known = made.union(item.value for item in fixed)
    arguments = tuple(dict.fromkeys(v for op in ops for v in op.inputs if v not in known))
    tensors = [v for v in arguments if _is_tensor(graph, v)]
    if not tensors:
        # Devices that were fixed by tracing become that of a tensor, where the stage is given any.
        tensors = [v for v in forward.arguments if _is_tensor(graph, v)][:1]
    others = (v for v in arguments if not _is_tensor(graph, v))
    read = {value for op in ops for value in op.inputs}
    return Method(
        ops=tuple(ops),
        arguments=(*tensors, *others),
        returns=returns,
        batch_sizes=forward.batch_sizes,
        given=tuple(item for item in fixed if item.value in read),
    )


def _is_tensor(graph: Graph, value: str) -> bool:
    return graph.values[value].kind is ValueKind.TENSOR


def _module_of(graph: Graph, ops: Sequence[Op], dead: Collection[str]) -> str:
    """The path of the module whose forward is all of these ops and no others, else "".

    Args:
        dead: ops that nobody writes.
    """
    common = _path(ops[0]).split(".")
    for op in ops:
        pairs = zip(common, _path(op).split("."), strict=False)
        common = [word for word, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    module = ".".join(common)
    names = {op.name for op in ops}.union(dead)
    within = (op.name for op in graph.ops if f"{_path(op)}.".startswith(f"{module}."))
    return module if module and names.issuperset(within) else ""


def _path(op: Op) -> str:
    return op.call.module if isinstance(op.call, ModuleCall) else op.module


def _call(graph: Graph, segment: Segment) -> Op:
    """The op by which `forward` calls a segment: it stands where its last result is made."""
    method = segment.method
    last = graph.producer[method.returns[-1]]
    arguments = (OwnMethod(segment.name), *map(Ref, method.arguments))
    return Op(
        segment.name,
        FunctionCall(checkpoint, arguments, {"use_reentrant": False}),
        method.returns[0] if len(method.returns) == 1 else method.returns,
        last.source,
    )


def runs_segment(made: Call) -> bool:
    """Whether a call is that of a segment, as `split_off` writes it."""
    return isinstance(made, FunctionCall) and made.function is checkpoint
