"""The memory of the state of a stage and of its optimizer, and the time of its update."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gpipe_compiler.cluster import Device, Link
from gpipe_compiler.ir import Graph, State
from gpipe_compiler.ir.arguments import tensors_in
from gpipe_compiler.options import (
    WHOLE,
    AnyOptimizer,
    Division,
    OwnOptimizer,
    copies_of,
    remembered_bytes,
)
from gpipe_compiler.runtime.spec import Precision
from gpipe_compiler.runtime.wording import said


def held_bytes(
    graph: Graph, state: State, optimizer: AnyOptimizer, division: Division = WHOLE
) -> int:
    """Bytes of a parameter or buffer, its gradient, and what the optimizer remembers of it.

    Under autocast a run keeps 16-bit copies of its weights besides.
    """
    if graph.loss is None or not state.requires_grad:
        return state.bytes
    half = state.bytes // 2 if graph.precision is not Precision.FP32 else 0
    remembered = remembered_bytes(optimizer, state.name, state.bytes)
    if division.parts == 1:
        return 2 * state.bytes + remembered + half
    part, own = division.part_of(state.bytes), division.part_of(remembered) + half
    # What lies here of a weight lies beside what is gathered of it.
    return (2 * part if division.always else 2 * state.bytes + part) + own


def updated_bytes(graph: Graph, state: State) -> int:
    return state.bytes if graph.loss is not None and state.requires_grad else 0


def update_s_per_byte(
    device: Device,
    optimizer: AnyOptimizer,
    replicas: int,
    link: Link,
    division: Division = WHOLE,
) -> float:
    """Seconds for each byte of trained parameters, after the last backward.

    The optimizer reads weight and gradient, reads and writes what it remembers, and writes the
    weight; before it the replicas send every gradient around a ring twice (Patarasuk and Yuan,
    J. Parallel Distrib. Comput. 69(2), 2009). Replicas that divide the weights send every gradient
    around once, and every weight, before the next step, or else for every micro-batch.
    """
    steps = 1 / division.parts * (3 + 2 * copies_of(optimizer)) / device.memory_bandwidth
    if division.always:
        return steps
    return steps + 2 * (replicas - 1) / replicas / link.bandwidth


# --- an optimizer of the user's own ---------------------------------------------------------------


_FILLED_BYTES = 256 * 2**20
"""Of the parameters at most that are made to see a step which asks for numbers."""


def own_optimizer(graph: Graph, make: Callable[..., object]) -> OwnOptimizer | str:
    """What the optimizer of the user's file remembers of every parameter; or why that is not known.

    Seen in a step on parameters without memory; or with it, where they are small and it fails.
    """
    trained = [state for state in graph.state.values() if state.requires_grad]
    whole = sum(state.bytes for state in trained)
    ways: list[contextlib.AbstractContextManager[object]]
    ways = [FakeTensorMode(allow_non_fake_inputs=True)]
    if whole <= _FILLED_BYTES:
        ways.append(contextlib.nullcontext())
    problem = ""
    for way in ways:
        try:
            with way:
                return _after_a_step(trained, make, whole or 1)
        except Exception as error:  # noqa: BLE001  # whatever the user's code raises
            problem = said(error)
    return problem


def _after_a_step(
    trained: Sequence[State], make: Callable[..., object], whole: int
) -> OwnOptimizer | str:
    parameters = {state.name: _parameter(state) for state in trained}
    optimizer = make(list(parameters.values()))
    if not isinstance(optimizer, torch.optim.Optimizer):
        return f"it makes {type(optimizer).__name__}, which is no torch.optim.Optimizer"
    optimizer.step()
    remembered = {
        name: sum(t.numel() * t.element_size() for t in tensors_in(optimizer.state[parameter]))
        for name, parameter in parameters.items()
    }
    return OwnOptimizer(type(optimizer).__name__, remembered, sum(remembered.values()) / whole)


def _parameter(state: State) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(state.shape, dtype=state.dtype))
    parameter.grad = torch.ones_like(parameter)
    return parameter
