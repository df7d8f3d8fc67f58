"""The torch.fx frontend: a Tracer without the silent faults of the plain one.

What plain torch.fx gets wrong, and is mended here: buffers are recorded and never baked in;
`x += y` and `x[i] = y` write in place; tensors that forward creates are created anew in every call;
a buffer that forward assigns is written. What cannot be recorded (entering `no_grad` or
`autocast`) is refused. The model that is traced is a copy.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from gpipe_compiler.errors import SourceLocation, TraceError
from gpipe_compiler.frontend.entry import Entry, make_entry
from gpipe_compiler.frontend.locate import calling_line, is_users, line_of
from gpipe_compiler.frontend.lower import lower
from gpipe_compiler.frontend.modules import is_leaf
from gpipe_compiler.frontend.precisions import in_others
from gpipe_compiler.frontend.recompute import activations_kept
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.surroundings import ambient, kind_of
from gpipe_compiler.ir import Graph
from gpipe_compiler.runtime.core.precision import lower_dtype
from gpipe_compiler.runtime.spec import Precision
from gpipe_compiler.runtime.wording import said

_FACTORIES = (
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli"),
    *("zeros", "ones", "full", "empty", "arange", "linspace", "eye"),
)
"""Functions that make tensors from numbers alone: recorded, so that nothing random is baked in."""

_INPLACE = (
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow"),
    *("iand", "ior", "ixor", "ilshift", "irshift", "imatmul"),
)
_INPLACE_FUNCTIONS = frozenset(getattr(operator, name) for name in _INPLACE)

_CONTEXTS: tuple[tuple[type, str, str], ...] = (
    (torch.no_grad, "__enter__", "no_grad"),
    (torch.enable_grad, "__enter__", "enable_grad"),
    (torch.inference_mode, "__enter__", "inference_mode"),
    (torch.set_grad_enabled, "__init__", "set_grad_enabled"),
    (torch.autocast, "__enter__", "autocast"),
)
"""What changes how torch computes, without torch.fx noticing."""


def trace_fx(subject: Subject, training: bool, precision: Precision = Precision.FP32) -> Graph:
    """The model's graph in one mode, by torch.fx.

    Args:
        precision: one in which the model is another program than in fp32; the graph is for that
            precision alone.

    Raises:
        TraceError: with the construct that cannot be traced, its line, and what to do about it.
        ModelError: when the model raises on its example inputs.
    """
    entry = make_entry(subject, training)
    tracer = HardTracer(entry)
    try:
        with (
            activations_kept(),
            _recording(tracer),
            ambient(lower_dtype(precision), kind_of(entry)),
        ):
            graph = tracer.trace(entry)
    except TraceError:
        raise
    except Exception as error:  # whatever the user's code raises when it is given stand-ins
        raise _explained(error) from error
    lowered = lower(graph, entry, entry)
    return lowered.replace(unlike=in_others(entry, precision, reads_types=True))


class HardProxy(fx.Proxy):
    """A stand-in on which in-place operators write in place, as they do on tensors."""

    def __setitem__(self, index: object, value: object) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __len__(self) -> int:
        raise TraceError(
            "torch.fx cannot take len() of a traced value",
            location=calling_line(),
            hint="use x.shape[0], or let torch.export trace it (--frontend export)",
        )


class _ConstantShapeProxy(HardProxy):
    """A parameter or buffer: its shape is known."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, tensor: torch.Tensor) -> None:
        super().__init__(node, tracer)
        self.tensor = tensor

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_meta"):
            return getattr(self.tensor, name)
        return super().__getattr__(name)

    def size(self, dim: int | None = None) -> Any:
        """Sizes, or one of them."""
        return self.tensor.size() if dim is None else self.tensor.size(dim)

    def dim(self) -> int:
        """The number of dimensions."""
        return self.tensor.dim()

    def numel(self) -> int:
        """The number of elements."""
        return self.tensor.numel()


def _inplace(name: str) -> Callable[[HardProxy, object], fx.Proxy]:
    function = getattr(operator, name)

    def write(self: HardProxy, other: object) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return write


for _name in _INPLACE:
    setattr(HardProxy, f"__{_name}__", _inplace(_name))


