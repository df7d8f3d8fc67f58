"""The memory of the state of a stage, and the time of its update."""

from __future__ import annotations

from gpipe_compiler.cluster import Device, Link
from gpipe_compiler.ir import Graph, State
from gpipe_compiler.options import AnyOptimizer, copies_of, remembered_bytes
from gpipe_compiler.runtime.spec import Precision


def held_bytes(graph: Graph, state: State, optimizer: AnyOptimizer) -> int:
    """Bytes of a parameter or buffer, its gradient, and what the optimizer remembers of it.

    Under autocast a run keeps 16-bit copies of its weights besides.
    """
    if graph.loss is None or not state.requires_grad:
        return state.bytes
    half = state.bytes // 2 if graph.precision is not Precision.FP32 else 0
    return 2 * state.bytes + remembered_bytes(optimizer, state.name, state.bytes) + half


def updated_bytes(graph: Graph, state: State) -> int:
    """Bytes of a parameter that training changes."""
    return state.bytes if graph.loss is not None and state.requires_grad else 0


def update_s_per_byte(device: Device, optimizer: AnyOptimizer, replicas: int, link: Link) -> float:
    """Seconds for each byte of trained parameters, after the last backward.

    The optimizer reads weight and gradient, reads and writes what it remembers, and writes the
    weight; before it the replicas send every gradient around a ring twice (Patarasuk and Yuan,
    J. Parallel Distrib. Comput. 69(2), 2009).
    """
    steps = (3 + 2 * copies_of(optimizer)) / device.memory_bandwidth
    return steps + 2 * (replicas - 1) / replicas / link.bandwidth
