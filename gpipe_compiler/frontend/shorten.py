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
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from gpipe_compiler.errors import TraceError
from gpipe_compiler.frontend.state import named_state
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir.stretches import KEPT, ShortStretch, Stretch, alike_in_a_row

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
        short: where they lie in the list, by repetitions, and which of these stay.
        places: the paths, below a module of the list, of attributes that hold its own place.
    """

    path: str
    short: ShortStretch
    places: frozenset[str] = frozenset()

    @property
    def count(self) -> int:
        """All repetitions."""
        return self.short.whole.count

    def place(self, path: str) -> int | None:
        """The place in the list of what stands under a path; None for anything else."""
        if not path.startswith(self._prefix):
            return None
        head = path[len(self._prefix) :].partition(".")[0]
        return int(head) if head.isdigit() else None

    @property
    def _prefix(self) -> str:
        return self.path and f"{self.path}."

    def _at(self, path: str, new: Callable[[int], int]) -> str:
        """A path in the list as it is called at another place."""
        place = self.place(path)
        if place is None:
            return path
        _, dot, rest = path[len(self._prefix) :].partition(".")
        return f"{self._prefix}{new(place)}{dot}{rest}"

    def moved(self, path: str, repetitions: int) -> str:
        """A path in the list as it is called a number of repetitions further on."""
        return self._at(path, lambda place: place + repetitions * self.short.whole.period)

    def in_full(self, path: str) -> str:
        """A path of the shortened model as the whole model calls it."""
        return self._at(path, self.short.in_full)

    def in_short(self, path: str) -> str:
        """The other way round, for what is kept."""
        return self._at(path, self.short.in_short)


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
    runs = tuple(
        dataclasses.replace(run, short=dataclasses.replace(run.short, kept=kept)) for run in found
    )
    if not runs:
        return None
    model = subject.model
    for run in runs:
        model = _with_list(model, run.path.split(".") if run.path else (), run)
    initial = {
        _in_short(runs, name): steps
        for name, steps in subject.initial.items()
        if not any(run.place(name) in run.short.gap for run in runs)
    }
    return Shortened(dataclasses.replace(subject, model=model, initial=initial), runs)


def _in_short(runs: Sequence[EqualRun], name: str) -> str:
    """A name of the whole model, of what is kept, as the shortened one has it."""
    for run in runs:
        name = run.in_short(name)
    return name


def _shared_tensors(model: nn.Module) -> frozenset[int]:
    """The tensors that stand in several places of the model, as ids."""
    counts = Counter(id(tensor) for _, tensor in named_state(model))
    return frozenset(key for key, count in counts.items() if count > 1)


def _runs(
    path: str, module: nn.Module, shared: frozenset[int], least: int, placeless: bool
) -> Iterator[EqualRun]:
    """The longest run of every list, lists inside of runs left out."""
    items = _items(module)
    if len(items) >= least:
        places = _places(items) if placeless else frozenset()
        run = _longest([_description(item, shared, places) for item in items], least)
        if run is not None:
            block = items[run.start : run.start + run.period]
            held = {name for item in block for name, _ in _numbers(item)}
            yield EqualRun(path, ShortStretch(run), places & held)
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
    return [
        children[name]
        for name in itertools.takewhile(children.__contains__, map(str, itertools.count()))
    ]


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


def _longest(kinds: Sequence[Hashable], least: int) -> Stretch | None:
    """The stretch with the most modules, among equals that with the shortest period."""

    def found(period: int) -> Iterator[Stretch]:
        def is_alike(place: int) -> bool:
            return kinds[place] == kinds[place - period]

        for row in alike_in_a_row(len(kinds), period, is_alike, least):
            yield Stretch(row.start, period, len(row) // period)

    every = itertools.chain.from_iterable(map(found, range(1, _LONGEST_PERIOD + 1)))
    return max(every, key=lambda stretch: stretch.size, default=None)


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
    return _Alone(value)


class _Alone:
    """Equal only to what stands for the very same object, where modules may share that.

    A function or a configuration that all blocks share they may; no tensor and no module, which the
    rest of the model may have as well.
    """

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, _Alone) and self.value is other.value
        return same and not isinstance(self.value, torch.Tensor | nn.Module)

    def __hash__(self) -> int:
        return id(self.value)


def _with_list(module: nn.Module, path: Sequence[str], run: EqualRun) -> nn.Module:
    """A copy of the modules on the way to a list, which has a short run there."""
    twin = copy.copy(module)
    if path:
        child = module._modules[path[0]]
        assert child is not None  # the list was found there
        vars(twin)["_modules"] = {**module._modules, path[0]: _with_list(child, path[1:], run)}
        return twin
    items, whole, gap = _items(module), run.short.whole, run.short.gap
    if run.places:
        for place in range(whole.start, whole.end):
            items[place] = _placeless(items[place], run.places)
    kept = items[: gap.start] + items[gap.stop :]
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
