"""Runs a graph op by op, on real, meta or fake tensors.

Passes observe ops through it, and traced graphs are compared with the eager model with it. Emitted
packages do not use it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from gpipe_compiler.errors import ModelError
from gpipe_compiler.ir.arguments import Argument, ByMode, Ref, StateRef
from gpipe_compiler.ir.graph import Graph
from gpipe_compiler.ir.ops import (
    Autocast,
    Call,
    Context,
    FunctionCall,
    MethodCall,
    Mode,
    ModuleCall,
    ModuleSpec,
    NoGrad,
    Op,
    Region,
    Result,
    regions_kept,
)

Observer = Callable[[Op, Callable[[], Any]], Any]
"""Gets each op and a function that runs it; returns what the function returned."""


_FILLS = frozenset(
    {
        *(torch.Tensor.uniform_, torch.Tensor.normal_),
        *(nn.init.uniform_, nn.init.normal_, nn.init.constant_, nn.init.kaiming_uniform_),
    }
)
"""Functions that do nothing on the meta device, where the first two take a third of a millisecond:
all that modules of torch call as they are made and that goes through `__torch_function__`."""


class _Unfilled(TorchFunctionMode):
    """Leaves new tensors without numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FILLS:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def construct(spec: ModuleSpec, *, training: bool = True) -> nn.Module:
    """The module that a spec describes, without memory (on the meta device)."""
    with torch.device("meta"), _Unfilled():
        module = spec.cls(*spec.args, **spec.kwargs)
    return module.train(training)


@dataclass
class Interpreter:
    """Evaluates the calls of a graph.

    Attributes:
        tensors: the tensor to use for each state of the graph; in-place writes reach these.
        training: which side of `ByMode` is taken, and which guarded ops run.
    """

    graph: Graph
    tensors: Mapping[str, torch.Tensor]
    training: bool = True
    _modules: dict[str, nn.Module] = field(default_factory=dict)

    def run(
        self,
        inputs: Mapping[str, object],
        observer: Observer | None = None,
        keep: Collection[str] | None = None,
    ) -> dict[str, Any]:
        """Every value of the graph by name, given its inputs by name.

        Args:
            keep: the values that are wanted. Of other tensors only the shape is left, on meta, once
                nothing reads them any more.
        """
        environment: dict[str, Any] = dict(inputs)
        last = {} if keep is None else self.graph.last_reads
        with Surroundings() as around:
            for op in self.graph.ops:
                if self.runs(op):
                    around.go_to(op.regions)
                    self._step(op, environment, observer)
                for name in last.get(op.name, ()):
                    value = environment.get(name)
                    if isinstance(value, torch.Tensor) and name not in (keep or ()):
                        form = torch.empty(value.shape, dtype=value.dtype, device="meta")
                        environment[name] = form
        return environment

    def prepare(self) -> Interpreter:
        """Itself, with every module constructed now instead of at its first call.

        Calls bring their own state, so modules that are constructed alike are one, in all runs of
        the graph. To be called before a fake-tensor mode is entered, which would slow construction
        down.
        """
        equal: dict[str, nn.Module] = self.graph.kept.setdefault(construct, {})
        for path, spec in self.graph.modules.items():
            if path not in self._modules:
                key = f"{spec.cls.__module__}.{spec.cls.__qualname__} {spec.args} {spec.kwargs}"
                if key not in equal:
                    equal[key] = construct(spec)
                self._modules[path] = equal[key]
        return self

    def runs(self, op: Op) -> bool:
        """Whether the op runs in this mode."""
        return op.mode is Mode.ALWAYS or (op.mode is Mode.TRAIN) == self.training

    def _step(self, op: Op, environment: dict[str, Any], observer: Observer | None) -> None:
        def execute() -> Any:
            return self.call(op.call, environment)

        returned = execute() if observer is None else observer(op, execute)
        if isinstance(op.result, tuple) and len(op.result) != len(returned):
            raise ModelError(
                f"{op.name} cuts the samples of a batch into pieces: how many there are goes with "
                "their number",
                location=op.source,
                hint="compute on all samples at once, or cut along another dimension",
            )
        bind(op.result, returned, environment)

    def alone(self, op: Op, environment: Mapping[str, Any]) -> Any:
        """What one op returns, run in its regions; its references looked up in `environment`."""
        with entered(op.regions):
            return self.call(op.call, environment)

    def call(self, call: Call, environment: Mapping[str, Any]) -> Any:
        """What one call returns, in whatever context it is made."""
        args = self.resolve(call.args, environment)
        kwargs = self.resolve(dict(call.kwargs), environment)
        match call:
            case FunctionCall():
                return call.function(*args, **kwargs)
            case MethodCall():
                return getattr(args[0], call.method)(*args[1:], **kwargs)
            case ModuleCall():
                return self._call_module(call.module, args, kwargs)

    def resolve(self, argument: Argument, environment: Mapping[str, Any]) -> Any:
        """An argument with every reference replaced by what it stands for."""
        match argument:
            case Ref(name=name):
                return environment[name]
            case StateRef(name=name):
                return self.tensors[name]
            case ByMode(train=train, evaluation=evaluation):
                return self.resolve(train if self.training else evaluation, environment)
            case tuple():
                return tuple(self.resolve(item, environment) for item in argument)
            case list():
                return [self.resolve(item, environment) for item in argument]
            case dict():
                return {key: self.resolve(item, environment) for key, item in argument.items()}
            case slice(start=start, stop=stop, step=step):
                return slice(*(self.resolve(item, environment) for item in (start, stop, step)))
            case _:
                return argument

    def _call_module(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        spec = self.graph.modules[path]
        if path not in self._modules:
            self._modules[path] = construct(spec)
        module = self._modules[path].train(self.training)
        own = {local: self.tensors[name] for local, name in spec.state.items()}
        empty = any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in own.values())
        if empty and kwargs.get("lengths") is not None:  # without numbers they end nowhere
            kwargs["lengths"] = None
        with with_a_momentum(module) if empty else contextlib.nullcontext():
            return torch.func.functional_call(module, own, args, kwargs, tie_weights=False)


