"""Joint stages: a mini-batch in micro-batches whose BatchNorm is that of the whole mini-batch.

A stage in which a sample's result depends on the others of its batch, or whose forward writes to
buffers what samples come to, cannot work micro-batch by micro-batch and come to what the model
makes of the mini-batch. With `--batchnorm exact` it is joint: it waits for all micro-batches, runs
once on all of them together, and gives the results out as micro-batches again; its backward
likewise. The stages before and after it stay pipelined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import PipelineError, UsageError
from ..spec import Leaf, PipelineSpec, StageSpec

BatchDims = Mapping[str, int | None]
"""The dimension of each value that grows with the micro-batch, None where none does."""


def joint_stages(stages: Sequence[StageSpec], replicas: int = 1) -> frozenset[int]:
    """The stages that are joint in training with exact BatchNorm.

    Those that mix samples, or write to buffers for each micro-batch anew. If there are any in a
    model that draws random numbers, every stage is: a joint stage draws for the mini-batch at once,
    other stages would for each micro-batch, and the masks would depend on the cut.

    Args:
        replicas: of the pipeline, which share every mini-batch.

    Raises:
        UsageError: when several replicas have joint stages: none sees the whole mini-batch.
    """
    found = joint_of(
        [stage.mixes or stage.writes_samples for stage in stages],
        random=any(stage.random_ops or stage.random_in_eval for stage in stages),
    )
    if found and replicas > 1:
        raise UsageError(
            f"exact BatchNorm is over the whole mini-batch, and each of {replicas} replicas has "
            "only its share of it",
            hint="use --batchnorm deferred, or --data-parallel 1",
        )
    return found


def joint_of(whole: Sequence[bool], *, random: bool) -> frozenset[int]:
    """The stages that are joint.

    Args:
        whole: for every stage, whether it mixes samples, or writes to buffers for each
            micro-batch anew.
        random: whether any stage draws random numbers.
    """
    if not any(whole):
        return frozenset()
    return frozenset(index for index, needed in enumerate(whole) if needed or random)


def batch_dims(spec: PipelineSpec, leaves: Sequence[Leaf]) -> BatchDims:
    """Those of inputs, boundary values and outputs."""
    return {
        **{source.name: source.batch_dim for source in spec.inputs},
        **{leaf.value: leaf.batch_dim for leaf in leaves},
        **{crossing.value: crossing.batch_dim for crossing in spec.crossings},
    }


@dataclass(frozen=True, slots=True)
class ActionBatch:
    """What one action of a stage works on: a micro-batch, or all of them as one.

    Values have a piece for each micro-batch, along their batch dimension. A value without one is
    the same in all micro-batches; its gradient is the sum of theirs.

    Attributes:
        microbatches: their numbers; under the first of them is kept what there is one of.
    """

    microbatches: tuple[int, ...]
    samples: tuple[int, ...]
    dims: BatchDims

    @property
    def first(self) -> int:
        """The number that stands for all."""
        return self.microbatches[0]

    def join(self, name: str, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        dim = self.dims[name] if len(pieces) > 1 else None
        return pieces[0] if dim is None else torch.cat(list(pieces), dim)

    def split(self, name: str, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        """The pieces of a value; views of it."""
        dim = self.dims.get(name) if len(self.samples) > 1 else None
        if dim is None:
            return (whole,) * len(self.samples)
        length, total = whole.shape[dim], sum(self.samples)
        if any(length * size % total for size in self.samples):
            raise PipelineError(
                f"{name} has {length} entries for {total} samples in dimension {dim}, which do "
                f"not split into micro-batches of {', '.join(map(str, self.samples))} samples",
                hint="use batches that the number of micro-batches divides",
            )
        return torch.split(whole, [length * size // total for size in self.samples], dim)

    def join_gradients(
        self, name: str, value: torch.Tensor, pieces: Sequence[torch.Tensor | None]
    ) -> torch.Tensor | None:
        """The gradient of `value` from those of its pieces; None is a gradient of zeros."""
        known = [piece for piece in pieces if piece is not None]
        if len(pieces) == 1 or not known:
            return pieces[0]
        if self.dims[name] is None:
            return torch.stack(known).sum(0)
        values = self.split(name, value.detach())
        return self.join(
            name,
            [
                torch.zeros_like(own) if piece is None else piece
                for own, piece in zip(values, pieces, strict=True)
            ],
        )

    def split_gradient(
        self, name: str, gradient: torch.Tensor | None
    ) -> Sequence[torch.Tensor | None]:
        """The gradients of the pieces that were joined: that of a single value is the first's."""
        if gradient is None or (len(self.samples) > 1 and self.dims[name] is None):
            return (gradient, *(None,) * (len(self.samples) - 1))
        return self.split(name, gradient)