class HardTracer(fx.Tracer):
    """Records every operation of an `Entry`, with the user's line."""

    proxy_buffer_attributes = True

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        self._entry = entry
        # Found before tracing: constructing a module enters no_grad, which is refused meanwhile.
        self._leaves = {
            path for path, module in entry.named_modules() if is_leaf(path, module, entry.training)
        }

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """The stand-in for what a node makes."""
        return HardProxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """A node, with the user's line in `meta["source"]`."""
        node = super().create_node(*args, **kwargs)
        node.meta["source"] = calling_line()
        return node

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """One placeholder for every input of the graph."""
        names = [source.name for source in self._entry.signature.inputs]
        placeholders = [self.create_proxy("placeholder", name, (), {}) for name in names]
        return root_fn, [self.root, *placeholders]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is called whole: what `rebuild` can construct, in the mode traced."""
        return module_qualified_name in self._leaves

    def path_of_module(self, mod: nn.Module) -> str:
        """Where the entry keeps a module."""
        try:
            return super().path_of_module(mod)
        except NameError:
            return ""

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a module that is in the model; one from elsewhere is traced as a function."""
        if self.path_of_module(m) == "" and m is not self.root:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """A parameter or buffer as a stand-in with a known shape."""
        value = super().getattr(attr, attr_val, parameter_proxy_cache)
        if isinstance(value, HardProxy) and isinstance(attr_val, torch.Tensor):
            if not isinstance(value, _ConstantShapeProxy):
                value = _ConstantShapeProxy(value.node, self, attr_val)
                parameter_proxy_cache[str(value.node.target)] = value
            return value
        return value

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Refuses a branch on a traced value."""
        raise TraceError(
            "torch.fx cannot follow a branch on a traced value",
            location=calling_line(),
            hint="an if on shapes is traced by torch.export (--frontend export); one on the data "
            "needs torch.where or torch.cond",
        )

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Refuses a loop over a traced value, but not `a, b = x`."""
        raise TraceError(
            "torch.fx cannot loop over, or unpack with *, a traced value",
            location=calling_line(),
            hint="loop over range() of a fixed number, or let torch.export trace it "
            "(--frontend export)",
        )


def _recorded(tracer: HardTracer, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as it is called while tracing: recorded when the user's code calls it."""

    def record(*args: Any, **kwargs: Any) -> Any:
        if _innermost_is_users():
            return tracer.create_proxy("call_function", function, args, kwargs)
        return function(*args, **kwargs)

    return record


def _innermost_is_users() -> bool:
    """Whether user code, and not torch itself, makes the call that is being recorded."""
    return is_users(sys._getframe(2).f_code.co_filename)


@contextlib.contextmanager
def _recording(tracer: HardTracer) -> Iterator[None]:
    """While it is open, contexts are refused, factories recorded, assigned buffers written."""
    original = nn.Module.__setattr__

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        if isinstance(value, fx.Proxy) and name in module._buffers:
            _assign_buffer(module, name, value)
        else:
            original(module, name, value)

    with contextlib.ExitStack() as stack:
        for cls, method, label in _CONTEXTS:
            stack.enter_context(_patched(cls, method, _refusal(label)))
        stack.enter_context(_patched(nn.Module, "__setattr__", set_attribute))
        for factory in _FACTORIES:
            stack.enter_context(_patched(torch, factory, _recorded(tracer, vars(torch)[factory])))
        yield


@contextlib.contextmanager
def _patched(owner: object, name: str, function: Callable[..., Any]) -> Iterator[None]:
    original = vars(owner)[name]
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _assign_buffer(module: nn.Module, name: str, value: fx.Proxy) -> None:
    """`self.buffer = value`: the new contents go into the old tensor."""
    buffer = getattr(module, name)
    source: Any = value.node
    while isinstance(source, fx.Node) and source.target in _INPLACE_FUNCTIONS:
        source = source.args[0]
    if source is not buffer.node:
        buffer.copy_(value)


def _refusal(label: str) -> Callable[..., Any]:
    def refuse(*_args: object, **_kwargs: object) -> Any:
        raise TraceError(
            f"torch.fx does not record that the model enters torch.{label}",
            location=calling_line(),
            hint="let torch.export trace it (--frontend export)",
        )

    return refuse


def _explained(error: Exception) -> TraceError:
    """What went wrong in the user's code when it was given stand-ins for tensors."""
    where: SourceLocation | None = line_of(error)
    code = f" in `{where.code}`" if where and where.code else ""
    return TraceError(
        f"torch.fx cannot trace the model{code}: {said(error)}",
        location=where,
        hint="a value computed from the input is used where Python needs a number or a list: "
        "let torch.export trace it (--frontend export), or compute it from fixed numbers",
    )
