"""Finds long runs of equal modules in a model, and makes the same model with short ones.

A model of 1663 equal layers is traced with four of them; `expand_repeats` then makes the whole
graph, and `kernels` compares it with the whole model. Equal means: of one class, with equal
attributes, with state of equal shapes and types, without hooks, sharing no tensor with anything,
and so all the way down. Whatever is in doubt (an object, a tensor among the attributes) is equal to
itself only. What a list of parameters holds is compared in the same way.

Layers that know their own place in the list (`layer_idx`) may still be equal: the short model is
then given places which raise when they are used, so that what is traced follows from none.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import types
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any, NoReturn

import torch
from torch import nn

from gpipe_compiler.errors import TraceError
from gpipe_compiler.frontend.state import named_state
from gpipe_compiler.frontend.subject import Subject

KEPT = 4
"""Repetitions that a shortened run has: its first, two in the middle, its last."""

_LEAST = 3 * KEPT
"""Repetitions from which on a run is shortened: with fewer the whole model is traced as fast."""

_LONGEST_PERIOD = 8
"""Modules that may alternate in a run."""

_TREE = frozenset({"_parameters", "_buffers", "_modules"})
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum, type)


@dataclass(frozen=True, slots=True)
class EqualRun:
    """Equal modules or parameters one after another in a list.

    Attributes:
        path: of the list; empty where the model is one.
        first: the place in the list where the run begins.
        period: modules after which it repeats.
        count: repetitions.
        kept: those that the shortened list has: the first, some in the middle, the last.
        places: the paths, below a module of the list, of attributes that hold its own place.
    """

    path: str
    first: int
    period: int
    count: int
    kept: int = KEPT
    places: frozenset[str] = frozenset()

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
        if not path.startswith(self._prefix):
            return None
        head = path[len(self._prefix) :].partition(".")[0]
        return int(head) if head.isdigit() else None

    @property
    def _prefix(self) -> str:
        return self.path and f"{self.path}."

    def moved(self, path: str, places: int) -> str:
        """A path in the list as it is called a number of places further on."""
        place = self.place(path)
        if place is None or not places:
            return path
        _, dot, rest = path[len(self._prefix) :].partition(".")
        return f"{self._prefix}{place + places}{dot}{rest}"

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
    runs: tuple[EqualRun, ...]


def shortened(
    subject: Subject, *, least: int = _LEAST, kept: int = KEPT, placeless: bool = False
) -> Shortened | None:
    """The subject with the longest run of every list shortened; None where no list has one.

    Args:
        least: repetitions of the shortest run that is shortened.
        kept: repetitions that are left of a run, 2 or more.
        placeless: whether modules are equal that differ in their own places in the list; those
            that are left then have a `LayerPlace` instead.
    """
    shared = _shared_tensors(subject.model)
    found = _runs("", subject.model, shared, least, placeless)
    runs = tuple(dataclasses.replace(run, kept=kept) for run in found)
    if not runs:
        return None
    model = subject.model
    for run in runs:
        model = _with_list(model, run.path.split(".") if run.path else (), run)
    initial = {
        _in_short(runs, name): steps
        for name, steps in subject.initial.items()
        if not any(_is_removed(run, name) for run in runs)
    }
    return Shortened(dataclasses.replace(subject, model=model, initial=initial), runs)


def _is_removed(run: EqualRun, name: str) -> bool:
    place = run.place(name)
    return place is not None and 0 <= place - run.first - 2 * run.period < run.removed


def _in_short(runs: Sequence[EqualRun], name: str) -> str:
    """A name of the whole model, of what is kept, as the shortened one has it."""
    for run in runs:
        place = run.place(name)
        if place is not None and place >= run.first + 2 * run.period:
            name = run.moved(name, -run.removed)
    return name


def _shared_tensors(model: nn.Module) -> frozenset[int]:
    """The tensors that stand in several places of the model, as ids."""
    counts = Counter(id(tensor) for _, tensor in named_state(model))
    return frozenset(key for key, count in counts.items() if count > 1)


def _runs(
    path: str, module: nn.Module, shared: frozenset[int], least: int, placeless: bool
) -> Iterator[EqualRun]:
    """The longest run of every list, lists inside of runs left out."""
    run = None
    items = _items(module)
    if len(items) >= least:
        places = _places(items) if placeless else frozenset()
        run = _longest([_description(item, shared, places) for item in items], path, least)
        if run is not None:
            end = run.first + run.period
            held = {name for item in items[run.first : end] for name, _ in _numbers(item)}
            yield dataclasses.replace(run, places=places & held)
            return
    for name, child in module._modules.items():
        if child is not None:
            inner = f"{path}.{name}" if path else name
            yield from _runs(inner, child, shared, least, placeless)


def _items(module: nn.Module) -> list[nn.Module | torch.Tensor | None]:
    """What a list holds by number, in order; nothing for what is no list."""
    if type(module) is nn.ParameterList:
        # Anything else in it stands among the attributes.
        return list(module._parameters.values()) if len(module) == len(module._parameters) else []
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return []
    children = module._modules
    return [children[name] for name in takewhile(children.__contains__, map(str, count()))]


def _places(items: Sequence[nn.Module | torch.Tensor | None]) -> frozenset[str]:
    """The paths of attributes that count the items of a list."""
    offsets: dict[str, set[int]] = {}
    counts = Counter[str]()
    for place, item in enumerate(items):
        for name, number in _numbers(item):
            offsets.setdefault(name, set()).add(number - place)
            counts[name] += 1
    return frozenset(name for name, found in offsets.items() if len(found) == 1 < counts[name])


def _numbers(item: nn.Module | torch.Tensor | None) -> Iterator[tuple[str, int]]:
    """The whole numbers among the attributes of a module and of those in it, by path."""
    if isinstance(item, nn.Module):
        for path, module in item.named_modules():
            for name, value in vars(module).items():
                if type(value) is int:
                    yield f"{path}.{name}", value


def _longest(kinds: Sequence[Hashable], path: str, least: int) -> EqualRun | None:
    """The run with the most modules, among equals that with the shortest period."""
    best: EqualRun | None = None
    for period in range(1, _LONGEST_PERIOD + 1):
        start = period
        for place in range(period, len(kinds) + 1):
            if place < len(kinds) and kinds[place] == kinds[place - period]:
                continue
            run = EqualRun(path, start - period, period, (place - start) // period + 1)
            size = run.count * period
            if run.count >= least and (best is None or size > best.count * best.period):
                best = run
            start = place + 1
    return best


def _description(
    item: nn.Module | torch.Tensor | None,
    shared: frozenset[int],
    places: frozenset[str],
    path: str = "",
) -> Hashable:
    """Equal for items that differ in nothing but the numbers in their state.

    Args:
        places: the paths of attributes that are left out.
        path: of the module in the item.
    """
    if not isinstance(item, nn.Module):
        return _of_tensor(item, shared)
    attributes = tuple(
        (name, None if f"{path}.{name}" in places else _frozen(value))
        for name, value in sorted(vars(item).items())
        if name not in _TREE
    )
    state = tuple(
        (kind, name, _of_tensor(tensor, shared))
        for kind, table in (("parameter", item._parameters), ("buffer", item._buffers))
        for name, tensor in table.items()
    )
    children = tuple(
        (name, _description(child, shared, places, f"{path}.{name}" if path else name))
        for name, child in item._modules.items()
    )
    return (type(item), attributes, state, children)


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
        return _Alone(value) if getattr(value, "__closure__", None) else value  # of no built-in
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


def _with_list(module: nn.Module, path: Sequence[str], run: EqualRun) -> nn.Module:
    """A copy of the modules on the way to a list, which has a short run there."""
    twin = copy.copy(module)
    if path:
        child = module._modules[path[0]]
        assert child is not None  # the list was found there
        vars(twin)["_modules"] = {**module._modules, path[0]: _with_list(child, path[1:], run)}
        return twin
    items = _items(module)
    if run.places:
        end = run.first + run.count * run.period
        for place in range(run.first, end):
            items[place] = _placeless(items[place], run.places)
    end = run.first + 2 * run.period
    kept = items[:end] + items[end + run.removed :]
    if isinstance(twin, nn.ParameterList):
        twin._size = len(kept)
    table = "_parameters" if isinstance(twin, nn.ParameterList) else "_modules"
    removed = set(map(str, range(len(kept), len(items))))
    left = {name: item for name, item in vars(module)[table].items() if name not in removed}
    vars(twin)[table] = {**left, **{str(place): item for place, item in enumerate(kept)}}
    return twin


def _placeless(item: Any, places: frozenset[str], path: str = "") -> Any:
    """A copy of a module of a list that does not know its place there."""
    if not isinstance(item, nn.Module):
        return item
    twin = copy.copy(item)
    for name in vars(item):
        if f"{path}.{name}" in places:
            vars(twin)[name] = LayerPlace()
    vars(twin)["_modules"] = {
        name: _placeless(child, places, f"{path}.{name}" if path else name)
        for name, child in item._modules.items()
    }
    return twin


_USES = """
    eq ne lt le gt ge hash bool repr str format index int float complex trunc floor ceil round
    neg pos abs invert add sub mul truediv floordiv mod divmod pow lshift rshift and or xor
    radd rsub rmul rtruediv rfloordiv rmod rdivmod rpow rlshift rrshift rand ror rxor
"""


def _used(*_: object) -> NoReturn:
    raise TraceError("what the model computes depends on the place of a layer")


class LayerPlace:
    """A whole number that nobody knows: it may be handed on, and raises when it is used.

    Raises:
        TraceError: when it is compared, computed with, looked up or printed.
    """

    @property
    def __class__(self) -> Any:
        """What `isinstance` is told: a place is an int in the model."""
        return int

    @__class__.setter
    def __class__(self, _: Any) -> None:
        _used()

    def __copy__(self) -> LayerPlace:
        """Copies of the model know no more."""
        return self

    def __deepcopy__(self, _: object) -> LayerPlace:
        """Copies of the model know no more."""
        return self

    def __getattr__(self, name: str) -> NoReturn:
        """An int has attributes too."""
        if name.startswith("__"):
            raise AttributeError(name)
        _used()


for _use in _USES.split():
    setattr(LayerPlace, f"__{_use}__", _used)
