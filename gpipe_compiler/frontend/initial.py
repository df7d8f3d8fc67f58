"""How the user's code fills tensors that have no memory, so that a package can do it again.

While `build_model()` runs, `recording()` notes every op that writes to a tensor on the meta device.
`Recording.steps_of(model)` then lists for each tensor of the model what made its content, written
as `runtime/core/building.py` replays it: what was overwritten is forgotten, a tensor that several
ops compute from others takes the ops that it needs along.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _device
from torch.utils._pytree import tree_leaves

from gpipe_compiler.dispatching import PlainDispatchMode
from gpipe_compiler.frontend.init_program import UNKNOWN, init_programs
from gpipe_compiler.frontend.init_trace import InitOp, Operand
from gpipe_compiler.frontend.state import copied_model
from gpipe_compiler.runtime.spec import Steps

_LITERAL_ELEMENTS = 1024
"""Real tensors up to this size are written down where a tensor on meta is made from them."""

_NO_OP_ON_META: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "_no_grad_trunc_normal_": ("trunc_normal_", ("mean", "std", "a", "b")),
    "orthogonal_": ("orthogonal_", ("gain",)),
    "sparse_": ("sparse_", ("sparsity", "std")),
    "dirac_": ("dirac_", ("groups",)),
}
"""Functions of torch.nn.init that look whether a tensor is on meta, and then do nothing."""

_DROPPED = frozenset({"device", "layout", "pin_memory", "generator"})


@dataclass
class Recording:
    """What was written to tensors on meta.

    Attributes:
        events: in order.
        owners: the storages by number, kept so that no other storage takes their address.
    """

    events: list[InitOp] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    owners: list[torch.UntypedStorage] = field(default_factory=list)

    def operand(self, tensor: torch.Tensor) -> Operand:
        """A tensor on meta as a view of a numbered storage."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self.numbers:
            self.numbers[address] = len(self.owners)
            self.owners.append(storage)
        return Operand(
            self.numbers[address],
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.dtype,
            storage.nbytes(),
        )

    def steps_of(self, model: nn.Module) -> dict[str, Steps]:
        """The steps of every tensor of the model on meta, by name; () where they are not known."""
        targets = {name: self.operand(tensor) for name, tensor in tensors_of_model(model)}
        return init_programs(self.events, targets)

    def fill(self, op: str, operand: Operand, arguments: tuple[Any, ...], *, random: bool) -> None:
        """Notes a method that fills a tensor."""
        args = (operand, *arguments)
        self.events.append(InitOp(op, args, (), {}, (operand.storage,), False, random, True))

    def create(self, literal: tuple[Any, ...] | None, operand: Operand) -> None:
        """Notes a tensor made from data; None for data that is not written down."""
        args, known = (() if literal is None else literal[1:]), literal is not None
        storages = (operand.storage,)
        self.events.append(InitOp("tensor", args, (), {0: operand}, storages, False, False, known))


def on_meta_throughout(
    model: nn.Module, initial: Mapping[str, Steps]
) -> tuple[nn.Module, dict[str, Steps]]:
    """A model of which some tensors are real as one without memory, and the steps of all of them.

    The model itself stays as it is.
    """
    real = dict(tensors_of_model(model, meta=False))
    if not real:
        return model, dict(initial)
    memo: dict[int, Any] = {}
    steps = dict(initial)
    for name, tensor in real.items():
        bare = tensor.detach().to("meta")
        flag = tensor.requires_grad
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(bare, requires_grad=flag) if is_parameter else bare
        literal = _literal(tensor)
        steps[name] = UNKNOWN if literal is None else (literal, ("copy_", "self", "%0"))
    return copied_model(model, memo), steps


