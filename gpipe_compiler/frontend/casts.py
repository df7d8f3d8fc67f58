"""What a model says about types while it is traced.

Casts that change nothing are kept: `x.float()` of an fp32 tensor returns x itself, so that a trace
takes the two for one value; under autocast x may come in 16 bits, and the cast is what the model
says it is. And every call of torch is noted, with the types that the model has read before it, so
that runs in several precisions can be compared with each other (`precisions`).
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from gpipe_compiler.errors import SourceLocation, TraceError
from gpipe_compiler.frontend.deciding import QUESTIONS
from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.frontend.locate import calling_line, is_users
from gpipe_compiler.frontend.modules import is_plain
from gpipe_compiler.frontend.recorder import recording
from gpipe_compiler.ir.arguments import leaves

READS = "gpipe_compiler_reads"
"""Key of node.meta: numbers of the events that read the type of the node's value."""

_GRADIENT_HOOKS = frozenset(
    {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook}
)

_ASKS = (
    *("is_autocast_enabled", "is_autocast_cpu_enabled", "get_autocast_dtype"),
    *("get_autocast_gpu_dtype", "get_autocast_cpu_dtype"),
)
"""Functions of torch that tell a model in which precision it runs."""

_READ = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]  # a descriptor of C


@dataclass(frozen=True, slots=True)
class TorchCall:
    """A call of torch by the model, or a look at the type of a tensor.

    Attributes:
        function: what is called; "dtype" for a look at a type, "autocast" for a look at the
            precision.
        constants: arguments that are no tensors, flat.
        dtype: what was read.
    """

    function: object
    file: str
    line: int
    constants: tuple[object, ...] = ()
    dtype: torch.dtype | None = None

    @property
    def key(self) -> tuple[object, str, int]:
        """What the same event of another run has in common with this one."""
        return self.function, self.file, self.line


