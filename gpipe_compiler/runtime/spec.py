"""The facts of a pipeline that its engine needs; an emitted `schedule.py` writes them out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from .limits import NO_GROUP, SampleGroup, SampleLimit
from .schedule.actions import Crossing
from .schedule.choosing import ScheduleKind
from .sizes import (
    Relation,
    Requirement,
    Shape,
    Size,
    example_shape,
    larger,
    sizes_in,
    smaller,
)
from .structure import (
    Joined,
    Leaf,
    LossTerm,
    OutputClass,
    OutputTerm,
    Reduction,
    Samples,
    Structure,
    Unreturned,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "BatchNorm", "Carried", "Crossing", "Input", "Joined", "Leaf", "LossSpec", "LossTerm",
    "OptimizerKind", "OutputClass", "OutputTerm", "PipelineSpec", "Precision", "Reduction",
    "Relation", "Remat", "Requirement", "SampleGroup", "SampleLimit", "Samples", "ScheduleKind",
    "Size", "StageSpec", "Steps", "Structure", "Unreturned", "WeightSharding", "covers", "larger",
    "layer_name", "smaller",
]  # fmt: skip


class Remat(Enum):
    """What a stage keeps of a micro-batch between its forward and its backward.

    NONE keeps all that autograd saves. FULL keeps what the stage received, and runs its forward a
    second time when the backward is due (rematerialisation; Chen et al., arXiv 1604.06174).
    SEGMENTS does so in parts: of each segment of the stage, what it is given is kept, and it runs
    again when the backward reaches it.
    """

    NONE = "none"
    FULL = "full"
    SEGMENTS = "segments"


class BatchNorm(Enum):
    """Over what BatchNorm normalises, and when its running statistics change.

    MICRO: each micro-batch by itself, as the plain model does with micro-batches one by one.
    DEFERRED: normalised over the micro-batch; the running statistics change once a step, by those
    of the mini-batch (GPipe, arXiv 1811.06965, section 2.2). EXACT: both over the mini-batch, as
    the plain model does with the whole of it.
    """

    MICRO = "micro"
    DEFERRED = "deferred"
    EXACT = "exact"


class Precision(Enum):
    """In which floating type the stages compute: as they are, or under torch.autocast."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class OptimizerKind(Enum):
    """The optimizers of the command, by the name a user types."""

    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAM = "adam"
    ADAMW = "adamw"


class WeightSharding(Enum):
    """What replicas of the pipeline divide among them; each then has only its own rows of it.

    NONE: nothing, every replica has all. OPTIMIZER: what the optimizer remembers, and the weights
    between steps: they are gathered before a step, and gradients reduced after it (stage 1 of ZeRO;
    Rajbhandari et al., arXiv 1910.02054). FULL: weights and gradients always: each block is
    gathered in every forward and backward of a micro-batch, and its gradients reduced (stage 3).
    """

    NONE = "none"
    OPTIMIZER = "optimizer"
    FULL = "full"

    @property
    def described(self) -> str:
        """What is divided, in words; "" for nothing."""
        if self is WeightSharding.FULL:
            return "weights, gradients and optimizer divided"
        return "" if self is WeightSharding.NONE else "optimizer and resting weights divided"


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that the caller passes to the pipeline.

    Attributes:
        path: where it stands in the call: ("args", 0), ("kwargs", "mask"), ("target",); further
            keys and indices lead into nested tuples, lists and dicts.
        batch_dim: the dimension that is the batch, so that it is split into micro-batches along
            it; None where all samples share the tensor.
        shape, dtype: what is accepted, where known; the batch dimension may differ, and so may
            what stands there as a `Size`.
    """

    name: str
    path: tuple[str | int, ...]
    batch_dim: int | None = 0
    shape: Shape | None = None
    dtype: torch.dtype | None = None

    @property
    def batched(self) -> bool:
        return self.batch_dim is not None

    @property
    def example_shape(self) -> tuple[int, ...] | None:
        """The shape of the example that the package was compiled with, where known."""
        return None if self.shape is None else example_shape(self.shape)

    def samples(self, tensor: torch.Tensor) -> int:
        assert self.batch_dim is not None
        return tensor.shape[self.batch_dim]

    def part(self, tensor: torch.Tensor, start: int, size: int) -> torch.Tensor:
        """A view of that many samples, or those that are left; all of what samples share."""
        if self.batch_dim is None:
            return tensor
        return tensor.narrow(self.batch_dim, start, min(size, self.samples(tensor) - start))


@dataclass(frozen=True, slots=True)
class Carried:
    """State between calls: an input that a session holds, and the output that it becomes.

    Attributes:
        past, present: the input, and the value that the next call takes in its place.
        place: the way to the present in what the model returns.
        shape: of the present; its dimension that is the batch says nothing.
    """

    past: str
    present: str
    place: tuple[str | int, ...]
    shape: Shape


Steps: TypeAlias = tuple[tuple[Any, ...], ...]
"""How a tensor of a model without weights gets its first numbers; see `core/building.py`."""


def layer_name(name: str) -> str:
    """A name with `*` for numbers: of `layers.3.norm.weight`, `layers.*.norm.weight`."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def covers(names: Iterable[str], name: str) -> bool:
    """Whether a tensor or the module that it is in stands among some names."""
    return any(name == item or name.startswith(f"{item}.") for item in names)