def tensors_of_model(model: nn.Module, *, meta: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's tensors on meta: parameters, buffers, and plain attributes of its modules.

    Args:
        meta: False for those that are real instead.
    """
    seen: set[int] = set()
    attributes = (
        (f"{path}.{name}" if path else name, value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    )
    for pairs in (model.named_parameters(), model.named_buffers(), attributes):
        for name, tensor in pairs:
            if (
                tensor.is_meta == meta
                and id(tensor) not in seen
                and not nn.parameter.is_lazy(tensor)
            ):
                seen.add(id(tensor))
                yield name, tensor


def catch_up(model: nn.Module) -> None:
    """Let a Hugging Face model do what it leaves out on meta: its own initialisation."""
    library = sys.modules.get("transformers")
    if library is None:
        return
    _keep_adapters(model)
    outermost: list[str] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") or outer == "" for outer in outermost)
        if isinstance(module, library.PreTrainedModel) and not inside:
            outermost.append(path)
            waiting = hasattr(module, "initialize_weights")
            if waiting and any(parameter.is_meta for parameter in module.parameters()):
                with torch.device("meta"):
                    module.initialize_weights()


def _keep_adapters(model: nn.Module) -> None:
    """Mark adapters of peft, which fills them itself, as filled: else they begin as layers do."""
    library = sys.modules.get("peft.tuners.tuners_utils")
    for layer in model.modules() if library is not None else ():
        if isinstance(layer, library.BaseTunerLayer):  # type: ignore[union-attr]  # as just asked
            for name in layer.adapter_layer_names:
                for part in getattr(layer, name).modules():
                    part._is_hf_initialized = True


@contextmanager
def recording() -> Iterator[Recording]:
    """Notes what the code inside writes to tensors on meta; real tensors cost next to nothing."""
    found = Recording()
    with _Functions(found), _Ops(found):
        yield found


class _Functions(TorchFunctionMode):
    """Sees what the dispatcher does not: data from Python, and functions that skip meta."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func == _IS_META:
            if result:
                self._skipped(args[0])
        elif func in (torch.tensor, torch.as_tensor, torch.asarray) and result.is_meta:
            self._data(result, args, kwargs or {})
        return result

    def _skipped(self, tensor: torch.Tensor) -> None:
        """A function of torch.nn.init is about to return without having done anything."""
        frame = sys._getframe(2)
        while frame.f_globals.get("__name__") == _device.__name__ and frame.f_back is not None:
            frame = frame.f_back  # the user's `with torch.device("meta")`
        if frame.f_globals.get("__name__") != nn.init.__name__:
            return
        known = _NO_OP_ON_META.get(frame.f_code.co_name)
        operand = self.recording.operand(tensor)
        if known is None:  # another version of torch: what it would have filled in is not known
            self.recording.create(None, operand)
            return
        op, names = known
        arguments = tuple(frame.f_locals[name] for name in names)
        self.recording.fill(op, operand, arguments, random=True)

    def _data(self, result: torch.Tensor, args: Any, kwargs: Mapping[str, Any]) -> None:
        data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        if isinstance(data, torch.Tensor) and data.is_meta:
            return
        with torch._C.DisableTorchFunction(), _no_modes():
            real = torch.as_tensor(data, dtype=result.dtype, device="cpu")
        self.recording.create(_literal(real), self.recording.operand(result))


_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]  # a descriptor of C


@contextmanager
def _no_modes() -> Iterator[None]:
    with torch.utils._python_dispatch._disable_current_modes():
        yield


class _Ops(PlainDispatchMode):
    """Notes the ops of the dispatcher that write to meta."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = _on_meta((args, kwargs), self.recording)
        result = func(*args, **kwargs)
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        if any(isinstance(item, torch.Tensor) and item.is_meta for item in outputs):
            self._note(func, args, kwargs, outputs, known)
        return result

    def _note(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], outputs: Any, known: frozenset[int]
    ) -> None:
        record, schema = self.recording, func._schema
        made = {
            place: record.operand(item)
            for place, item in enumerate(outputs)
            if isinstance(item, torch.Tensor) and item.is_meta
        }
        created = {place: item for place, item in made.items() if item.storage not in known}
        written = tuple(
            record.operand(value).storage
            for value, argument in zip(args, schema.arguments, strict=False)
            if argument.is_write and isinstance(value, torch.Tensor) and value.is_meta
        )
        out = kwargs.get("out")
        if isinstance(out, torch.Tensor) and func.overloadpacket is torch.ops.aten.eye:
            record.fill("eye_", record.operand(out), (), random=False)
            return
        if not created and not written and out is None:
            return  # a view
        options = {
            key: value for key, value in kwargs.items() if key not in _DROPPED and value is not None
        }
        dtypes = [item.name for item in schema.arguments if item.name == "dtype"]
        if dtypes and created and not any(isinstance(arg, torch.Tensor) for arg in args):
            options["dtype"] = next(iter(created.values())).dtype
        understood = (
            func.namespace == "aten" and out is None and func._schema.is_mutable == bool(written)
        )
        arguments, odd = self._arguments((tuple(args), options))
        record.events.append(
            InitOp(
                op=func.overloadpacket.__name__,
                args=arguments[0],
                options=tuple(sorted(arguments[1].items())),
                created=created,
                written=written,
                several=len(outputs) > 1,
                random=torch.Tag.nondeterministic_seeded in func.tags,
                understood=understood and not odd,
            )
        )

    def _arguments(self, tree: Any) -> tuple[Any, bool]:
        """Arguments with operands for tensors; and whether one of them cannot be written down."""
        odd = False

        def note(tensor: torch.Tensor) -> object:
            nonlocal odd
            if tensor.is_meta:
                return self.recording.operand(tensor)
            literal = _literal(tensor)
            odd = odd or literal is None
            return literal

        def noted(value: object, sequence: type = tuple) -> object:
            if isinstance(value, torch.Tensor):
                return note(value)
            if isinstance(value, list):
                return sequence([noted(item, sequence) for item in value])
            if isinstance(value, tuple):
                return tuple([noted(item, sequence) for item in value])
            return value

        args, options = tree
        return (noted(args), {key: noted(value, list) for key, value in options.items()}), odd


def _on_meta(tree: Any, recording: Recording) -> frozenset[int]:
    """The storages on meta among arguments."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return frozenset(recording.operand(tensor).storage for tensor in tensors if tensor.is_meta)


def _literal(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """A small real tensor as the step that makes it anew."""
    if tensor.numel() > _LITERAL_ELEMENTS or type(tensor) not in (torch.Tensor, nn.Parameter):
        return None
    with _no_modes():
        return ("tensor", _nest(tensor.detach().cpu().tolist()), tensor.dtype)


def _nest(value: object) -> object:
    return tuple(_nest(item) for item in value) if isinstance(value, list) else value