class CastWatch(TorchFunctionMode):
    """Notes events while it is open, and lets casts that return their argument stand in a trace.

    What torch.nn leaf modules do inside is theirs: they are called whole in any precision.
    """

    def __init__(self, entry: Entry, *, traced: bool) -> None:
        """A watch over the calls of an entry.

        Args:
            traced: whether the model is to be traced; what runs outside of the trace is not noted.
        """
        super().__init__()
        self.events: list[TorchCall] = []
        self._traced = traced
        self._leaves_open = 0
        self._trains = entry.has_loss
        self._leaves = {module for module in entry.modules() if is_plain(module)}

    @property
    def looks(self) -> bool:
        """Whether the model has looked at a type or at the precision."""
        return any(isinstance(event.function, str) for event in self.events)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Open for the calls of the model."""
        with contextlib.ExitStack() as stack:
            calls = mock.patch.object(nn.Module, "__call__", self._counting(nn.Module.__call__))
            stack.enter_context(calls)
            for name in _ASKS:
                told = mock.patch.object(torch, name, self._asked(getattr(torch, name)))
                stack.enter_context(told)
            stack.enter_context(in_the_open())
            stack.enter_context(self)
            yield

    def _counting(self, own_call: Callable[..., Any]) -> Callable[..., Any]:
        """Calls of modules, those of leaves counted while they are open."""

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            is_leaf = module in self._leaves
            self._leaves_open += is_leaf
            try:
                return own_call(module, *args, **kwargs)
            finally:
                self._leaves_open -= is_leaf

        return call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # something in the model compiles itself
            return func(*args, **kwargs)
        if "/torch/_subclasses/" in sys._getframe(1).f_code.co_filename:
            # A constructor that is no function of torch: how torch makes the tensor is no call.
            with torch._C.DisableTorchFunction():
                return func(*args, **kwargs)
        if func in _GRADIENT_HOOKS:
            if not self._trains:
                return RemovableHandle(OrderedDict())
            raise hooked(func.__name__, calling_line())
        if func == _READ:
            return self._read(args[0])
        if func.__name__ in QUESTIONS or func.__name__ == "__get__":
            return func(*args, **kwargs)
        if func.__name__.startswith("sym_"):
            return func(*args, **kwargs)
        if func is torch.Tensor.new_tensor and kwargs.get("dtype") is None:
            kwargs = {**kwargs, "dtype": self._read(args[0])}
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], torch.Tensor):
            # Torch itself goes on with the other's device and type as they are.
            args = (args[0], args[1].device, self._read(args[1]), *args[2:])
        number = self._note(func, constants=tuple(_constants((args, kwargs))))
        recorder = recording()
        if recorder is None:
            return func(*args, **kwargs)
        recorder.event = number
        try:
            return func(*args, **kwargs)
        finally:
            recorder.event = None

    def _note(self, function: object, **known: Any) -> int | None:
        if self._leaves_open or (self._traced and recording() is None):
            return None
        file, line = _calling()
        self.events.append(TorchCall(function, file, line, **known))
        return len(self.events) - 1

    def _read(self, tensor: torch.Tensor) -> torch.dtype:
        dtype = tensor.dtype
        number = self._note("dtype", dtype=dtype)
        recorder = recording()
        node = None if recorder is None else recorder.tensors.known(tensor)
        if node is not None and number is not None:
            node.meta.setdefault(READS, []).append(number)
        return dtype

    def _asked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: Any, **kwargs: Any) -> Any:
            code = sys._getframe(1).f_code
            if is_users(code.co_filename) or code.co_name == "decorate_fwd":
                self._note("autocast")
            return function(*args, **kwargs)

        return ask


def hooked(method: str, where: SourceLocation | None) -> TraceError:
    """Of a model that hooks into the backward of one of its values."""
    return TraceError(
        f"the model calls {method}() on a tensor in forward: what the hook does in the backward "
        "pass is in no trace",
        location=where,
        hint="write what it does to the gradient into forward: y * k + y.detach() * (1 - k) is y, "
        "with a gradient times k; or hook into the parameters in a training loop of your own",
    )


_COMPARABLE = (type(None), bool, int, float, complex, str, torch.dtype)


def _constants(item: Any) -> Iterator[object]:
    """What is no tensor in a nest of arguments, in a form that can be compared."""
    for leaf in leaves(item):
        if not isinstance(leaf, torch.Tensor):
            yield leaf if isinstance(leaf, _COMPARABLE) else type(leaf)


def _calling() -> tuple[str, int]:
    frame = sys._getframe(2)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


# --- flex attention: what torch itself computes where it does not compile -------------------------

_FLEX = "torch.nn.attention.flex_attention"
_NO_MASK = "_create_empty_block_mask"
_OPERATOR = "flex_attention_hop"
_COMPILING = "setup_compilation_env"
_SWITCH = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"

_NAMES = (_NO_MASK, _OPERATOR, _COMPILING, _SWITCH)


@contextlib.contextmanager
def in_the_open() -> Iterator[None]:
    """Lets flex attention compute in ordinary operators, and make no mask that masks nothing.

    It is one operator with the user's functions inside, and compiles itself when it is called.
    """
    module = sys.modules.get(_FLEX)
    if module is None or not all(hasattr(module, name) for name in _NAMES):
        yield
        return
    original = getattr(module, _NO_MASK)

    def outside_of_the_trace(*args: torch.Tensor) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return original(*args)

    with (
        mock.patch.object(module, _SWITCH, True),
        mock.patch.object(module, _OPERATOR, _attend),
        mock.patch.object(module, _COMPILING, contextlib.nullcontext),
        mock.patch.object(module, _NO_MASK, outside_of_the_trace),
    ):
        yield


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor],
    block_mask: Sequence[Any],
    scale: float,
    _options: object,
    score_buffers: Sequence[torch.Tensor] = (),
    mask_buffers: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output, and the logarithms to base 2 of the sums and maxima of the scores.

    The user's functions are given all places at once, where torch maps them over single ones.
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        lower = torch.get_autocast_dtype(kind)
        query, key, value = (tensor.to(lower) for tensor in (query, key, value))
    with torch.autocast(kind, enabled=False):
        if query.size(1) != key.size(1):
            key, value = (
                tensor.repeat_interleave(query.size(1) // key.size(1), dim=1)
                for tensor in (key, value)
            )
        exact = torch.float64 if query.dtype == torch.float64 else torch.float32
        scores = query.to(exact) @ key.to(exact).transpose(-2, -1) * scale
        places = [
            torch.arange(size, device=query.device).view([-1 if d == own else 1 for d in range(4)])
            for own, size in enumerate(scores.shape)
        ]
        scores = torch.where(
            block_mask[-1](*places, *mask_buffers),
            score_mod(scores, *places, *score_buffers),
            -torch.inf,
        )
        weights = torch._safe_softmax(scores, dim=-1)
        out = weights.to(query.dtype) @ value.to(query.dtype)
        return out, scores.logsumexp(-1) / math.log(2), scores.amax(-1) / math.log(2)
