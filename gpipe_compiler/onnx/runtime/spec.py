"""The facts of a pipeline of ONNX stages; an emitted `schedule.py` writes them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ...runtime.limits import SampleLimit


@dataclass(frozen=True, slots=True)
class ArrayInput:
    """An array that the caller passes.

    Attributes:
        dtype: numpy's name of its type (`bfloat16` is none of numpy's: it comes as `uint16`);
            `str` for strings.
        shape: as planned; None for the batch, where any size will do.
        batch_dim: the dimension that is split into micro-batches; None where all take the whole.
        free: further dimensions that may be of any size.
        integers: the first integer that random numbers may be, and the one after the last.
        words: that random strings are taken from.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    batch_dim: int | None = 0
    free: tuple[int, ...] = ()
    integers: tuple[int, int] = (0, 2)
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ArrayOutput:
    """An array that the pipeline returns.

    Attributes:
        batch_dim: the dimension in which micro-batches are put together; None where all of them
            give the same.
        dtype: the name of its type where that is none of numpy's, so that it comes as integers of
            the same bits.
    """

    name: str
    batch_dim: int | None = 0
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class OnnxStageSpec:
    """The model of one stage.

    Attributes:
        file: in the folder of the package.
        inputs, outputs: values, by the names that they have in the model.
    """

    file: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class OnnxPipelineSpec:
    """Everything about a pipeline but its weights.

    Attributes:
        placement: the device of each stage.
        devices: for every device, as planned: `cpu`, `cuda:0`, or a provider of ONNX Runtime.
        orders: for each device, its actions on the planned number of micro-batches: `0F0 0F1`.
        microbatch_size: samples in a micro-batch, as planned.
        fixed: whether micro-batches can be of no other size.
        quantised: whether nodes round to integers, so that last places may show in full.
        whole_batch: why micro-batches do not give what the mini-batch does, "" where they do.
        alone: by which line the model computes something else of a single sample; "" where it does
            not.
        state: inputs that a session holds between calls, each with the output that it becomes.
        limits: of the samples in a mini-batch, where one of any number could not be tried.
        tolerance: by how much of its largest entry an output may differ from the whole model's.
    """

    name: str
    stages: tuple[OnnxStageSpec, ...]
    inputs: tuple[ArrayInput, ...]
    outputs: tuple[ArrayOutput, ...]
    placement: tuple[int, ...]
    devices: tuple[str, ...]
    orders: tuple[str, ...]
    microbatches: int
    microbatch_size: int
    fixed: bool = False
    quantised: bool = False
    whole_batch: str = ""
    tolerance: float = 1e-4
    alone: str = ""
    limits: tuple[SampleLimit, ...] = ()
    state: tuple[tuple[str, str], ...] = ()

    @cached_property
    def held_states(self) -> Mapping[str, int]:
        """By state that a single stage takes, and makes the next one of, that stage."""
        found = {}
        for past, present in self.state:
            takers = [n for n, stage in enumerate(self.stages) if past in stage.inputs]
            if len(takers) == 1 and present in self.stages[takers[0]].outputs:
                found[past] = takers[0]
        return found

    def state_of(self, stage: int) -> Mapping[str, str]:
        """The states that a stage holds, each with the output that it becomes."""
        return {
            past: present for past, present in self.state if self.held_states.get(past) == stage
        }
