"""What a case is: a model as its user would write it, and what has to come of compiling it.

This file and all of `models/` know plain PyTorch only: the judge imports them too.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

SAMPLES = 8
"""In the example batch, from which a package is compiled."""

Batch = tuple[object, object]
"""Inputs in any of the forms that `Pipeline.step` takes, and a target or None."""


@dataclass(frozen=True)
class Refused:
    """The compiler says no, with exit code 1.

    The line at fault is the one that ends in `# refused: NAME`, with the name of the case.

    Attributes:
        cause: what the message says, apart from its hint.
        way_out: what the hint names.
        accept: options that are the way out; with them the case is exact. "" where the way out is
            to write the model differently.
        at_line: whether one line of the user's is at fault.
        reference: as `Case.reference`, with the way out taken.
    """

    cause: tuple[str, ...]
    way_out: tuple[str, ...]
    accept: str = ""
    at_line: bool = True
    reference: str = "micro-batches"


@dataclass(frozen=True)
class RefusedAtStep:
    """The package is compiled, is exact, and refuses another batch before any weight changes.

    Attributes:
        inputs, target: of that batch.
        arguments: of the pipeline.
        cause, way_out: what the message says.
    """

    inputs: Callable[[], object]
    cause: tuple[str, ...]
    target: Callable[[], object] = lambda: None
    way_out: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A user's model file, what is asked of the compiler, and what has to come of it.

    Attributes:
        name: unique within its file of `models/`.
        model: `build_model()`.
        inputs, target: of a batch of so many samples, with values that depend on torch's seed.
        later_inputs, later_target: the same for the batches of the judge, where their values are
            to be of another kind than those of the example (padding, other lengths).
        loss: `loss_fn(output, target)`; None for a model that returns its own, or infers only.
        options: of `gpipe-compile`, besides `--stages 2`; of an option that is given twice the last
            one counts.
        microbatches: None for what the compiler chooses by itself.
        sizes: samples of the batches that the judge runs.
        reference: "whole", or "micro-batches" where the user has chosen a loop of micro-batches.
        manners: arguments of the `Pipeline`s that are judged; None for three of the usual ones.
        replay: the output of the model for the numbers that the pipeline drew, which are part of
            the output that it returned: `replay(model, inputs, output)`.
        as_evaluated: whether outputs are asked for in eval mode alone, as training has others.
        random: whether training draws numbers that nothing can replay. Then manners of computing
            are compared with each other, and only eval mode against the model.
        rounding: whether gradients may differ by what the model's own rounding moves them, for
            models whose conditioning is not the case's to choose.
        by_ops: whether the judge has PyTorch compute encoder layers by their ops, and not as one
            kernel.
        hooks: what else the file offers, such as `loss_function`.
        expect: None for exact.
        quick: whether `make test` runs it.
    """

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[int], object]
    loss: Callable[..., torch.Tensor] | None = None
    target: Callable[[int], object] | None = None
    later_inputs: Callable[[int], object] | None = None
    later_target: Callable[[int], object] | None = None
    options: str = ""
    microbatches: int | None = 4
    sizes: tuple[int, ...] = (SAMPLES, 5, 1)
    reference: str = "whole"
    manners: tuple[Mapping[str, Any], ...] | None = None
    replay: Callable[[nn.Module, object, Any], object] | None = None
    as_evaluated: bool = False
    random: bool = False
    rounding: bool = False
    by_ops: bool = False
    hooks: Mapping[str, object] = field(default_factory=dict)
    expect: Refused | RefusedAtStep | None = None
    quick: bool = False

    @property
    def infers(self) -> bool:
        """Whether the package cannot train."""
        return "--mode infer" in self.options

    def precision(self, arguments: Mapping[str, Any]) -> str:
        """What a pipeline with these arguments computes in: as compiled unless it is told."""
        words = self.options.split()
        given = [word for asked, word in itertools.pairwise(words) if asked == "--precision"]
        return str(arguments.get("precision", given[-1] if given else "fp32"))

    def build(self) -> nn.Module:
        """The model with the weights that the compiler sees."""
        torch.manual_seed(0)
        return self.model()

    def batch(self, samples: int, seed: int) -> Batch:
        """A batch of the judge's."""
        torch.manual_seed(seed)
        inputs, target = self.later_inputs or self.inputs, self.later_target or self.target
        return inputs(samples), None if target is None else target(samples)

    def least_samples(self, microbatches: int) -> int:
        """Of a micro-batch, where layers normalise over it: two, unless one was planned.

        Args:
            microbatches: of a package for as many as the compiler chose.
        """
        return 2 if (self.microbatches or microbatches) < SAMPLES else 1

    def ways(self) -> tuple[Mapping[str, Any], ...]:
        """Arguments of the `Pipeline`s that are judged."""
        if self.manners is not None:
            return self.manners
        if self.infers:
            return ({}, {"microbatches": 3}, ONE_PIECE_BF16)
        return ({}, MANNERS[zlib.crc32(self.name.encode()) % len(MANNERS)], ONE_PIECE_BF16)


MANNERS: tuple[Mapping[str, Any], ...] = (
    {"schedule": "1f1b", "remat": "full"},
    {"schedule": "zb-h1"},
    {"schedule": "interleaved", "devices": ["cpu"], "microbatches": 3},
    {"schedule": "zbv", "devices": ["cpu"], "remat": "full"},
    {"schedule": "gpipe", "remat": "full", "microbatches": 3},
)
"""Of which every case is judged in one, besides the one that it was compiled for."""

ONE_PIECE_BF16: Mapping[str, Any] = {"precision": "bf16", "microbatches": 1}
"""In one piece, since autocast rounds the gradients of every piece to 16 bits."""

FP32_ONLY = ({}, {"schedule": "1f1b", "remat": "full"})
"""For models that plain PyTorch cannot run under autocast."""
