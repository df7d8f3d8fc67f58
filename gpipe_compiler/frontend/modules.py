"""Finds how a torch.nn module is constructed, from the module itself.

A constructor keeps most of its arguments as attributes of the same name. So the arguments are read
off by the names in the signature, written as a person would, and the result is proved: the module
constructed from them has the same attributes, the same `extra_repr` and the same state.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gpipe_compiler.frontend.state import named_state
from gpipe_compiler.ir import ModuleSpec
from gpipe_compiler.ir.interpret import construct

_RECURRENT = (nn.RNN, nn.LSTM, nn.GRU)
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_OWN = "gpipe_compiler."
_BY_KEYWORD = frozenset({"dim", "kernel_size", "mode", "inplace", "size"})
"""Arguments that are written by keyword even where they come first or are required."""

_DERIVED: Mapping[tuple[str, str], Callable[[nn.Module], object]] = {
    ("MultiheadAttention", "bias"): lambda m: m.in_proj_bias is not None,
    ("MultiheadAttention", "add_bias_kv"): lambda m: m.bias_k is not None,
    ("PReLU", "init"): lambda m: 0.25,
    ("AdaptiveLogSoftmaxWithLoss", "cutoffs"): lambda m: list(vars(m)["cutoffs"][:-1]),
}
"""Arguments that are kept under another name."""


def rebuild(path: str, module: nn.Module) -> ModuleSpec | None:
    """How to construct a module anew, proved; None for anything but a plain torch.nn leaf.

    None also means: with hooks, a replaced `forward`, parametrisations, children (attention's
    output projection apart), or arguments that cannot be found. Such a module is traced into.

    Args:
        path: where the model keeps it; its state is named after it.
    """
    if not is_plain(module):
        return None
    parameters = tuple(_signature(type(module)))
    values = dict(_arguments(module, parameters))
    if not all(_is_literal(value) for value in values.values()):
        return None
    spec = _spec(path, module, values, parameters)
    if not _same(spec, module):
        return None
    for name in list(values):
        required = any(p.name == name and p.default is p.empty for p in parameters)
        for simpler in _simpler(name, values, required):
            candidate = _spec(path, module, simpler, parameters)
            if _same(candidate, module):
                values, spec = simpler, candidate
                break
    return spec


def is_leaf(path: str, module: nn.Module, training: bool) -> bool:
    """Whether a traced graph calls a module whole: one of torch.nn that computes something.

    A module that stays in eval mode while its model trains (a frozen BatchNorm) is traced into:
    called whole, it would follow the mode of the emitted stage.
    """
    computes = not isinstance(module, nn.Identity)
    return computes and module.training == training and rebuild(path, module) is not None


def is_plain(module: nn.Module) -> bool:
    """Whether a module is a torch.nn leaf, as constructed.

    SyncBatchNorm is none: called whole, it would ask other processes for statistics.
    """
    cls = type(module)
    if isinstance(module, nn.SyncBatchNorm):
        return False
    if not cls.__module__.startswith("torch.nn.modules.") or isinstance(module, CONTAINERS):
        return False
    if "forward" in vars(module) or has_hooks(module):
        return False
    children = dict(module.named_children())
    if isinstance(module, nn.MultiheadAttention):
        return type(children.pop("out_proj", None)).__name__ == "NonDynamicallyQuantizableLinear"
    return not children


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of a module is more than its forward, but for what a trace hangs on it."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found = (hook for kind in kinds for hook in getattr(module, kind).values())
    return any(not str(getattr(hook, "__module__", "")).startswith(_OWN) for hook in found)


def _signature(cls: type[nn.Module]) -> Iterator[inspect.Parameter]:
    """The parameters of the constructor that a person would pass."""
    # The constructors of recurrent modules take *args: their base class names the arguments.
    recurrent = issubclass(cls, _RECURRENT)
    ignored = {"device", "dtype", *(["mode"] if recurrent else [])}
    for parameter in inspect.signature(nn.RNNBase if recurrent else cls).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name not in ignored and not parameter.name.startswith("_"):
            yield parameter
    if cls is nn.RNN:
        yield inspect.Parameter("nonlinearity", inspect.Parameter.KEYWORD_ONLY, default="tanh")


def _arguments(
    module: nn.Module, parameters: Sequence[inspect.Parameter]
) -> Iterator[tuple[str, object]]:
    """Constructor arguments that differ from their defaults, in the order of the signature."""
    cls = type(module)
    for parameter in parameters:
        name, missing = parameter.name, parameter.empty
        derived = _DERIVED.get((cls.__name__, name))
        value = derived(module) if derived else getattr(module, name, missing)
        if name in ("bias", "elementwise_affine") and not isinstance(value, bool):
            value = value is not None and value is not missing
        same_type = type(value) is type(parameter.default)
        if value is missing or (same_type and value == parameter.default):
            continue
        yield name, tuple(value) if isinstance(value, torch.Size) else value
    dtype = _dtype(module)
    if dtype is not None:
        yield "dtype", dtype


def _dtype(module: nn.Module) -> torch.dtype | None:
    """The type of the module's parameters, where it is not the one it would get anyway."""
    dtypes = {tensor.dtype for tensor in module.parameters()}
    if len(dtypes) != 1 or dtypes == {torch.float32}:
        return None
    return dtypes.pop()


