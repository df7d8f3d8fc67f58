"""Where the stages of a pipeline are, and in which order they work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from gpipe_compiler.cluster import Device, is_host
from gpipe_compiler.ir import Graph
from gpipe_compiler.options import AnyOptimizer, Division
from gpipe_compiler.plan import Stage
from gpipe_compiler.runtime.schedule import lower
from gpipe_compiler.runtime.schedule.actions import Orders, Programs, split_stages
from gpipe_compiler.runtime.spec import (
    Crossing,
    Leaf,
    PipelineSpec,
    ScheduleKind,
    StageSpec,
    WeightSharding,
)


@dataclass(frozen=True)
class Layout:
    """Where the stages are and in which order they work.

    Attributes:
        placement: the device of each stage.
        joint: the stages that take all micro-batches as one.
        shared: the trained parameters that several stages own, with these.
        sharding: what the replicas divide among them.
        device: the first of the pipeline; in what counts here the others are like it.
    """

    stages: tuple[Stage, ...]
    crossings: tuple[Crossing, ...]
    orders: Orders
    placement: tuple[int, ...]
    joint: tuple[int, ...]
    shared: Mapping[str, Sequence[int]]
    microbatches: int
    replicas: int
    sharding: WeightSharding
    optimizer: AnyOptimizer
    device: Device

    @property
    def on_host(self) -> bool:
        """Whether the devices are hosts, where optimizers step parameter by parameter, and autocast
        has rules of its own."""
        return is_host(self.device)

    @property
    def process(self) -> bool:
        """Whether a host's memory holds the process, with what kernels take for a moment."""
        return self.device.kept_free > 0

    @cached_property
    def programs(self) -> Programs:
        return lower(self.orders, self.placement, self.crossings, self.shared, self.joint)

    @cached_property
    def division(self) -> Division:
        """Into how many parts what is, that the replicas divide."""
        return Division.of(self.sharding, self.replicas)

    @cached_property
    def split(self) -> frozenset[int]:
        return split_stages(self.orders)

    def trained(self, graph: Graph, stages: Sequence[int]) -> dict[str, int]:
        """The bytes of the parameters of some stages that are trained, by name."""
        if graph.loss is None:
            return {}
        names = dict.fromkeys(name for stage in stages for name in self.stages[stage].state)
        return {name: graph.state[name].bytes for name in names if graph.state[name].requires_grad}

    def spec(self, graph: Graph) -> PipelineSpec:
        """The part of the package's spec that says which values are sent where."""
        return PipelineSpec(
            name=graph.name,
            stages=tuple(StageSpec(nn.Module, s.inputs, s.outputs) for s in self.stages),
            inputs=graph.inputs,
            crossings=self.crossings,
            outputs=tuple(Leaf(name, graph.values[name].batch_dim) for name in graph.output_values),
            loss=None,
            schedule=ScheduleKind.GPIPE,
            microbatches=self.microbatches,
            microbatch_size=graph.batch_size,
            placement=self.placement,
        )
