"""Holds a graph against a model by the kernels that they run, on tensors that hold no numbers.

Both run forward on meta, wherever they stand, in train and in eval mode. They are the same program
where the kernels are the same ones in the same order, called with the same constants, on the same
tensors: each parameter is known by its name, each result by the kernel that made it. What the
backward does follows from these. So this holds for any numbers, and takes a fraction of the time of
a comparison of gradients: what a kernel returns is worked out once for every kind of arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from gpipe_compiler.dispatching import PlainDispatchMode
from gpipe_compiler.frontend.entry import Entry, make_entry
from gpipe_compiler.frontend.recompute import activations_kept
from gpipe_compiler.frontend.signature import read_signature
from gpipe_compiler.frontend.state import isolated, state_table
from gpipe_compiler.frontend.structure import describe
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.no_gc import uncollected
from gpipe_compiler.quiet import quiet
from gpipe_compiler.runtime.core.nest import tensors_of

_SAMPLES = 2
_WHERE_MADE = frozenset({"device", "pin_memory"})
"""Arguments that a graph may lack: what it makes goes where the model is."""


@uncollected()
def same_kernels(graph: Graph, whole: Subject, short: Subject) -> bool:
    """Whether a graph runs the kernels of a model.

    A model whose Python code asks for the numbers in a tensor cannot be run so: False.

    Args:
        whole: the model.
        short: the same with fewer layers, which is run to learn what the model returns.

    Raises:
        ModelError: when the short model raises.
    """
    where = contextlib.nullcontext if state_table(whole.model).on_meta else _new_on_meta
    if where is _new_on_meta:
        whole, short = _on_meta(whole), _on_meta(short)
        tensors = {name: tensor.to("meta") for name, tensor in graph.tensors.items()}
        graph = graph.replace(tensors=tensors)
    model = isolated(whole.model)
    canonical = state_table(whole.model).canonical
    names = {
        id(tensor): canonical[name]
        for pairs in (model.named_parameters(), model.named_buffers())
        for name, tensor in pairs
    }
    names |= {id(tensor): name for name, tensor in graph.tensors.items()}
    known: dict[Any, Any] = {}
    modes = (True, False) if whole.training else (False,)
    entries = [make_entry(short, mode, reduces=False) for mode in modes]
    for entry in entries:
        entry.model = model.train(entry.training)
        outputs = entry.structure == entries[-1].structure
        log = KernelLog(names, known)
        try:
            with where():
                _run_model(entry, log, outputs)
            again = KernelLog(names, known, expected=log.seen)
            _run_graph(graph, entry, again, outputs)
        except Exception:  # whatever the model raises on meta, and a graph may call anything
            return False
        if not again.complete:
            return False
    return True


def _new_on_meta() -> contextlib.AbstractContextManager[Any]:
    """Where code that names no device makes its tensors."""
    return torch.device("meta")


def _on_meta(subject: Subject) -> Subject:
    """The subject with a copy of its model on meta."""
    model = isolated(subject.model)
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the first, whose id it is
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        for table in tables:
            for name, tensor in table.items():
                if isinstance(tensor, torch.Tensor):
                    known = moved.setdefault(id(tensor), (tensor, _moved(tensor)))
                    table[name] = known[1]
    return dataclasses.replace(subject, model=model)


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    there = tensor.detach().to("meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(there, requires_grad=tensor.requires_grad)
    return there.requires_grad_(tensor.requires_grad)


def runs_on_meta(subject: Subject) -> bool:
    """Whether the Python code of a model asks for no number in a tensor, so that kernels tell."""
    signature = read_signature(subject, on_meta=True)
    args, kwargs, _ = signature.rebuild(signature.samples(_SAMPLES))
    with torch.random.fork_rng(), quiet(), torch.no_grad(), _new_on_meta():
        try:
            _on_meta(subject).model(*args, **kwargs)
        except Exception:  # whatever the model raises on meta
            return False
    return True


class OtherKernelError(Exception):
    """A kernel runs that is not the expected one."""


class KernelLog(PlainDispatchMode):
    """Writes down, or compares with what was written down, every kernel that runs in it.

    Attributes:
        seen: what was written down.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        known: dict[Any, Any],
        expected: Sequence[Any] | None = None,
    ) -> None:
        """
        Args:
            names: of tensors, by id.
            known: what kernels return, by what they are given: filled in, and shared by runs.
            expected: what has to come; None writes down what comes.
        """
        super().__init__()
        self.seen: list[Any] = []
        self._expected = expected
        self._count = 0
        self._numbers: dict[int, int | str] = dict(names)
        self._alive: list[torch.Tensor] = []  # for ids to stay their own
        self._known = known

    @property
    def complete(self) -> bool:
        """Whether all that was expected has come."""
        return self._expected is not None and self._count == len(self._expected)

    def note(self, entry: Any) -> None:
        """Writes an entry down, or raises `OtherKernelError` where another was expected."""
        if self._expected is None:
            self.seen.append(entry)
        elif self._count >= len(self._expected) or self._expected[self._count] != entry:
            raise OtherKernelError
        self._count += 1

    def number(self, tensor: torch.Tensor) -> int | str:
        """The name of a tensor, or its number in the order of appearance."""
        found = self._numbers.get(id(tensor))
        if found is None:
            found = self._numbers[id(tensor)] = len(self._alive)
            self._alive.append(tensor)
        return found

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Notes one kernel and returns what it returns."""
        kwargs = kwargs or {}
        given: list[torch.Tensor] = []
        call = (
            func,
            torch.is_grad_enabled(),
            tuple([_frozen(item, given) for item in args]),
            tuple([(k, _frozen(v, given)) for k, v in kwargs.items() if k not in _WHERE_MADE]),
        )
        self.note((call, tuple(map(self.number, given))))
        returned = self._returned(func, call, given, args, kwargs)
        if isinstance(returned, torch.Tensor):
            self.number(returned)
        elif isinstance(returned, tuple | list):
            for item in returned:
                if isinstance(item, torch.Tensor):
                    self.number(item)
        return returned

    def _returned(
        self,
        func: Any,
        call: Any,
        given: Sequence[torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if not given or not _is_functional(func):
            return func(*args, **kwargs)
        for tensor in given:
            if not tensor.is_meta:
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
            self._known[key] = _form(returned) or (returned,)
            return returned
        return _made(form) if form[0] in (_ONE, _SEVERAL) else func(*args, **kwargs)


@cache
def _is_functional(func: Any) -> bool:
    """Whether a kernel writes to nothing, and makes all that it returns."""
    schema = func._schema
    return not schema.is_mutable and all(result.alias_info is None for result in schema.returns)


_ONE, _SEVERAL = "one", "several"


def _form(returned: Any) -> tuple[Any, ...] | None:
    """How to make what a kernel returned anew; None for anything but tensors on meta."""
    if isinstance(returned, torch.Tensor) and returned.is_meta:
        return (_ONE, tuple(returned.shape), returned.stride(), returned.dtype)
    if type(returned) is tuple:
        parts = tuple(_form(item) for item in returned)
        if all(part is not None and part[0] == _ONE for part in parts):
            return (_SEVERAL, *parts)
    return None


def _made(form: tuple[Any, ...]) -> Any:
    if form[0] == _SEVERAL:
        return tuple(map(_made, form[1:]))
    _, shape, stride, dtype = form
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


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


def _run_model(entry: Entry, log: KernelLog, outputs: bool) -> None:
    inputs = entry.signature.samples(_SAMPLES)
    for tensor in inputs:
        log.number(tensor)

    def look(_module: nn.Module, _args: Any, output: Any) -> None:
        if describe(output) != (entry.known.structure, entry.known.dropped):
            raise OtherKernelError

    handle = entry.model.register_forward_hook(look)
    try:
        with _running(entry), activations_kept(), log:
            returned = entry(*inputs)
    finally:
        handle.remove()
    loss = returned.pop(0) if entry.has_loss else None
    _note_ends(log, entry.outputs(returned) if outputs else None, loss)


def _run_graph(graph: Graph, entry: Entry, log: KernelLog, outputs: bool) -> None:
    inputs = entry.signature.samples(_SAMPLES)
    for tensor in inputs:
        log.number(tensor)
    interpreter = Interpreter(graph, graph.tensors, entry.training).prepare()
    given = {source.name: tensor for source, tensor in zip(graph.inputs, inputs, strict=True)}
    with _running(entry), torch.device("meta"), log:
        values = interpreter.run(given)
    loss = None if graph.loss is None else values[graph.loss.value]
    _note_ends(log, interpreter.resolve(graph.outputs, values) if outputs else None, loss)


def _note_ends(log: KernelLog, outputs: Any, loss: Any) -> None:
    """Notes which tensors are returned, and which is the loss."""
    log.note(("outputs", tuple((path, log.number(t)) for path, t in tensors_of(outputs))))
    log.note(("loss", None if loss is None else log.number(loss)))