@cache
def _own_state(module: type[torch.nn.Module]) -> Mapping[str, torch.Tensor]:
    """The parameters and buffers of a stage by its own names, without memory."""
    import torch

    with torch.device("meta"):
        made = module()
    parameters = made.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(made.named_buffers(remove_duplicate=False))}


@dataclass(frozen=True, slots=True)
class StageSpec:
    """How the engine calls one stage, and what the stage's state is called in the model.

    `forward(*inputs)` returns one tensor for one output, otherwise a tuple in the order of
    `outputs`. The last stage of a pipeline with a loss that is no output of the model also has
    `loss(*loss_inputs)`, whose arguments are inputs or outputs of that stage.

    Attributes:
        module: the class of the stage, constructed without arguments.
        renamed: those of the stage's own state names that are not the model's first for the
            tensor, to that; a `PipelineSpec` adds further names of tied parameters.
        random_ops: for each random op of one forward (then of `loss`), in the order the stage runs
            them, its number in the whole model.
        random_in_eval: the same of those that run in eval mode.
        shared_random, shared_in_eval: those of `random_ops` and of `random_in_eval` whose draw has
            no batch dimension: all micro-batches of a mini-batch share it.
        initial: for a model without weights: by the model's names, how the state begins; `*` in
            them stands for the number of a layer.
        writes: the buffers and frozen parameters, by own names, that a forward in training mode
            writes to; a module stands for all of its.
        once: those of what a forward writes to in either mode, as there, that it writes without
            looking at samples, so that a mini-batch changes them once.
        mixes: whether a sample's result in training mode depends on the other samples of its
            micro-batch, as with BatchNorm.
        autocasts: whether the model itself runs some of its ops under autocast, which gives other
            types on other kinds of devices.
        remat: what is kept between forward and backward, as planned.
        segments: by the paths of the modules and the names of the methods that `forward` calls
            through torch's checkpoint, the buffers of `writes` that each of them reads or writes,
            or modules as there.
    """

    module: type[torch.nn.Module]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    renamed: Mapping[str, str] = field(default_factory=dict)
    loss_inputs: tuple[str, ...] = ()
    random_ops: tuple[int, ...] = ()
    random_in_eval: tuple[int, ...] = ()
    shared_random: tuple[int, ...] = ()
    shared_in_eval: tuple[int, ...] = ()
    initial: Mapping[str, Steps] = field(default_factory=dict)
    writes: tuple[str, ...] = ()
    once: tuple[str, ...] = ()
    mixes: bool = False
    autocasts: bool = False
    remat: Remat = Remat.NONE
    segments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def state(self) -> Mapping[str, str]:
        """The stage's own state names to the model's canonical ones."""
        return {own: self.named(own) for own in _own_state(self.module)}  # type: ignore[arg-type]  # a class can be hashed

    @property
    def trained(self) -> frozenset[str]:
        """The parameters that are trained, by the model's names."""
        state = _own_state(self.module)  # type: ignore[arg-type]  # as above
        return frozenset(self.named(own) for own, tensor in state.items() if tensor.requires_grad)

    @property
    def trainable(self) -> frozenset[str]:
        """The parameters that may be trained, also those that are frozen, by the model's names."""
        import torch

        parameter = torch.nn.Parameter
        state = _own_state(self.module).items()  # type: ignore[arg-type]  # as above
        kinds = [(own, x) for own, x in state if isinstance(x, parameter)]
        return frozenset(
            self.named(own) for own, x in kinds if x.is_floating_point() or x.is_complex()
        )

    @property
    def writes_samples(self) -> bool:
        """Whether training writes to anything for each micro-batch anew."""
        return not set(self.writes) <= set(self.once)

    def named(self, own: str) -> str:
        return self.renamed.get(own, own)

    def beginning(self, name: str) -> Steps | None:
        """How a tensor of the stage begins, by the model's name; None where nothing is said."""
        return self.initial.get(name, self.initial.get(layer_name(name)))

    def randoms(self, *, training: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The numbers of the random ops that run in a mode, and of those that are shared."""
        if training:
            return self.random_ops, self.shared_random
        return self.random_in_eval, self.shared_in_eval


@dataclass(frozen=True, slots=True)
class LossSpec:
    """Which value is minimised, and how micro-batches combine.

    Attributes:
        terms: what it adds up: itself alone, or means over different things. Of several `loss`
            returns a tuple.
        separate: whether it comes from the last stage's `loss` method, and not from `forward`.
        weight: for means over something other than samples (over the tokens that count): a module
            like a stage that takes inputs of the pipeline and returns a scalar, the number of
            things (or their weight) in a micro-batch; a tuple where several terms are `counted`.
        over_batch: whether the last stage computes it once, of all micro-batches as one.
        returned: whether the model itself returns it, as `loss` of what it returns.
    """

    value: str
    terms: tuple[LossTerm, ...]
    separate: bool
    weight: StageSpec | None = None
    over_batch: bool = False
    returned: bool = False


@dataclass(frozen=True)
class GivenValue:
    """A value of Python's in the call that the model was compiled with.

    Attributes:
        path: where it stands in the call.
        text: what it is; see `core/nest.py`.
    """

    path: tuple[str | int, ...]
    text: str


@dataclass(frozen=True)
class PipelineSpec:
    """Everything about a pipeline but its weights.

    Attributes:
        placement: the device of each stage, as planned; empty for one device per stage.
        device_order: for every device of the pipeline, its number among those of the machine (or,
            host by host, of all machines); empty where they are taken in order.
        orders: for the default schedule, micro-batch count and placement, each device's actions as
            `0F0 0F1 ...`.
        microbatch_size: samples in a micro-batch, as planned; the shapes of crossings are for it.
        aliases: further names of tied parameters to the canonical ones.
        reordered: modules and tensors in the model's order, where that is not the stages'.
        precision: as planned; the dtypes of crossings are those under it.
        replicas: of the pipeline, as planned for training.
        sharding: what these divide among them, as planned.
        unlike: the precisions in which the model is another program than this one, and why.
        whole_batch: why micro-batches do not give what the mini-batch does, "" where they do.
        classes: of the model's own, in what it returns.
        requires: what the model demands of the sizes of a call.
        limits: of the samples in a mini-batch, where one of any number could not be tried.
        alone: by mode (training or not), the line by which the model computes something else of
            one sample than the stages.
        fused: by mode, the name and line of a layer that torch computes as one kernel on a CPU:
            under autocast it gives other numbers than the stages.
        packs: the same of an encoder that packs what is padded in eval mode without autocast.
        several: whether one sample is not computed as in a larger batch, so that micro-batches have
            two or more.
        group: the samples that no two micro-batches may share.
        left_out: what the model returns in training, where that is no part of `outputs`; "" where
            it is.
        decides: whether a stage may refuse a batch by the values that it computes.
        given: the values of Python's in the call that the model was compiled with.
        carried: state that a session holds.
    """

    name: str
    stages: tuple[StageSpec, ...]
    inputs: tuple[Input, ...]
    crossings: tuple[Crossing, ...]
    outputs: Structure
    loss: LossSpec | None
    schedule: ScheduleKind
    microbatches: int
    microbatch_size: int
    orders: tuple[str, ...] = ()
    placement: tuple[int, ...] = ()
    device_order: tuple[int, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    reordered: tuple[str, ...] = ()
    batchnorm: BatchNorm = BatchNorm.MICRO
    precision: Precision = Precision.FP32
    replicas: int = 1
    sharding: WeightSharding = WeightSharding.NONE
    unlike: Mapping[Precision, str] = field(default_factory=dict)
    whole_batch: str = ""
    classes: tuple[OutputClass, ...] = ()
    requires: tuple[Requirement, ...] = ()
    limits: tuple[SampleLimit, ...] = ()
    alone: Mapping[bool, str] = field(default_factory=dict)
    fused: Mapping[bool, str] = field(default_factory=dict)
    packs: str = ""
    several: bool = False
    group: SampleGroup = NO_GROUP
    left_out: str = ""
    decides: bool = False
    given: tuple[GivenValue, ...] = ()
    carried: tuple[Carried, ...] = ()

    @cached_property
    def sizes(self) -> tuple[Size, ...]:
        """Those that may vary from call to call, each once, in the order of the inputs."""
        dims = [dim for source in self.inputs for dim in source.shape or ()]
        return tuple(dict.fromkeys(sizes_in(dims)))

    def __post_init__(self) -> None:
        """Tells the stages the further names of tied parameters."""
        if not self.aliases:
            return
        stages = tuple(self._with_aliases(stage) for stage in self.stages)
        object.__setattr__(self, "stages", stages)
        if self.loss is not None and self.loss.weight is not None:
            weight = self._with_aliases(self.loss.weight)
            object.__setattr__(self, "loss", dataclasses.replace(self.loss, weight=weight))

    def _with_aliases(self, stage: StageSpec) -> StageSpec:
        return dataclasses.replace(stage, renamed={**self.aliases, **stage.renamed})
