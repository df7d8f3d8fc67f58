"""Costs on every kind of device of a cluster, estimated or measured on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpipe_compiler.cluster import Device, is_here, this_machine
from gpipe_compiler.ir import Graph
from gpipe_compiler.passes.cost import Costs, OpCost, rooflines
from gpipe_compiler.passes.measure import measure


def costs_by_kind(graph: Graph, kinds: Sequence[Device], *, measured: bool) -> list[Costs]:
    """Costs of an annotated graph on each kind of device.

    Args:
        measured: time every distinct op on this machine. On other kinds of devices it is then
            taken to need as much more or less than here as its roofline says.

    Raises:
        ModelError: naming the op that cannot run.
    """
    if not measured:
        return rooflines(graph, kinds)
    here = next(filter(is_here, kinds), None) or this_machine()
    times = measure(graph, here)
    if all(map(is_here, kinds)):
        return [times] * len(kinds)
    return on_kinds(times, rooflines(graph, [here, *kinds]), kinds)


def on_kinds(times: Costs, estimated: Sequence[Costs], kinds: Sequence[Device]) -> list[Costs]:
    """Times of this machine, on it and on other kinds of devices.

    Args:
        estimated: by the rooflines of this machine and of each kind.
    """
    if all(map(is_here, kinds)):
        return [times] * len(kinds)
    at_home, *elsewhere = estimated
    far = ", ".join(dict.fromkeys(kind.name for kind in kinds if not is_here(kind)))
    source = f"{times.source}; on {far} scaled by rooflines"
    return [
        replace(times if is_here(kind) else _scaled(times, at_home, there), source=source)
        for kind, there in zip(kinds, elsewhere, strict=True)
    ]


def _scaled(times: Costs, at_home: Costs, there: Costs) -> Costs:
    """Measured times, op by op as much longer or shorter as on the roofline of another device."""
    ops = {
        name: _scaled_op(cost, at_home.ops[name], there.ops[name])
        for name, cost in times.ops.items()
    }
    return replace(times, ops=ops)


def _scaled_op(cost: OpCost, at_home: OpCost, there: OpCost) -> OpCost:
    def ratio(far_s: float, near_s: float) -> float:
        return far_s / near_s if near_s > 0 else 1.0

    back = ratio(there.backward_s, at_home.backward_s)
    return replace(
        cost,
        forward_s=cost.forward_s * ratio(there.forward_s, at_home.forward_s),
        backward_s=cost.backward_s * back,
        weight_s=cost.weight_s * back,
    )