@contextlib.contextmanager
def entered(regions: Sequence[Region]) -> Iterator[None]:
    """In regions, the outermost first."""
    with Surroundings() as around:
        around.go_to(regions)
        yield


class Surroundings(contextlib.ExitStack):
    """The regions that ops run in, one op after another.

    A region is left where an op comes that does not run in it: autocast casts a weight once in all
    of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._entered: list[tuple[Region, contextlib.ExitStack]] = []
        self.callback(self.go_to, ())

    def go_to(self, regions: Sequence[Region]) -> None:
        """From here on ops run in these regions, the outermost first."""
        kept = regions_kept((region for region, _ in self._entered), regions)
        while len(self._entered) > kept:
            self._entered.pop()[1].close()
        for region in regions[kept:]:
            entered = contextlib.ExitStack()
            entered.enter_context(enter(region.context))
            self._entered.append((region, entered))


def enter(context: Context) -> contextlib.AbstractContextManager[Any]:
    """The torch context manager that a region runs in."""
    match context:
        case NoGrad(enabled=enabled):
            return torch.set_grad_enabled(enabled)
        case Autocast(device_type=kind) if lacks(kind):
            return contextlib.nullcontext()
        case Autocast():
            return torch.autocast(context.device_type, context.dtype, context.enabled)


def lacks(kind: str) -> bool:
    """Whether torch turns autocast off for a kind of device, as there is none of it."""
    return kind == "cuda" and not torch.cuda.is_available()


def bind(result: Result, returned: Any, environment: dict[str, Any]) -> None:
    """Unpacks what a call returned into the names of its result."""
    if isinstance(result, str):
        environment[result] = returned
    elif isinstance(result, tuple):
        for target, item in zip(result, returned, strict=True):
            bind(target, item, environment)


# --- BatchNorm with a cumulative average ----------------------------------------------------------


STAND_IN = 0.271828182845904523
"""A momentum that nobody chooses, so it is known where it turns up: in place of None."""


@contextlib.contextmanager
def with_a_momentum(model: nn.Module) -> Iterator[None]:
    """Gives BatchNorm layers of a cumulative average a momentum, for a run without results.

    Their forward computes 1 / num_batches_tracked in Python, which a tensor without numbers cannot
    give.
    """
    layers = [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm) and module.momentum is None
    ]
    for layer in layers:
        layer.momentum = STAND_IN
    try:
        yield
    finally:
        for layer in layers:
            layer.momentum = None


# --- recurrent layers without numbers -------------------------------------------------------------


@contextlib.contextmanager
def recurrent_forms(where: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Around tensors without numbers: recurrent layers run one step, and give its form for all.

    The host computes all but LSTMs step by step, each of them some ten kernels.

    Args:
        where: asked at every call; all steps are run where it says no.
    """
    with contextlib.ExitStack() as around:
        for name in ("gru", "lstm", "rnn_relu", "rnn_tanh"):
            own = getattr(torch._VF, name)
            around.enter_context(mock.patch.object(torch._VF, name, _by_one_step(own, where)))
        yield


def _by_one_step(layer: Callable[..., Any], where: Callable[[], bool]) -> Callable[..., Any]:
    def run(taken: torch.Tensor, state: Any, weights: Any, *others: Any) -> Any:
        if not where() or not isinstance(weights, list):  # of a packed sequence: the states
            return layer(taken, state, weights, *others)
        dim = 1 if others[-1] else 0
        made, *states = layer(taken.narrow(dim, 0, 1), state, weights, *others)
        steps = made.transpose(0, dim).expand(taken.shape[dim], -1, -1).contiguous()
        return steps.transpose(0, dim), *states

    return run
