"""The parameters and buffers of a model under their original names, and copies of the model."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gpipe_compiler.errors import ModelError, TraceError
from gpipe_compiler.ir import State, StateKind
from gpipe_compiler.runtime.spec import Steps


@dataclass(frozen=True)
class StateTable:
    """The model's own tensors.

    Attributes:
        states: by canonical name.
        tensors: the model's tensors by canonical name.
        canonical: every name, tied ones included, to the canonical one.
        initial: how tensors on meta begin, by name; plain attributes of modules stand here too.
    """

    states: Mapping[str, State]
    tensors: Mapping[str, torch.Tensor]
    canonical: Mapping[str, str]
    initial: Mapping[str, Steps] = field(default_factory=dict)

    @property
    def on_meta(self) -> bool:
        """Whether the model has no memory, so that nothing of it can be run."""
        return any(tensor.is_meta for tensor in self.tensors.values())


def state_table(model: nn.Module, initial: Mapping[str, Steps] | None = None) -> StateTable:
    """The parameters and buffers of a model.

    Raises:
        ModelError: when a lazy module has not seen its first input yet.
    """
    initial = initial or {}
    names: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    found: dict[str, tuple[StateKind, torch.Tensor]] = {}
    canonical: dict[str, str] = {}
    for kind, pairs in (
        (StateKind.PARAMETER, model.named_parameters(remove_duplicate=False)),
        (StateKind.BUFFER, model.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in pairs:
            if nn.parameter.is_lazy(tensor):
                raise ModelError(
                    f"{name} has no shape yet: its module is lazy",
                    hint="call the model once in build_model(), so that lazy modules get a shape",
                )
            first = names.setdefault(id(tensor), name)
            canonical[name] = first
            if first == name:
                found[name] = (kind, tensor)
            else:
                aliases.setdefault(first, []).append(name)
    transient = transient_buffers(model)
    states = {
        name: State(
            name,
            kind,
            tuple(tensor.shape),
            tensor.dtype,
            requires_grad=tensor.requires_grad,
            persistent=name not in transient,
            aliases=tuple(aliases.get(name, ())),
            initial=initial.get(name, ()),
        )
        for name, (kind, tensor) in found.items()
    }
    tensors = {name: tensor for name, (_, tensor) in found.items()}
    return StateTable(states, tensors, canonical, initial)


def named_state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers under all their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def transient_buffers(model: nn.Module) -> frozenset[str]:
    """Names of the buffers that `state_dict()` leaves out."""
    return frozenset(
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    )


def isolated(model: nn.Module, *, share_parameters: bool = False) -> nn.Module:
    """A copy of the model that may be run and traced without the model noticing.

    Args:
        share_parameters: the copy has the model's own parameters, to which nothing may write, as
            forward does to those of a teacher. Buffers and other tensors are always copied.

    Raises:
        TraceError: when Python cannot copy the model.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = parameter if share_parameters else _clone(parameter)
    for module in model.modules():
        for value in (*vars(module).values(), *module._buffers.values()):
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                memo[id(value)] = _clone(value)
    copied = copied_model(model, memo)
    rebind(copied, memo)
    return copied


