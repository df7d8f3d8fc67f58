"""Computing in 16 bits: torch.autocast around each stage's forward, on the thread that runs it.

Autocast keeps the 16-bit copy of every weight until its outermost region is left, so that a weight
is cast once, and the gradients of all its uses in a forward are summed before they are cast back.
Here a region is a whole run, over all micro-batches: were it a stage's forward, every micro-batch
that waits for its backward would hold copies of its own. The copies lie in one table of the
process: the thread that ends first must not empty it under the others, so the runner does, after
all of them. No copy outlives its run, and the optimizer's step comes after that.

In which types the boundary values are, when a pipeline runs in another precision than planned.

Who receives a value has to know its type before it comes. What autocast makes of an op depends on
the kind of device: a LayerNorm gives fp32 on CUDA and 16 bits on the CPU. So all the stages are run
on fake tensors, which have types and shapes but no numbers: no weights are read, nothing is
computed, and every rank derives the same types by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from ..errors import PipelineError
from ..spec import PipelineSpec, Precision, StageSpec
from ..wording import said
from .building import put

_LOWER = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


def lower_dtype(precision: Precision) -> torch.dtype | None:
    """The type that autocast casts to; None for a precision without autocast."""
    return _LOWER.get(precision)


@contextlib.contextmanager
def run_of_device(precision: Precision) -> Iterator[None]:
    """Around all that a device's thread does in a run: weights stay cast from forward to forward.

    Autocast is not on in between: it is for forwards only.
    """
    if lower_dtype(precision) is None:
        yield
        return
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()


def autocast(
    precision: Precision, device: torch.device
) -> contextlib.AbstractContextManager[object]:
    """Around one forward of a stage that computes on `device`, its loss included."""
    dtype = lower_dtype(precision)
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


@contextlib.contextmanager
def layers_by_ops() -> Iterator[None]:
    """Lets PyTorch compute encoder layers by their ops, as stages do, and not as one kernel."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def no_weight(argument: torch.Tensor, precision: Precision) -> torch.Tensor:
    """A stage's argument that needs a gradient, as autocast is to see it: as no leaf of the graph.

    In the plain model it is none: every use of it is cast by itself, and the gradients are summed
    after they were cast back. A leaf would be taken for a weight.
    """
    return argument if lower_dtype(precision) is None else argument.view_as(argument)


@contextlib.contextmanager
def run_of_devices(precision: Precision) -> Iterator[None]:
    """Around the run of all devices of this process: no weight stays cast afterwards."""
    try:
        yield
    finally:
        if lower_dtype(precision) is not None:
            torch.clear_autocast_cache()


def crossing_dtypes(
    spec: PipelineSpec, precision: Precision, device_type: str, *, training: bool = True
) -> dict[str, torch.dtype]:
    """The types of the boundary values by name, gradients having those of their values.

    A stage whose ops need numbers (to know a shape, say) cannot be run so: the values that it makes
    are taken to be as planned, if the plan was made for this precision.

    Args:
        device_type: "cpu" or "cuda".
        training: the mode of the stages.

    Raises:
        PipelineError: when the types cannot be told.
    """
    planned = {crossing.value: crossing.dtype for crossing in spec.crossings}
    if precision is spec.precision is Precision.FP32:
        return planned
    return _FakeRun(spec, precision, device_type, training=training).types()


class _FakeRun:
    """All the stages, one after another, on fake tensors."""

    def __init__(
        self, spec: PipelineSpec, precision: Precision, device_type: str, *, training: bool
    ) -> None:
        # Imported here: it takes long, and most pipelines never come here.
        from torch._subclasses.fake_tensor import FakeTensorMode

        self.spec = spec
        self.precision = precision
        self.device = torch.device(device_type)
        self.training = training
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.crossings = {crossing.value: crossing for crossing in spec.crossings}

    def types(self) -> dict[str, torch.dtype]:
        # Without gradients: autograd asks for a device that may not be there.
        with self.mode, torch.no_grad():
            values = self._inputs()
            for number, stage in enumerate(self.spec.stages):
                values.update(self._made(number, stage, values))
        return {name: values[name].dtype for name in self.crossings}

    def _inputs(self) -> dict[str, torch.Tensor]:
        known = {}
        for source in self.spec.inputs:
            crossing = self.crossings.get(source.name)
            shape, dtype = source.example_shape, source.dtype
            if shape is not None and dtype is not None:
                sizes = list(shape)
                if source.batch_dim is not None:
                    sizes[source.batch_dim] = self.spec.microbatch_size
                known[source.name] = torch.empty(sizes, dtype=dtype, device=self.device)
            elif crossing is not None:
                known[source.name] = self._planned(source.name)
        return known

    def _planned(self, name: str) -> torch.Tensor:
        crossing = self.crossings[name]
        return torch.empty(crossing.example_shape, dtype=crossing.dtype, device=self.device)

    def _made(
        self, number: int, stage: StageSpec, values: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The stage's outputs; those that cross, as planned, where it cannot be run."""
        try:
            return self._outputs(stage, values)
        except Exception as error:  # whatever the model's code raises
            if self.precision is not self.spec.precision:
                raise PipelineError(
                    f"the types of the values that stage {number} sends cannot be told for "
                    f"precision {self.precision.value}: {said(error)}",
                    hint=f"compile with --precision {self.precision.value}",
                ) from error
            return {name: self._planned(name) for name in stage.outputs if name in self.crossings}

    def _outputs(
        self, stage: StageSpec, values: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        module = self._module(stage)
        arguments = [values[name] for name in stage.inputs]
        with _of_absent(self.precision, self.device.type):
            result = module(*arguments)
        single = len(stage.outputs) == 1
        return dict(zip(stage.outputs, (result,) if single else result, strict=True))

    def _module(self, stage: StageSpec) -> nn.Module:
        with torch.device("meta"):
            module = stage.module()
        for own, parameter in list(module.named_parameters(remove_duplicate=False)):
            put(module, own, nn.Parameter(self._like(parameter), requires_grad=False))
        for own, buffer in list(module.named_buffers(remove_duplicate=False)):
            put(module, own, self._like(buffer))
        return module.train(self.training)

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        size, stride = tensor.shape, tensor.stride()
        return torch.empty_strided(size, stride, dtype=tensor.dtype, device=self.device)


@contextlib.contextmanager
def _of_absent(precision: Precision, kind: str) -> Iterator[None]:
    """As torch.autocast, which refuses a kind of device that is not there."""
    enabled, before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    dtype = lower_dtype(precision)
    torch.set_autocast_enabled(kind, dtype is not None)
    torch.set_autocast_dtype(kind, dtype or before)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, before)
