"""Finds long runs of equal modules in a model, and makes the same model with short ones.

A model of 1663 equal layers is traced with four of them; `lengthen` then makes the whole graph, and
`kernels` holds it against the whole model. Equal means: of one class, with equal attributes, with
state of equal shapes and types, without hooks, sharing no tensor with anything, and so all the way
down. Whatever is in doubt (an object, a tensor among the attributes) is equal to itself only.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import types
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gpipe_compiler.frontend.subject import Subject

KEPT = 4
"""Repetitions that a shortened run has: its first, two in the middle, its last."""

_LEAST = 4 * KEPT
"""Repetitions from which on a run is shortened: with fewer the whole model is traced as fast."""

_LONGEST_PERIOD = 8
"""Modules that may alternate in a run."""

_LISTS = (nn.ModuleList, nn.Sequential)
_TREE = frozenset({"_parameters", "_buffers", "_modules"})
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum, type)


@dataclass(frozen=True, slots=True)
class Run:
    """Equal modules one after another in a list.

    Attributes:
        path: of the list.
        first: the place in the list where the run begins.
        period: modules after which it repeats.
        count: repetitions.
        kept: those that the shortened list has: the first, some in the middle, the last.
    """

    path: str
    first: int
    period: int
    count: int
    kept: int = KEPT

    @property
    def removed(self) -> int:
        """Modules that the shortened list lacks."""
        return (self.count - self.kept) * self.period

    def repetition(self, place: int) -> int | None:
        """The repetition that a place in the shortened list belongs to; None for what is no part
        of the run."""
        number = (place - self.first) // self.period
        return number if 0 <= number < self.kept else None

    def place(self, path: str) -> int | None:
        """The place in the list of what stands under a path; None for anything else."""
        prefix = f"{self.path}."
        if not path.startswith(prefix):
            return None
        head = path[len(prefix) :].partition(".")[0]
        return int(head) if head.isdigit() else None

    def moved(self, path: str, places: int) -> str:
        """A path in the list as it is called so many places further on."""
        place = self.place(path)
        if place is None or not places:
            return path
        prefix = f"{self.path}."
        _, dot, rest = path[len(prefix) :].partition(".")
        return f"{prefix}{place + places}{dot}{rest}"

    def in_full(self, path: str) -> str:
        """A path of the shortened model as the whole model calls it."""
        place = self.place(path)
        if place is None or place < self.first + 2 * self.period:
            return path
        return self.moved(path, self.removed)


@dataclass(frozen=True, eq=False, slots=True)
class Shortened:
    """A subject whose model has short runs, and the runs."""

    subject: Subject
    runs: tuple[Run, ...]


def shortened(subject: Subject, *, least: int = _LEAST, kept: int = KEPT) -> Shortened | None:
    """The subject with the longest run of every list shortened; None where no list has one.

    Args:
        least: repetitions of the shortest run that is shortened.
        kept: repetitions that are left of a run, 2 or more.
    """
    shared = _shared_tensors(subject.model)
    found = _runs("", subject.model, shared, least)
    runs = tuple(dataclasses.replace(run, kept=kept) for run in found)
    if not runs:
        return None
    model = subject.model
    for run in runs:
        model = _with_list(model, run.path.split("."), run)
    initial = {
        _in_short(runs, name): steps
        for name, steps in subject.initial.items()
        if not any(_is_removed(run, name) for run in runs)
    }
    return Shortened(dataclasses.replace(subject, model=model, initial=initial), runs)


def _is_removed(run: Run, name: str) -> bool:
    place = run.place(name)
    return place is not None and 0 <= place - run.first - 2 * run.period < run.removed


def _in_short(runs: Sequence[Run], name: str) -> str:
    """A name of the whole model, of what is kept, as the shortened one has it."""
    for run in runs:
        place = run.place(name)
        if place is not None and place >= run.first + 2 * run.period:
            name = run.moved(name, -run.removed)
    return name


def _shared_tensors(model: nn.Module) -> frozenset[int]:
    """The tensors that stand in several places of the model, as ids."""
    tensors = [
        *(tensor for _, tensor in model.named_parameters(remove_duplicate=False)),
        *(tensor for _, tensor in model.named_buffers(remove_duplicate=False)),
    ]
    return frozenset(key for key, count in Counter(map(id, tensors)).items() if count > 1)


def _runs(path: str, module: nn.Module, shared: frozenset[int], least: int) -> Iterator[Run]:
    """The longest run of every list, lists inside of runs left out."""
    children = list(module._modules.items())
    run = None
    if type(module) in _LISTS and path and len(children) >= least:
        run = _longest([_description(child, shared) for _, child in children], path, least)
    if run is not None:
        yield run
        return
    for name, child in children:
        if child is not None:
            yield from _runs(f"{path}.{name}" if path else name, child, shared, least)


def _longest(kinds: Sequence[Hashable], path: str, least: int) -> Run | None:
    """The run with the most modules, among equals that with the shortest period."""
    best: Run | None = None
    for period in range(1, _LONGEST_PERIOD + 1):
        start = period
        for place in range(period, len(kinds) + 1):
            if place < len(kinds) and kinds[place] == kinds[place - period]:
                continue
            run = Run(path, start - period, period, (place - start) // period + 1)
            size = run.count * period
            if run.count >= least and (best is None or size > best.count * best.period):
                best = run
            start = place + 1
    return best


def _description(module: nn.Module | None, shared: frozenset[int]) -> Hashable:
    """Equal for modules that differ in nothing but the numbers in their state."""
    if module is None:
        return None
    attributes = tuple(
        (name, _frozen(value)) for name, value in sorted(vars(module).items()) if name not in _TREE
    )
    state = tuple(
        (kind, name, _of_tensor(tensor, shared))
        for kind, table in (("parameter", module._parameters), ("buffer", module._buffers))
        for name, tensor in table.items()
    )
    children = tuple((name, _description(child, shared)) for name, child in module._modules.items())
    return (type(module), attributes, state, children)


def _of_tensor(tensor: torch.Tensor | None, shared: frozenset[int]) -> Hashable:
    if tensor is None:
        return None
    if id(tensor) in shared or nn.parameter.is_lazy(tensor) or tensor._backward_hooks:
        return _Alone(tensor)
    return (
        type(tensor),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
    )


def _frozen(value: object) -> Hashable:
    """Equal for attributes that are equal for certain."""
    if isinstance(value, _PLAIN):
        return (type(value), repr(value) if isinstance(value, float) else value)
    if value is None:
        return None
    if isinstance(value, tuple | list):
        return (type(value), tuple(map(_frozen, value)))
    if isinstance(value, set | frozenset):
        return (type(value), frozenset(map(_frozen, value)))
    if isinstance(value, dict):
        return (type(value), tuple((_frozen(key), _frozen(item)) for key, item in value.items()))
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return _Alone(value) if value.__closure__ else value  # type: ignore[union-attr]  # built-ins have none
    return _Alone(value)


class _Alone:
    """Equal only to what stands for the very same object."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Alone) and self.value is other.value and _is_shareable(self.value)

    def __hash__(self) -> int:
        return id(self.value)


def _is_shareable(value: object) -> bool:
    """Whether modules that hold the same object of this kind may still be equal.

    A configuration that all blocks share is; a tensor or a module, which may be shared with the
    rest of the model, is not.
    """
    return not isinstance(value, torch.Tensor | nn.Module)


def _with_list(module: nn.Module, path: Sequence[str], run: Run) -> nn.Module:
    """A copy of the modules on the way to a list, which has a short run there."""
    twin = copy.copy(module)
    children: dict[str, nn.Module | None] = dict(module._modules)
    if path:
        child = children[path[0]]
        assert child is not None  # the list was found there
        children[path[0]] = _with_list(child, path[1:], run)
    else:
        items = list(children.values())
        end = run.first + 2 * run.period
        kept = items[:end] + items[end + run.removed :]
        children = {str(place): item for place, item in enumerate(kept)}
    vars(twin)["_modules"] = children
    return twin
