"""Branches on the values of tensors, recorded as the model takes them for its example.

A trace has no numbers, so a run on the example tells what each question comes to, such as
`if h.isnan().any()` and `int(self.steps)`. The trace takes that answer, and the graph requires it
of every batch. Of torch's own methods that branch so, some do without; others are refused.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._subclasses import FakeTensor
from torch.optim import swa_utils

from gpipe_compiler.errors import SourceLocation, TraceError
from gpipe_compiler.frontend import encoders
from gpipe_compiler.frontend.comparable_runs import Results, different
from gpipe_compiler.frontend.deciding import QUESTIONS, is_decision
from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.frontend.growing_graph import EFFECT, sources_of
from gpipe_compiler.frontend.locate import asking_frame, calling_line, is_users, location
from gpipe_compiler.frontend.nests import asking
from gpipe_compiler.frontend.raising_branches import passing_at
from gpipe_compiler.frontend.recompute import activations_kept
from gpipe_compiler.frontend.recorded_nodes import written_by
from gpipe_compiler.frontend.recorder import Recorder, recording
from gpipe_compiler.frontend.surroundings import as_exported
from gpipe_compiler.frontend.trace_errors import by_values
from gpipe_compiler.frontend.without_numbers import SMALLEST_BATCH
from gpipe_compiler.ir.arguments import storage_key
from gpipe_compiler.ir.branches import require
from gpipe_compiler.quiet import quiet

_PACKED = encoders.packed.__name__

_FAKE = torch._C._TorchDispatchModeKey.FAKE


@dataclass(frozen=True)
class _Answer:
    """What a line was told.

    Attributes:
        place: the code that asked, and which of its instructions.
    """

    question: str
    place: tuple[CodeType, int]
    value: Any


Answers = tuple[_Answer, ...]
"""In order."""


def answers_of(entry: Entry, samples: int) -> Answers:
    """What the lines of a model are told of the values of tensors, in a run on its example.

    () where it cannot be run, as on meta.
    """
    found = list[_Answer]()

    def noted(own: Callable[[torch.Tensor], Any], asked: _Asked) -> Any:
        value = own(asked.tensor)
        found.append(_Answer(asked.name, asked.place, value))
        return value

    with _asked(noted), asking():
        ran = _run(entry, samples, gradients=entry.has_loss)
    return () if ran is None else tuple(found)


def _run(entry: Entry, samples: int, *, gradients: bool) -> list[Any] | None:
    """What an entry returns for its example; None where it cannot be run, as on meta."""
    if entry.states.on_meta:
        return None
    with entry.on_a_copy():
        try:
            with (
                quiet(),
                torch.random.fork_rng(),
                torch.set_grad_enabled(gradients),
                as_exported(),
                activations_kept(),
            ):
                torch.manual_seed(0)
                return entry(*entry.signature.samples(samples))  # type: ignore[no-any-return]  # a list
        except Exception:  # noqa: BLE001  # whatever the user's code raises: the trace explains it
            return None


def refuse_gradient_branches(entry: Entry, asked: SourceLocation) -> None:
    """Refuses a model that computes something else in eval mode with gradients than without.

    Args:
        asked: the first line that is told which of both it is.
    """
    runs: list[Results] = []
    for gradients in (True, False):
        run = _run(entry, SMALLEST_BATCH, gradients=gradients)
        if run is None:
            return
        runs.append({f"output {number}": tensor for number, tensor in enumerate(run)})
    if not any(different(*runs)):
        return
    raise TraceError(
        f"in eval mode the model computes something else with gradients than without, at "
        f"`{asked.code}`: evaluations run without, and a package has one graph for both",
        location=asked,
        hint="ask for self.training beside it, or compile with --mode infer",
    )


@dataclass(frozen=True)
class _Asked:
    """A question of a line of the user's.

    Attributes:
        unless: if the answer is no, what else may not be; None for the tensor itself.
    """

    name: str
    tensor: torch.Tensor
    frame: FrameType
    unless: torch.Tensor | None = None

    @property
    def place(self) -> tuple[CodeType, int]:
        return self.frame.f_code, self.frame.f_lasti

    @property
    def line(self) -> SourceLocation:
        return location(self.frame.f_code.co_filename, self.frame.f_lineno)


@contextlib.contextmanager
def _asked(answer: Callable[[Callable[[torch.Tensor], Any], _Asked], Any]) -> Iterator[None]:
    """Lets a function answer what lines of the user's ask for values; their checks do not count."""
    with contextlib.ExitStack() as around:
        for cls, name in itertools.product((torch.Tensor, FakeTensor), QUESTIONS):
            if cls is torch.Tensor or name in vars(cls):
                asking = _asking(getattr(cls, name), name, answer)
                around.enter_context(mock.patch.object(cls, name, asking))
        asking = _asking(encoders.packed, _PACKED, answer)
        around.enter_context(mock.patch.object(encoders, _PACKED, asking))
        yield


def _asking(
    own: Callable[[torch.Tensor], Any],
    name: str,
    answer: Callable[[Callable[[torch.Tensor], Any], _Asked], Any],
) -> Callable[[torch.Tensor], Any]:
    def ask(tensor: torch.Tensor, unless: torch.Tensor | None = None) -> Any:
        frame = asking_frame(sys._getframe(1), beyond_torch=name == _PACKED)
        others = not is_users(frame.f_code.co_filename) or passing_at(frame) is not None
        if others or is_decision(tensor):
            return own(tensor)
        return answer(own, _Asked(name, tensor, frame, unless))

    ask.__name__ = name  # by which a call is recorded
    return ask


