"""Holds a graph against a model by the kernels that they run, on tensors that hold no numbers.

Both run forward in train and in eval mode, in each precision that the graph is for, on fake
tensors, which are cast as real ones are. They are the same program where the kernels are the same
ones in the same order, called with the same constants, on the same tensors: each parameter is known
by its name, each result by the kernel that made it. Kernels that have no effect, and whose results
nothing needs, are left out. What a kernel returns is worked out once for every kind of arguments.
Hooks in the backward are no kernels here: gradients are compared in numbers besides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn, TypeAlias
from unittest import mock

import torch
from torch import nn

from gpipe_compiler.dispatching import PlainDispatchMode
from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.frontend.own_functions import own_functions_met
from gpipe_compiler.frontend.recompute import activations_kept
from gpipe_compiler.frontend.state import named_state, state_table
from gpipe_compiler.frontend.structure import describe
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.surroundings import Place, ambient, as_exported, kind_of
from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.no_gc import uncollected
from gpipe_compiler.quiet import quiet
from gpipe_compiler.runtime.core.nest import tensors_of
from gpipe_compiler.runtime.core.precision import lower_dtype
from gpipe_compiler.runtime.core.random import draws
from gpipe_compiler.runtime.spec import Precision

_SAMPLES = 2
_COPIES = (
    torch.ops.aten.clone.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.lift_fresh.default,
)
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
_WHERE_MADE = frozenset({"device", "pin_memory"})
"""Arguments that a graph may lack: what it makes goes where the model is."""


@uncollected()
def same_kernels(graph: Graph, whole: Subject, short: Subject, *, exported: bool = False) -> bool:
    """Whether a graph runs the kernels of a model, in every precision that it is for.

    A model whose Python code asks for the numbers in a tensor cannot be run so: False.

    Args:
        short: the same with fewer layers, which is run to learn what the model returns.
        exported: of the program that the model is where it sees that it is exported.

    Raises:
        ModelError: when the short model raises.
    """
    modes = (True, False) if whole.training else (False,)
    entries = [Entry(short, mode, reduces=False) for mode in modes]
    precisions = [precision for precision in Precision if precision not in graph.unlike]
    return all(
        _same_in(precision, graph, whole.model, entries, exported=exported)
        for precision in precisions
    )


def _same_in(
    precision: Precision,
    graph: Graph,
    model: nn.Module,
    entries: Sequence[Entry],
    *,
    exported: bool,
) -> bool:
    """Whether graph and model run the same kernels in one precision, in the modes of entries."""
    lower, kind = lower_dtype(precision), kind_of(entries[0])
    place = Place.of(kind)
    table, own = state_table(model), {id(t): name for name, t in graph.tensors.items()}
    canonical = {
        name: own.get(id(tensor), table.canonical[name]) for name, tensor in named_state(model)
    }
    model = place.moved(model)
    graph = graph.replace(tensors={n: place.to(tensor) for n, tensor in graph.tensors.items()})
    names = {id(tensor): canonical[name] for name, tensor in named_state(model)}
    names |= {id(tensor): name for name, tensor in graph.tensors.items()}
    known: dict[Any, Any] = {}
    for entry in entries:
        entry.model = model.train(entry.training)
        outputs = entry.structure == entries[-1].structure
        around = as_exported() if exported else contextlib.nullcontext()
        try:
            with place.mode, ambient(lower, kind), around:
                expected = _run_model(entry, KernelLog(names, known, place), outputs)
            with place.device, place.mode, ambient(lower, kind):
                actual = _run_graph(graph, entry, KernelLog(names, known, place), outputs)
        except Exception:  # whatever the model raises there, and a graph may call anything
            return False
        if actual != expected:
            return False
    return True


class OtherProgramError(Exception):
    """The model does what no kernels show: it returns something else than with fewer layers, holds
    other buffers afterwards, has a backward of its own, or a hook on a gradient where gradients
    have no numbers."""


Number: TypeAlias = int | str
"""Of a tensor in the order of appearance, or its name."""


@dataclass(frozen=True, slots=True)
class _Called:
    """A kernel that ran, with its constants; the tensors given to it, and those it made.

    Attributes:
        stays: whether it has an effect besides what it makes, or makes no tensor.
        copies: whether it makes what it is given, in other memory.
    """

    call: Hashable
    given: tuple[Number, ...]
    made: tuple[Number, ...]
    stays: bool
    copies: bool


class KernelLog(PlainDispatchMode):
    """Writes down every kernel that runs in it."""

    def __init__(self, names: Mapping[int, str], known: dict[Any, Any], place: Place) -> None:
        """
        Args:
            names: of tensors, by id.
            known: what kernels return, by what they are given: filled in, and shared by runs.
            place: where they run.
        """
        super().__init__()
        self._place = place
        self._calls: list[_Called] = []
        self._writes = False
        self._numbers: dict[int, Number] = dict(names)
        self._alive: list[torch.Tensor] = []  # for ids to stay their own
        self._known = known

    def take(self, inputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """What the model is called with, where it runs, and named."""
        taken = list(map(self._place.to, inputs))
        self._alive.extend(taken)
        self._numbers.update((id(tensor), f"input {n}") for n, tensor in enumerate(taken))
        return taken

    def number(self, tensor: torch.Tensor) -> Number:
        """The name of a tensor, or its number in the order of appearance."""
        found = self._numbers.get(id(tensor))
        if found is None:
            found = self._numbers[id(tensor)] = len(self._alive)
            self._alive.append(tensor)
        return found

    def program(self, outputs: Any, loss: torch.Tensor | None) -> Hashable:
        """What ran for the sake of these or has an effect, its tensors numbered as they come.

        Where nothing is written to, a copy is what it copies: layouts in memory, which the device
        decides, are no part of the program.
        """
        ends = [(path, self.number(tensor)) for path, tensor in tensors_of((outputs, loss))]
        needed = {number for _, number in ends}
        kept: list[_Called] = []
        copied: dict[Number, Number] = {}
        for called in () if self._writes else self._calls:
            if called.copies:
                (source,), (copy,) = called.given, called.made
                copied[copy] = copied.get(source, source)
        for called in reversed(self._calls):
            if called.stays or not needed.isdisjoint(called.made):
                needed.update(called.given)
                kept.append(called)
        numbers: dict[Number, int] = {}

        def named(tensors: Iterable[Number]) -> tuple[Number, ...]:
            known = (copied.get(number, number) for number in tensors)
            return tuple(
                n if isinstance(n, str) else numbers.setdefault(n, len(numbers)) for n in known
            )

        calls = tuple(
            (called.call, named(called.given), named(called.made))
            for called in reversed(kept)
            if copied.keys().isdisjoint(called.made)
        )
        return calls, tuple(path for path, _ in ends), named(number for _, number in ends)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.prim.device.default:  # no kernel: how a fake tensor reports its device
            return self._place.device if self._place.holds(args[0]) else func(*args, **kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = self._place.device
        given: list[torch.Tensor] = []
        call: Hashable = (
            func,
            torch.is_grad_enabled(),
            _autocast(),
            tuple([_frozen(item, given) for item in args]),
            tuple([(k, _frozen(v, given)) for k, v in kwargs.items() if k not in _WHERE_MADE]),
        )
        numbers = tuple(map(self.number, given))
        returned = self._returned(func, call, given, args, kwargs)
        items = returned if isinstance(returned, tuple | list) else (returned,)
        made = tuple([self.number(item) for item in items if isinstance(item, torch.Tensor)])
        if func in _VIEWS:
            call = ("view", torch.is_grad_enabled(), tuple(returned.shape))
        written = _writes(func)
        self._writes |= written
        stays = not made or written or draws(func, args, kwargs)
        copies = func in _COPIES or (
            func is torch.ops.aten.slice.Tensor and returned.shape == given[0].shape
        )
        self._calls.append(_Called(call, numbers, made, stays, copies))
        return returned

    def _returned(
        self,
        func: Any,
        call: Any,
        given: Sequence[torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if not given or not (_is_functional(func) or _is_view(func)):
            return func(*args, **kwargs)
        place = self._place
        if not all(map(place.holds, given)):
            return func(*args, **kwargs)
        # Calls are compared with types, as 1 and True and 1.0 are equal.
        key = (
            call,
            tuple([(t.shape, t.stride(), t.storage_offset(), t.dtype) for t in given]),
            kwargs.get("device"),
        )
        form = self._known.get(key)
        if form is None:
            returned = func(*args, **kwargs)
            known = _view_form(returned, given[0]) if _is_view(func) else _form(returned, place)
            self._known[key] = known or (returned,)
            return returned
        if form[0] == _VIEW:
            return place.view(given[0], *form[1:])
        return _made(form, place) if form[0] in (_ONE, _SEVERAL) else func(*args, **kwargs)


def _autocast() -> Hashable:
    """What each kind of device casts to, None where it does not: a package may run on another."""
    return tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in ("cpu", "cuda")
    )


@cache
def _is_functional(func: Any) -> bool:
    """Whether a kernel writes to nothing, and makes all that it returns."""
    schema = func._schema
    return not schema.is_mutable and all(result.alias_info is None for result in schema.returns)


@cache
def _is_view(func: Any) -> bool:
    """Whether all that a kernel does is to return a view of its first argument."""
    schema = func._schema
    (first, *_), (result, *more) = schema.arguments or [None], schema.returns or [None]
    return (
        not (schema.is_mutable or more)
        and first is not None
        and result is not None
        and first.alias_info is not None
        and result.alias_info is not None
        and first.alias_info.before_set == result.alias_info.before_set
        and result.type.kind() == "TensorType"
    )


_ONE, _SEVERAL, _VIEW = "one", "several", "view"


def _view_form(returned: Any, viewed: torch.Tensor) -> tuple[Any, ...] | None:
    """How to view a tensor so anew; None where that is more than another shape."""
    plain = returned is not viewed and returned.dtype == viewed.dtype
    if not plain or returned.is_conj() or returned.is_neg():
        return None
    return (_VIEW, tuple(returned.shape), returned.stride(), returned.storage_offset())


def _form(returned: Any, place: Place) -> tuple[Any, ...] | None:
    """How to make what a kernel returned anew; None for anything but tensors without numbers."""
    if isinstance(returned, torch.Tensor) and place.holds(returned):
        return (_ONE, tuple(returned.shape), returned.stride(), returned.dtype)
    if type(returned) is tuple:
        parts = tuple(_form(item, place) for item in returned)
        if all(part is not None and part[0] == _ONE for part in parts):
            return (_SEVERAL, *parts)
    return None


def _made(form: tuple[Any, ...], place: Place) -> Any:
    if form[0] == _SEVERAL:
        return tuple(_made(part, place) for part in form[1:])
    return place.empty(*form[1:])


def _frozen(item: Any, tensors: list[torch.Tensor]) -> Any:
    """An argument with its types, its tensors moved into a list."""
    kind = type(item)
    if kind is int or kind is bool:
        return kind, item
    if isinstance(item, torch.Tensor):
        tensors.append(item)
        return None
    if isinstance(item, tuple | list):
        return tuple([_frozen(part, tensors) for part in item])
    return kind, item if isinstance(item, int) else repr(item)


@contextlib.contextmanager
def _running(entry: Entry) -> Iterator[None]:
    with torch.random.fork_rng(), quiet(), torch.set_grad_enabled(entry.has_loss):
        yield


def _run_model(entry: Entry, log: KernelLog, outputs: bool) -> Hashable:
    inputs = log.take(entry.signature.samples(_SAMPLES))

    def look(_module: nn.Module, _args: Any, output: Any) -> None:
        if describe(output, trains=entry.has_loss) != entry.known.structure:
            raise OtherProgramError

    def hooked(*_: object) -> NoReturn:
        raise OtherProgramError

    before = [(buffer, buffer.shape) for buffer in entry.model.buffers()]
    handle = entry.model.register_forward_hook(look)
    unseen = entry.has_loss and entry.states.on_meta
    hooks = mock.patch.object(torch.Tensor, "register_hook", hooked)
    try:
        with (
            _running(entry),
            activations_kept(),
            hooks if unseen else contextlib.nullcontext(),
            own_functions_met() as met,
            log,
        ):
            returned = entry(*inputs)
    finally:
        handle.remove()
    for (buffer, shape), after in zip(before, entry.model.buffers(), strict=True):
        if after is not buffer or after.shape != shape:
            raise OtherProgramError
    loss = returned.pop(0) if entry.has_loss else None
    if loss is not None and met:
        raise OtherProgramError
    return log.program(entry.outputs(returned) if outputs else None, loss)


def _run_graph(graph: Graph, entry: Entry, log: KernelLog, outputs: bool) -> Hashable:
    inputs = log.take(entry.signature.samples(_SAMPLES))
    interpreter = Interpreter(graph, graph.tensors, entry.training).prepare()
    given = {source.name: tensor for source, tensor in zip(graph.inputs, inputs, strict=True)}
    with _running(entry), log:
        values = interpreter.run(given)
    loss = None if graph.loss is None else values[graph.loss.value]
    return log.program(interpreter.resolve(graph.outputs, values) if outputs else None, loss)


@cache
def _writes(func: Any) -> bool:
    """Whether a kernel may write to a tensor.

    Normalisation writes running statistics though its schema does not say so.
    """
    name = str(func)
    return bool(func._schema.is_mutable) or "batch_norm" in name or "instance_norm" in name
