"""Whether the samples of a batch are independent, by the plain model on some of them.

The model runs in eval mode on a few samples of its example, and on two parts of these. Its outputs
for the parts have to be rows of its outputs for all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeAlias

import torch
from torch import nn

from gpipe_compiler.errors import ModelError
from gpipe_compiler.frontend.comparable_runs import (
    EvenDraws,
    are_same,
    double,
    generator_states,
    host_draws_alike,
    larger_batch,
    other_values,
    with_other_weights,
)
from gpipe_compiler.frontend.signature import Signature
from gpipe_compiler.frontend.state import isolated, state_restored
from gpipe_compiler.frontend.structure import describe, pick
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.user_code import line_of_forward
from gpipe_compiler.quiet import quiet
from gpipe_compiler.runtime.train.comparison import ComparedKind, compare

Dims: TypeAlias = tuple[int | None, ...]
"""The batch dimension of every input, in their order; None where all samples share the input."""

_SIZES = ((2, 3), (2, 4), (2, 2))
"""Samples in the two parts of a batch; later pairs where the model does not take the first."""

_SLOW_S = 10.0
"""Seconds of a trial from which on there is no second one with other values."""

_LOSSES = 2
"""Batches of other values, beside the example, for which a loss is looked at."""

_DOUBTFUL = 1e-2
"""Differences up to this share of an output may be rounding, where float64 cannot decide."""

_SEED = 20261


class Verdict(IntEnum):
    """What a trial says of a choice of dimensions, the better the higher."""

    FAILS = 0
    """The model raises on another number of samples."""
    MIXES = 1
    """A sample's rows depend on the other samples."""
    SILENT = 2
    """No output has rows, or says anything else of the samples."""
    ROWS = 3
    """Rows follow the samples; another output is neither sum, mean nor extreme of its parts'."""
    PROVEN = 4


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the model returns for a batch and for its two parts, and the tensors therein."""

    sizes: tuple[int, int]
    returned: Sequence[Any]
    tensors: Sequence[Sequence[torch.Tensor]]


@dataclass
class Proof:
    """Runs a model with numbers on some of the samples of its example.

    Attributes:
        model: a copy of its model, which runs.
    """

    subject: Subject
    signature: Signature
    _models: tuple[nn.Module, ...] = field(init=False)
    model: nn.Module = field(init=False)
    _draws: bool = False

    def __post_init__(self) -> None:
        first = isolated(self.subject.model).eval()
        other = with_other_weights(first)
        self._models = (first,) if other is None else (other, first)
        self.model = self._models[0]

    def judge(self, dims: Dims) -> Verdict:
        """What the model's outputs say of a choice of dimensions.

        Other weights than the first ones tell more; these are tried where the model gives nothing
        finite with others. Where the example has the same numbers in all samples, other values tell
        more, if the model takes them.
        """
        started = time.monotonic()
        examples = self.signature.examples
        self._refuse_sparse(dims)
        for model in self._models:
            self.model = model
            answer = self._answer(examples, dims)
            if answer is None:
                continue
            self._refuse_types(answer.tensors[0])
            if all(map(_finite, answer.tensors[0])):
                break
        if answer is None:
            return Verdict.FAILS
        verdict = self._verdict(answer, examples, dims)
        if verdict is Verdict.MIXES or time.monotonic() - started > _SLOW_S:
            return verdict
        taken = time.monotonic() - started
        if verdict >= Verdict.ROWS and self._mixes_among_many(dims, taken):
            return Verdict.MIXES
        if not any(_tells_little(x, dim) for x, dim in zip(examples, dims, strict=True)):
            return verdict
        others = self._others(dims, torch.Generator().manual_seed(_SEED))
        other = self._answer(others, dims)
        if other is None or not all(map(_finite, other.tensors[0])):
            return verdict
        return min(verdict, self._verdict(other, others, dims))

    def _refuse_sparse(self, dims: Dims) -> None:
        """Raises a ModelError for inputs that are to be split and have no rows in memory."""
        for source, tensor, dim in zip(
            self.signature.inputs, self.signature.examples, dims, strict=True
        ):
            if dim is not None and tensor.layout is not torch.strided:
                raise ModelError(
                    f"the input {source.name} is a tensor of layout {tensor.layout}, which cannot "
                    "be cut into micro-batches",
                    location=line_of_forward(self.subject.model),
                    hint="pass it dense, and convert it in forward; or say with "
                    f"--batch-dim {source.name}=none that all samples share it",
                )

    def _refuse_types(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raises a ModelError for outputs of types that torch has hardly any ops for."""
        where = line_of_forward(self.subject.model)
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                raise ModelError(
                    f"the model returns a tensor of layout {tensor.layout}, which cannot be put "
                    "together from micro-batches, nor compared with the model's",
                    location=where,
                    hint="return it dense (.to_dense()), and convert it after the call",
                )
            if tensor.is_quantized or (tensor.is_floating_point() and tensor.itemsize == 1):
                raise ModelError(
                    f"the model returns a tensor of {tensor.dtype}, which cannot be put together "
                    "from micro-batches, nor compared with the model's",
                    location=where,
                    hint="return it as torch.float32 (.dequantize(), .float()), or its integers "
                    "(.int_repr(), .view(torch.uint8)), and convert it after the call",
                )

    def judge_losses(self, choices: Sequence[Dims]) -> list[Verdict]:
        """Whether the loss of a batch is the mean or the sum of its parts', by choice.

        One number may be so by chance, thus other values are tried too where the loss takes them.

        Args:
            choices: which differ in the dimensions of targets only.
        """
        random = torch.Generator().manual_seed(_SEED)
        verdicts = self._loss_verdicts(self.signature.examples, choices)
        for _ in range(_LOSSES):
            others = self._loss_verdicts(self._others(choices[0], random), choices)
            verdicts = [
                verdict if other is Verdict.FAILS else min(verdict, other)
                for verdict, other in zip(verdicts, others, strict=True)
            ]
        return verdicts

    def _loss_verdicts(
        self, tensors: Sequence[torch.Tensor], choices: Sequence[Dims]
    ) -> list[Verdict]:
        answer = self._answer(tensors, choices[0])
        if answer is None:
            return [Verdict.FAILS] * len(choices)
        return [self._loss_verdict(answer, tensors, dims) for dims in choices]

    def _loss_verdict(
        self, answer: _Answer, tensors: Sequence[torch.Tensor], dims: Dims
    ) -> Verdict:
        loss_fn: Any = self.subject.loss_fn
        try:
            with torch.no_grad(), torch.random.fork_rng(), quiet():
                losses = [
                    loss_fn(output, self.signature.rebuild(inputs)[2])
                    for output, inputs in zip(
                        answer.returned,
                        _picked(tensors, dims, answer.sizes),
                        strict=True,
                    )
                ]
        except Exception:  # noqa: BLE001  # whatever the user's code raises on these shapes
            return Verdict.FAILS
        return Verdict.PROVEN if _combined(losses, answer.sizes) else Verdict.ROWS

    def _verdict(self, answer: _Answer, inputs: Sequence[torch.Tensor], dims: Dims) -> Verdict:
        verdict, relative = _judged(answer)
        if verdict is not Verdict.MIXES:
            return verdict
        # Rounding may choose otherwise, such as where tokens are sent: not in 64 bits.
        exact = self._in_double(inputs, dims)
        if exact is not None:
            return _judged(exact)[0]
        return verdict if relative >= _DOUBTFUL else Verdict.ROWS

    def _mixes_among_many(self, dims: Dims, seconds: float) -> bool:
        """Whether samples meet, or are told apart by their numbers, in a larger batch.

        Args:
            seconds: that a trial of few samples takes.
        """
        few = sum(_SIZES[0])
        samples = larger_batch(few, seconds)
        if not samples:
            return False
        answer = self._answer_for(self.signature.examples, dims, (2, samples - 2))
        if answer is None or not all(map(_finite, answer.tensors[0])):
            return False
        return self._verdict(answer, self.signature.examples, dims) is Verdict.MIXES

    def _in_double(self, inputs: Sequence[torch.Tensor], dims: Dims) -> _Answer | None:
        """The answer of the model in float64; None where it does not run so."""
        single = self.model
        try:
            self.model = isolated(single).double()
            return self._answer(list(map(double, inputs)), dims)
        finally:
            self.model = single

    def _others(self, dims: Dims, random: torch.Generator) -> list[torch.Tensor]:
        """Other values for the inputs that have samples."""
        return [
            x if dim is None else other_values(x, random)
            for x, dim in zip(self.signature.examples, dims, strict=True)
        ]

    def _answer(self, tensors: Sequence[torch.Tensor], dims: Dims) -> _Answer | None:
        """The outputs for a batch and its parts; None where the model does not take them."""
        answers = (self._answer_for(tensors, dims, sizes) for sizes in _SIZES)
        return next((answer for answer in answers if answer is not None), None)

    def _answer_for(
        self, tensors: Sequence[torch.Tensor], dims: Dims, sizes: tuple[int, int]
    ) -> _Answer | None:
        try:
            returned = [self._run(inputs) for inputs in _picked(tensors, dims, sizes)]
        except Exception:  # noqa: BLE001  # whatever the user's code raises on these shapes
            return None
        template = describe(returned[0])
        try:
            return _Answer(sizes, returned, [pick(output, template) for output in returned])
        except (IndexError, KeyError, AttributeError, TypeError):  # another structure
            return None

    def _run(self, inputs: Sequence[torch.Tensor]) -> Any:
        """What the model returns; its state is afterwards what it was."""
        args, kwargs, _ = self.signature.rebuild(inputs)
        own = state_restored(self.model)
        with own, torch.no_grad(), torch.random.fork_rng(), host_draws_alike(), quiet():
            torch.manual_seed(_SEED)
            if not self._draws:
                states = generator_states()
                returned = self.model(*args, **kwargs)
                self._draws = not all(map(torch.equal, states, generator_states()))
            if self._draws:
                with EvenDraws():
                    returned = self.model(*args, **kwargs)
            return returned