@contextlib.contextmanager
def answered(answers: Answers = (), *, flags: bool = False) -> Iterator[None]:
    """Lets what is recorded inside be told what a run on the example was told.

    Args:
        flags: whether `item()` of a boolean is a question too, and no number that the model
            computes with.
    """
    left = deque(answers)
    told_at: tuple[CodeType, int] | None = None

    def answer(own: Callable[[torch.Tensor], Any], asked: _Asked) -> Any:
        if torch._C._get_dispatch_mode(_FAKE) is None:  # this compiler asks, of what has numbers
            return own(asked.tensor)
        nonlocal told_at
        known = left[0] if left else None
        recorder = recording()
        if known is not None and (known.question, known.place) == (asked.name, asked.place):
            left.popleft()
            told_at = known.place
        else:
            if asked.place != told_at:  # else it is asked once more, as a number
                left.clear()  # the trace has gone another way
            known = None
        if known is None:
            if asked.name != _PACKED:
                return own(asked.tensor)
            known = _Answer(asked.name, asked.place, own(asked.tensor))
            if recorder is not None:
                recorder.guessed = True
        if recorder is None or not isinstance(asked.tensor, FakeTensor):
            return own(asked.tensor)
        decides = asked.name in ("__bool__", _PACKED) or (
            flags and asked.tensor.dtype is torch.bool
        )
        if not decides and recorder.tensors.is_of_inputs(asked.tensor):
            return own(asked.tensor)  # a number that differs between batches
        with torch._C.DisableTorchFunction():  # the model does not ask this
            _require(recorder, asked, known.value)
        return known.value

    with _asked(answer):
        yield


def _require(recorder: Recorder, asked: _Asked, value: Any) -> None:
    """Records that the values are those."""
    condition = asked.tensor
    line = asked.line.brief
    if asked.unless is not None:
        condition = condition if value else asked.unless
        line = f"{line} ({encoders.PACKS})"
    if isinstance(value, bool):
        if condition.dtype is not torch.bool:
            condition = recorder.called(operator.ne, condition, 0)
        if not value:
            condition = recorder.called(torch.logical_not, condition)
    elif isinstance(value, list):
        held = recorder.called(torch.tensor, value, dtype=condition.dtype, device=condition.device)
        condition = recorder.called(torch.all, recorder.called(operator.eq, condition, held))
    else:
        condition = recorder.called(operator.eq, condition, value)
    recorder.requires(condition, line)


def refuse_changing(recorder: Recorder) -> None:
    """Refuses what is decided by a draw, a weight that training changes, or a buffer that forward
    does.
    """
    nodes = list(recorder.graph.nodes)
    written = set().union(*map(written_by, nodes))
    layers = tuple(f"{node.target}." for node in nodes if node.op == "call_module")

    def changes(source: fx.Node) -> bool:
        value = source.meta["val"]
        if source.op == "get_attr":
            own = value.requires_grad or storage_key(value) in written
            return own or str(source.target).startswith(layers)
        return source.op == "call_module" or bool(source.meta.get(EFFECT))

    for node in nodes:
        sources = list(sources_of(node)) if node.target is require else []
        if any(source.op == "placeholder" for source in sources):
            continue  # what decides is new with every batch anyway
        changing = next(filter(changes, sources), None)
        if changing is not None:
            more = f"those of {changing.target}, which the model changes as it runs or trains"
            if changing.op == "call_function":
                more = "they are drawn"
            raise by_values(node.meta["source"], more)


def asks_for_numbers(recorder: Recorder) -> bool:
    """Whether a number that the graph reads from a tensor decides something in it."""
    return any(node.target in ("item", torch.Tensor.item) for node in recorder.graph.nodes)


@contextlib.contextmanager
def without_branches() -> Iterator[None]:
    """Lets a trace follow averages of weights; refuses the adaptive softmax."""
    averages = mock.patch.object(swa_utils.AveragedModel, "update_parameters", _average)
    with averages, mock.patch.object(nn.AdaptiveLogSoftmaxWithLoss, "forward", _refuse):
        yield


@torch.no_grad()
def _average(averaged: swa_utils.AveragedModel, model: nn.Module) -> None:
    """As torch's own, which asks how many models it has averaged: the first one is copied."""
    held: Any = averaged
    own: list[torch.Tensor] = list(held.parameters())
    theirs: list[torch.Tensor] = list(model.parameters())
    if held.use_buffers:
        own = [*held.module.parameters(), *held.module.buffers()]
        theirs += model.buffers()
    pairs = [
        (mean.detach(), weight.detach().to(mean.device))
        for mean, weight in zip(own, theirs, strict=False)
    ]
    first = held.n_averaged == 0
    if held.multi_avg_fn is not None:
        for dtype in dict.fromkeys(mean.dtype for mean, _ in pairs):
            means, weights = zip(*(pair for pair in pairs if pair[0].dtype == dtype), strict=True)
            held.multi_avg_fn(list(means), list(weights), held.n_averaged)
        for mean, weight in pairs:
            mean.copy_(torch.where(first, weight, mean))
    else:
        average = held.avg_fn or swa_utils.get_swa_avg_fn()  # type: ignore[no-untyped-call]
        for mean, weight in pairs:
            mean.copy_(torch.where(first, weight, average(mean, weight, held.n_averaged)))
    if not held.use_buffers:
        for copied, buffer in zip(held.module.buffers(), model.buffers(), strict=True):
            copied.detach().copy_(buffer.detach().to(copied.device))
    held.n_averaged += 1


def _refuse(layer: nn.Module, *_: object) -> None:
    raise TraceError(
        f"{type(layer).__name__} computes the clusters alone in which a target is: weights of the "
        "others get no gradient, and which these are is not known before the step",
        location=calling_line(),
        hint="take the loss of all clusters, which is the same number: "
        "F.nll_loss(layer.log_prob(hidden), target)",
    )
