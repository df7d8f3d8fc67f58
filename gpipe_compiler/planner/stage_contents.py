"""What a stage of a cut holds, takes and gives."""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_compiler.ir import Graph, StateKind
from gpipe_compiler.options.optimizer_state import AnyOptimizer
from gpipe_compiler.passes.footprint import held_bytes
from gpipe_compiler.plan import Stage
from gpipe_compiler.planner.cut_problem import Facts, StageTable
from gpipe_compiler.runtime.spec import Crossing, Remat
from gpipe_compiler.simulate.step import StageTimes


def stage_of_cut(
    facts: Facts,
    table: StageTable,
    index: int,
    times: StageTimes,
    recompute: bool,
    optimizer: AnyOptimizer,
) -> Stage:
    """One stage, with its times.

    Args:
        recompute: whether it runs its whole forward again for the backward.
    """
    graph = facts.graph
    ops = table.ops[index]
    names = dict.fromkeys(name for op in ops for name in graph.op_of[op].states(graph.modules))
    if index == 0:
        names.update(dict.fromkeys(_unread(graph)))
    states = [graph.state[name] for name in names]
    received = [crossing for crossing in table.crossings if index in crossing.targets]
    return Stage(
        index=index,
        ops=ops,
        duplicates=table.duplicates[index],
        inputs=table.inputs[index],
        outputs=table.outputs[index],
        state=tuple(names),
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        receive_bytes=_bytes(graph, received),
        gradient_bytes=_bytes(graph, [crossing for crossing in received if crossing.gradient]),
        parameter_bytes=sum(s.bytes for s in states if s.kind is StateKind.PARAMETER),
        parameter_count=sum(
            s.bytes // s.dtype.itemsize for s in states if s.kind is StateKind.PARAMETER
        ),
        saved_bytes=facts.saved.saved_bytes(ops) if graph.loss is not None else 0,
        input_bytes=sum(graph.values[name].bytes for name in table.inputs[index]),
        remat=Remat.FULL if recompute else Remat.NONE,
        state_bytes=sum(held_bytes(graph, state, optimizer) for state in states),
        weight_s=times.weight_s,
        update_s=times.update_s,
    )


def _unread(graph: Graph) -> list[str]:
    """The parameters and buffers that no op reads: the model's state all the same, so kept."""
    read = {name for op in graph.ops for name in op.states(graph.modules)}
    return [
        name
        for name, state in graph.state.items()
        if name not in read and state.kind is not StateKind.CONSTANT
    ]


def _bytes(graph: Graph, crossings: Sequence[Crossing]) -> int:
    return sum(graph.values[crossing.value].bytes for crossing in crossings)