def copied_model(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy of a model that holds other tensors.

    Args:
        memo: these, by the identities of its own.

    Raises:
        TraceError: when Python cannot copy the model.
    """
    try:
        with _CopiesWhatWasMade():
            return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, AttributeError, NotImplementedError) as error:
        raise TraceError(
            f"the model cannot be copied: {error}",
            hint="tracing works on a copy, so that the model stays as it is: "
            "give the module that holds the object a __deepcopy__, or create the object in forward",
        ) from error


class _CopiesWhatWasMade(TorchFunctionMode):
    """Has deepcopy take the numbers of tensors that an earlier call of the model has made and left
    in a list, a dict or an object: torch copies those alone that have no history."""

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            return _clone(args[0])
        return func(*args, **(kwargs or {}))


def same_constant(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two constants are equal; on meta, whether they look so."""
    if one is other:
        return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return one.is_meta or other.is_meta or torch.equal(one, other)


def put_tensors(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Puts another tensor in the place of each that a copy of a model holds, in lists too."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the first, whose id it is

    def other(item: Any) -> Any:
        if isinstance(item, list) and item and all(isinstance(x, torch.Tensor) for x in item):
            return [other(part) for part in item]
        if not isinstance(item, torch.Tensor):
            return item
        if id(item) not in made:
            new = change(item.detach())
            if isinstance(item, nn.Parameter):
                new = nn.Parameter(new, requires_grad=item.requires_grad)
            made[id(item)] = item, new.requires_grad_(item.requires_grad)
        return made[id(item)][1]

    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        for table in tables:
            for name, item in table.items():
                table[name] = other(item)


_LARGE = 1 << 20
"""Bytes of parameters from which on their copies take memory when they are written only."""


@contextlib.contextmanager
def state_restored(model: nn.Module) -> Iterator[None]:
    """Around runs of a model whose parameters and buffers are to be afterwards what they were."""
    held = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    before = [(tensor, copied(tensor)) for tensor in held]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, content in before:
                if not torch.equal(tensor, content):  # or a copy would take memory of its own
                    tensor.copy_(content)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy; of a large parameter one that takes memory of its own once either is written.

    Not of buffers: torch cannot resize such a copy, as models do with theirs.
    """
    host = tensor.device.type == "cpu" and tensor.layout is torch.strided
    plain = type(tensor) is nn.Parameter and not (tensor.is_quantized or tensor.is_complex())
    if host and plain and tensor.is_contiguous() and tensor.nbytes >= _LARGE:
        with contextlib.suppress(RuntimeError):  # memory that is not torch's own, such as a file's
            return torch._lazy_clone(tensor.detach())
    return tensor.detach().clone()


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    clone = copied(tensor)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(clone, requires_grad=tensor.requires_grad)
    return clone.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def rebind(model: nn.Module, memo: dict[int, Any]) -> None:
    """Lets the functions that a copy holds capture what belongs to the copy.

    `copy.deepcopy` takes functions as they are: a hook that captured its module, or a tensor or
    dict beside it, acts on the model that was copied.

    Args:
        memo: of the `copy.deepcopy` that made the copy.
    """
    binding = _Binding(memo)
    for module in list(model.modules()):
        for name, item in list(vars(module).items()):
            if name not in ("_parameters", "_buffers", "_modules"):
                bound = binding.of(item)
                if bound is not item:
                    vars(module)[name] = bound


@dataclass(frozen=True)
class _Binding:
    """What stands in the copy for what the functions of the original captured.

    Attributes:
        done: by the identity of functions, theirs.
    """

    memo: dict[int, Any]
    done: dict[int, Callable[..., Any]] = field(default_factory=dict)

    def of(self, item: Any) -> Any:
        """The item with the functions in it bound anew: itself where there are none."""
        match item:
            case FunctionType():
                return self._function(item)
            case functools.partial():
                function, keywords = self.of(item.func), self.of(dict(item.keywords))
                return type(item)(function, *map(self.of, item.args), **keywords)
            case dict():
                for key, part in list(item.items()):
                    bound = self.of(part)
                    if bound is not part:
                        item[key] = bound
            case list():
                item[:] = map(self.of, item)
            case tuple() if type(item) is tuple:
                return tuple(map(self.of, item))
        return item

    def _function(self, function: FunctionType) -> Callable[..., Any]:
        known = self.done.get(id(function))
        if known is not None:
            return known
        cells = function.__closure__ or ()
        held = [*map(_content, cells), *(function.__defaults__ or ())]
        held.extend((function.__kwdefaults__ or {}).values())
        self.done[id(function)] = function
        if not any(map(self._concerns, held)):
            return function
        own = tuple(CellType() for _ in cells)
        bound = FunctionType(
            function.__code__, function.__globals__, function.__name__, None, own or None
        )
        functools.update_wrapper(bound, function, updated=("__dict__",))
        vars(bound).pop("__wrapped__", None)
        vars(bound).update(vars(function))
        self.done[id(function)] = bound
        for cell, old in zip(own, cells, strict=True):
            content = _content(old)
            if content is not _EMPTY:
                cell.cell_contents = self._captured(content)
        if function.__defaults__ is not None:
            bound.__defaults__ = tuple(map(self._captured, function.__defaults__))
        if function.__kwdefaults__ is not None:
            defaults = function.__kwdefaults__.items()
            bound.__kwdefaults__ = {key: self._captured(item) for key, item in defaults}
        return bound

    def _concerns(self, item: Any) -> bool:
        """Whether something captured may belong to the model, or change when it runs."""
        match item:
            case FunctionType():
                return self._function(item) is not item
            case nn.Module():
                return id(item) in self.memo
            case functools.partial():
                return any(map(self._concerns, (item.func, *item.args, *item.keywords.values())))
            case tuple():
                return any(map(self._concerns, item))
            case MethodType():
                return id(item.__self__) in self.memo
        return isinstance(item, torch.Tensor | dict | list | set)

    def _captured(self, item: Any) -> Any:
        if not self._concerns(item):
            return item
        if isinstance(item, FunctionType):
            return self._function(item)
        try:
            return self.of(copy.deepcopy(item, self.memo))
        except Exception:  # what cannot be copied stays as it is, as functions themselves do
            return item


_EMPTY = object()


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # assigned later
        return _EMPTY