def _picked(
    tensors: Sequence[torch.Tensor], dims: Dims, sizes: tuple[int, int]
) -> list[list[torch.Tensor]]:
    """Copies of the inputs for a batch and its two parts; a short example begins anew."""
    rows = _rows(sizes)
    return [
        [
            tensor.clone()
            if dim is None
            else tensor.index_select(
                dim, torch.tensor(which, device=tensor.device) % tensor.shape[dim]
            )
            for tensor, dim in zip(tensors, dims, strict=True)
        ]
        for which in rows
    ]


def _rows(sizes: tuple[int, int]) -> list[list[int]]:
    """The samples of a batch, and those of its parts: the last but one and the first, and the rest.

    Neither part of five samples or six is what a flip, a shift or an exchange of halves or of pairs
    makes of itself.
    """
    samples = [*range(sum(sizes))]
    first = [samples[-2], *samples[: sizes[0] - 1]]
    return [samples, first, [sample for sample in samples if sample not in first]]


def _judged(answer: _Answer) -> tuple[Verdict, float]:
    """The verdict on an answer, and how far rows are off as a share of their tensor."""
    found, expected = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    steady, silent = True, True
    for number, (whole, *parts) in enumerate(zip(*answer.tensors, strict=True)):
        dim = row_dim([whole, *parts], [sum(answer.sizes), *answer.sizes])
        if dim is None:
            combined = _combined([whole, *parts], answer.sizes)
            steady = steady and combined
            silent = silent and (not combined or all(are_same(whole, part) for part in parts))
            continue
        shape = (sum(answer.sizes), whole.shape[dim] // sum(answer.sizes))
        samples = whole.unflatten(dim, shape)
        for place, (part, rows) in enumerate(zip(parts, _rows(answer.sizes)[1:], strict=True)):
            which = torch.tensor(rows, device=whole.device)
            expected[f"{number}.{place}"] = samples.index_select(dim, which).flatten(dim, dim + 1)
            found[f"{number}.{place}"] = part
    (row,) = compare({ComparedKind.OUTPUT: found}, {ComparedKind.OUTPUT: expected}) or (None,)
    if row is not None and not row.passed:
        return Verdict.MIXES, row.relative
    if row is None and silent:
        return Verdict.SILENT, 0.0
    return Verdict.PROVEN if steady else Verdict.ROWS if row is not None else Verdict.SILENT, 0.0


def row_dim(tensors: Sequence[torch.Tensor], samples: Sequence[int]) -> int | None:
    """The dimension of an output that grows with the samples; None where none or several do.

    Args:
        tensors: the output for each of these numbers of samples.
    """
    first, *others = tensors
    if any(other.dim() != first.dim() for other in others):
        return None
    changed = {d for other in others for d, n in enumerate(other.shape) if n != first.shape[d]}
    if len(changed) != 1:
        return None
    (dim,) = changed
    rows, rest = divmod(first.shape[dim], samples[0])
    follows = all(x.shape[dim] == rows * n for x, n in zip(tensors, samples, strict=True))
    return dim if follows and not rest else None


def _combined(tensors: Sequence[torch.Tensor], sizes: tuple[int, int]) -> bool:
    """Whether the first is the sum, the mean, an extreme of the two others, or the same as both."""
    whole, first, second = tensors
    if not whole.shape == first.shape == second.shape:
        return False
    ways = [first]
    if not whole.is_complex():
        ways.extend((torch.maximum(first, second), torch.minimum(first, second)))
    if whole.is_floating_point() or whole.is_complex():
        mean = (sizes[0] * first + sizes[1] * second) / sum(sizes)
        ways.extend((first + second, mean))
    elif whole.dtype != torch.bool:
        ways.append(first + second)
    return any(are_same(whole, way) for way in ways)


def _tells_little(tensor: torch.Tensor, dim: int | None) -> bool:
    """Whether all samples of an input are equal, or there is only one."""
    if dim is None:
        return False
    return bool((tensor == tensor.narrow(dim, 0, 1)).all())


def _finite(tensor: torch.Tensor) -> bool:
    return bool(tensor.isfinite().all())