def _is_literal(value: object) -> bool:
    """Whether a value can be written down in a call."""
    if isinstance(value, tuple | list):
        return all(_is_literal(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def _simpler(
    name: str, values: Mapping[str, object], required: bool
) -> Iterator[dict[str, object]]:
    """Shorter ways to write an argument, the shortest first."""
    value = values[name]
    if not required:
        yield {key: item for key, item in values.items() if key != name}
    if isinstance(value, tuple | list) and value and all(item == value[0] for item in value):
        yield {**values, name: value[0]}


def _spec(
    path: str,
    module: nn.Module,
    values: Mapping[str, object],
    parameters: Sequence[inspect.Parameter],
) -> ModuleSpec:
    """Arguments split into positional ones and keywords."""
    args: list[object] = []
    kwargs = dict(values)
    for index, parameter in enumerate(parameters):
        name = parameter.name
        required = parameter.default is parameter.empty
        if name not in kwargs or len(args) != index or parameter.kind is parameter.KEYWORD_ONLY:
            break
        if isinstance(kwargs[name], bool) or name in _BY_KEYWORD or not (required or index == 0):
            break
        args.append(kwargs.pop(name))
    prefix = f"{path}." if path else ""
    state = {name: f"{prefix}{name}" for name, _ in named_state(module)}
    return ModuleSpec(path, type(module), tuple(args), kwargs, state)


def _same(spec: ModuleSpec, module: nn.Module) -> bool:
    """Whether a spec constructs a module equal to this one, up to the contents of its state."""
    try:
        with warnings.catch_warnings():
            # The model's author has seen what the constructor warns of.
            warnings.simplefilter("ignore")
            twin = construct(spec, training=module.training)
    except (TypeError, ValueError, RuntimeError, AssertionError):
        return False
    if twin.extra_repr() != module.extra_repr() or _state(twin) != _state(module):
        return False
    if twin._non_persistent_buffers_set != module._non_persistent_buffers_set:
        return False
    # Attributes that others have hung on the module are no business of its constructor.
    return all(
        key in vars(module) and _equal(value, vars(module)[key])
        for key, value in vars(twin).items()
        if not key.startswith("_")
    )


def _equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    return type(one) is type(other) and bool(one == other)


def _state(module: nn.Module) -> dict[str, tuple[object, ...]]:
    """Names of the state with shapes and types."""
    return {
        name: (tuple(t.shape), t.dtype, isinstance(t, nn.Parameter))
        for name, t in named_state(module)
    }


_BY_DIMENSIONS: Mapping[int, type[nn.Module]] = {
    2: nn.BatchNorm1d,
    3: nn.BatchNorm1d,
    4: nn.BatchNorm2d,
    5: nn.BatchNorm3d,
}


@contextlib.contextmanager
def turned_into_batchnorm(model: nn.Module) -> Iterator[None]:
    """While copies of the model run, notes what its SyncBatchNorms are given; then turns them.

    SyncBatchNorm asks every process of the job for its statistics, on a GPU at least, and would
    wait for ever for those that hold other stages. By itself in one process it is BatchNorm, and so
    that is what is traced; `--batchnorm` says what it normalises over. A layer that is never
    called, or on inputs of several kinds, stays; see `is_plain`.
    """
    layers: dict[str, nn.Module] = {
        path: module for path, module in model.named_modules() if type(module) is nn.SyncBatchNorm
    }
    seen = {path: _Kinds() for path in layers}
    hooks = [module.register_forward_pre_hook(seen[path]) for path, module in layers.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for path, module in layers.items():
        if len(seen[path].kinds) == 1:
            (module.__class__,) = seen[path].kinds
            del module.process_group


class _Kinds:
    """A hook that notes which BatchNorm takes what a layer is given; copies of it note it too."""

    def __init__(self) -> None:
        self.kinds: set[type[nn.Module]] = set()

    def __call__(self, module: nn.Module, args: Any) -> None:
        if args and isinstance(args[0], torch.Tensor) and args[0].ndim in _BY_DIMENSIONS:
            self.kinds.add(_BY_DIMENSIONS[args[0].ndim])

    def __deepcopy__(self, memo: object) -> _Kinds:
        return self
