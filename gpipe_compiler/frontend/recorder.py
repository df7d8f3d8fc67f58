"""Records the calls of torch that a model makes, at the level at which its Python makes them.

The model runs on tensors without numbers. Each torch function, tensor method and torch.nn leaf
module that it calls becomes one node of a torch.fx graph; what happens inside of such a call is
torch's own. Sizes that are free are expressions, written where a call is given one.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from gpipe_compiler.errors import SourceLocation, TraceError
from gpipe_compiler.frontend.calls import Written, is_all_of, sized, takes_device, written
from gpipe_compiler.frontend.found_loops import FoundLoops
from gpipe_compiler.frontend.growing_graph import GrowingGraph, apart
from gpipe_compiler.frontend.kept_masks import keep_masks
from gpipe_compiler.frontend.kept_tensors import keep_tensors
from gpipe_compiler.frontend.locate import calling_line, is_asked_by_user, line_around
from gpipe_compiler.frontend.modules import has_hooks
from gpipe_compiler.frontend.nests import OPENED, at_number, has_tensors, numbered, widened
from gpipe_compiler.frontend.noted_sizes import NotedSizes, SampleLists
from gpipe_compiler.frontend.packing import Packed
from gpipe_compiler.frontend.state import named_state
from gpipe_compiler.frontend.trace_errors import OWN_GENERATOR, PACKED, TRANSFORMED, own_gradients
from gpipe_compiler.frontend.value_splits import write_value_splits
from gpipe_compiler.ir.arguments import has_gradient, storage_key, tensors_in
from gpipe_compiler.ir.symbolic import AT_SYMBOLS, same_shape
from gpipe_compiler.runtime.core.packed import PACKED as PACKED_LAYERS
from gpipe_compiler.runtime.core.random import may_draw

_MOVES = frozenset(
    getattr(torch.Tensor, name) for name in ("to", "cuda", "cpu", "requires_grad_", "pin_memory")
)
"""What a model may call to no effect, and says nothing of types by."""

_VALUES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Attributes of a tensor that are tensors."""

_WITHOUT_GRADIENTS = {"requires_grad": False, "is_leaf": True, "grad_fn": None}
"""What is said of what a model computes where autograd does not record."""

_DATA = frozenset({torch.tensor, torch.as_tensor, torch.asarray})


def recording() -> Recorder | None:
    """The recorder of what runs; None in what it takes for one call."""
    if not torch._C._is_torch_function_mode_enabled():
        return None
    modes: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # of torch
    found = next((mode for mode in reversed(modes) if isinstance(mode, Recorder)), None)
    return found if found is not None and found.is_on else None


class Recorder(GrowingGraph, TorchFunctionMode):
    """Makes a graph of the calls of torch while it is entered.

    Attributes:
        is_on: whether calls are recorded.
        gradients_asked: the first of the user's lines that were told that autograd records.
        guessed: whether something was taken to be so that a run on the example can tell.
        lists: of samples, that Python holds.
    """

    def __init__(self, *, gradients: bool = True, trains: bool = False) -> None:
        """A recorder with an empty graph.

        Args:
            gradients: whether autograd records at the start.
            trains: whether it is a step of training that is recorded.
        """
        super().__init__(gradients=gradients, trains=trains)
        self.is_on = True
        self.gradients_asked: SourceLocation | None = None
        self.guessed = False
        self.lists = SampleLists(NotedSizes())
        self._loops = FoundLoops(self.graph, self.tensors)
        self._paths: dict[int, str] = {}
        self._own: dict[str, list[int]] = {}
        self._training: dict[str, bool] = {}

    def follow(self, modules: dict[str, nn.Module], leaves: Collection[str]) -> None:
        """Notes the modules that are called from now on.

        Args:
            modules: by every path that leads to them.
            leaves: the paths of those that are called whole.
        """
        self._paths = {id(module): path for path, module in reversed(modules.items())}
        self._lent = {
            (id(module), around): f"{around}.{name}"
            for around, holder in modules.items()
            for name, module in reversed(holder._modules.items())
            if module is not None and not any(True for _ in named_state(module))
        }
        self._own = {path: _identities(modules[path]) for path in leaves}
        self._training = {path: modules[path].training for path in leaves}
        self.tensors.follow({path: modules[path] for path in self._paths.values()})

    # --- calls ------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.is_on:
            return func(*args, **kwargs)
        if self.lists:
            with self:
                joined = self.lists.joined(func, args, kwargs)
            if joined is not None:
                return joined
            self.take_from_lists((args, kwargs))
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self._get(func, *args)
        if name == "__set__":
            return self._set(func, *args)
        if func is torch._C._set_grad_enabled:
            func(*args)
            return self.position.set_gradients(bool(args[0]))
        samples = self.lists.listed(func, args, kwargs)
        if samples is None and func is torch.Tensor.unbind and [*args[1:], *kwargs.values()] == [0]:
            samples = self._loops.rounds(args[0])  # as `for row in found` asks for them
        if samples is not None:
            return samples
        if func is torch.Tensor.__deepcopy__ and not args[0].requires_grad:
            args[1][id(args[0])] = made = self._call(torch.clone, args[:1], {})
            return made
        if func is torch._VF._pack_padded_sequence:
            raise PACKED.at(calling_line())
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise OWN_GENERATOR.at(calling_line())
        if name in ("__getitem__", "__setitem__"):
            with self:  # what is asked of a tensor in brackets is asked of it by itself
                args = args[0], numbered(args[1]), *args[2:]
                if (found := widened(args[1])) is not None:
                    return at_number(name, *found, *args[:1], *args[2:])
        if has_tensors((args[1:], kwargs)):
            args, kwargs = sized(name, args, kwargs)
        if func in OPENED:
            with self:
                return OPENED[func](*args, **kwargs)
        return self._call(func, args, kwargs)

    def take_from_lists(self, items: Any) -> None:
        """Records that something is done with single samples of lists."""
        found = self.lists.taken(tensors_in(items))
        if found is None:
            return
        with torch._C.DisableTorchFunction():
            made = self._call(torch.Tensor.unbind, (found.whole,), {})
        for sample, own in zip(found.samples, made, strict=True):
            self.tensors.stands_for(self.tensors.node(own), sample)
        self.take_from_lists(items)

    def _get(self, func: Any, *args: Any) -> Any:
        name = func.__self__.__name__
        if name == "data":
            data = args[0].detach()
            return self.record(Written(getattr, (args[0], "data")), data, ())
        if name == "grad" and is_asked_by_user():
            raise TraceError(
                "the model reads the gradient of a tensor, which is that of an earlier backward "
                "and in no graph",
                location=calling_line(),
                hint="read it in a training loop of your own, after step()",
            )
        made = func(*args)
        if name in _WITHOUT_GRADIENTS and not args[0].is_leaf:
            self.asks_for_gradients(made is not _WITHOUT_GRADIENTS[name])
        if name == "shape":
            self._sizes.asked(self.tensors.known(args[0]), args[0])
        if name not in _VALUES:
            return made
        return self.record(Written(getattr, (args[0], name)), made, ())

    def asks_for_gradients(self, answer: bool) -> bool:
        """The answer to whether autograd records."""
        if answer and self.gradients_asked is None and is_asked_by_user():
            self.gradients_asked = calling_line()
        return answer

    def _set(self, func: Any, tensor: Any, value: Any) -> None:
        if func.__self__.__name__ == "requires_grad":
            self._asking.say(tensor, bool(value))
        if func.__self__.__name__ != "data" or self.tensors.known(tensor) is None:
            func(tensor, value)
            return
        if _is_same_memory(tensor, value):  # `x.data *= 2`, which has written into it
            return
        self._refuse_other_memory(tensor, value)
        data = self._get(torch.Tensor.data.__get__, tensor)  # type: ignore[attr-defined]  # of C
        self._call(torch.Tensor.copy_, (data, value), {})

    def _refuse_other_memory(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        made = self.tensors.known(value)
        earlier = itertools.takewhile(lambda node: node is not made, self.graph.nodes)
        values = [node.meta.get("val") for node in earlier]
        held = {storage_key(item) for item in values if isinstance(item, torch.Tensor)}
        same = same_shape(value.shape, tensor.shape) and value.dtype == tensor.dtype
        if not same or storage_key(value) in held:
            raise TraceError(
                "the `.data` of a tensor becomes that of another one, or of another shape or type",
                location=calling_line(),
                hint="write into the tensor, under torch.no_grad(): `tensor.copy_(value)`",
            )

    def _call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise TRANSFORMED.at(line_around("torch/_functorch/"))
        if func is torch.autograd.grad:
            raise own_gradients(calling_line())
        if func is torch.Tensor.requires_grad_:
            flag = kwargs.get("requires_grad", args[1] if len(args) > 1 else True)
            self._asking.say(args[0], flag)
        given = list(tensors_in((args, kwargs)))
        versions = [tensor._version for tensor in given]
        made = AT_SYMBOLS.get(func, func)(*args, **kwargs)
        changed = _changed_since(given, versions)
        if _writes_lists(func):
            changed = list(tensors_in(args[0]))
        if func is torch.Tensor.size:
            self._sizes.asked(self.tensors.known(args[0]), args[0])
        if not changed and not given and func in _DATA:
            return self._from_data(func, args, kwargs, made)
        if not given and isinstance(made, torch.Tensor) and self._are_known(func, args, kwargs):
            with unset_fake_temporarily():
                number = func(*args, **kwargs).tolist()
            return self._call(torch.tensor, (number,), {"dtype": made.dtype})
        if not changed and not has_tensors(made) and not self._sizes.are_new(made):
            return made
        stays = not changed and any(made is tensor for tensor in given)
        asked = any(isinstance(item, torch.dtype) for item in (*args, *kwargs.values()))
        if stays and func in _MOVES and not asked:
            return made
        call = written(func, args, kwargs, made)
        if is_all_of(call) and has_gradient(made) == has_gradient(args[0]):
            self.tensors.stands_for(self.tensors.node(call.args[0]), made)
            return made
        made = self.record(call, made, changed, effect=_has_effect(func))
        self._loops.note(made)
        return made

    def _are_known(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether what a function makes of numbers is the same in every call: `torch.div(7, 2)`."""
        return not (
            takes_device(func) or may_draw(func) or self._sizes.are_in((*args, *kwargs.values()))
        )

    def _from_data(self, func: Any, args: Any, kwargs: Any, made: Any) -> Any:
        """A tensor that is made of Python's numbers."""
        data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        if self._sizes.are_in(data):
            return self.record(written(func, args, kwargs, made), made, ())
        if made.is_meta:
            options = {"dtype": made.dtype, "device": made.device}
            return self.record(Written(torch.tensor, (data,), options), made, ())
        with unset_fake_temporarily():
            real = func(*args, **kwargs).detach()
        return self.from_numbers(real, made)

    # --- modules ----------------------------------------------------------------------------------

    def module(self, own: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """What a module returns, called whole where it is a leaf."""
        path = self._paths.get(id(module))
        if not path:
            return own(module, *args, **kwargs)
        # One without state, such as an activation, may be held by many: each calls its own.
        called = self._lent.get((id(module), self.position.module), path)
        if self._is_whole(path, module):
            if args and isinstance(args[0], Packed) and type(module) in PACKED_LAYERS:
                return self._leaf_of_packed(called, own, module, *args, **kwargs)
            if self._takes(args, kwargs):
                return self._leaf(called, own, module, args, kwargs)
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        with self.position.inside(called, kind):
            return own(module, *args, **kwargs)

    def _is_whole(self, path: str, module: nn.Module) -> bool:
        """Whether a call is one of a leaf as the model has it.

        A model may lend a module other parameters than its own, change its mode, and hook on it.
        """
        return (
            self._own.get(path) == _identities(module)
            and self._training[path] is module.training
            and not has_hooks(module)
            and not self._asking.fixes_in(module)
        )

    def _leaf_of_packed(
        self,
        path: str,
        own: Callable[..., Any],
        module: nn.Module,
        sequence: Packed,
        *states: Any,
        **named: Any,
    ) -> tuple[Packed, Any]:
        """What a recurrent layer makes of packed sequences, as of padded ones of some lengths."""
        batch_first = bool(module.batch_first)
        args = (sequence.laid_out(batch_first=batch_first), *states)
        told: dict[str, Any] = {"lengths": sequence.lengths}
        if not sequence.enforce_sorted:
            told["enforce_sorted"] = False

        def run(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return own(layer, *args, **{key: kwargs[key] for key in named})

        made, ended = self._leaf(path, run, module, args, {**named, **told})
        sorts = sequence.enforce_sorted
        return sequence.of(made, sequence.lengths, batch_first, sorts, ends_in_zeros=True), ended

    def _takes(self, args: Any, kwargs: Any) -> bool:
        """Whether a call of a module can be written down."""
        plain = (bool, int, float, str, torch.dtype, torch.Tensor, torch.SymInt, type(None))

        def fits(item: Any) -> bool:
            if type(item) in (tuple, list):
                return all(map(fits, item))
            return isinstance(item, plain)

        return all(map(fits, (*args, *kwargs.values())))

    def _leaf(
        self, path: str, own: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        self.take_from_lists((args, kwargs))
        tensors = [*tensors_in((args, kwargs)), *module.parameters(), *module.buffers()]
        versions = [tensor._version for tensor in tensors]
        with torch._C.DisableTorchFunction():
            made = own(module, *args, **kwargs)
        changed = _changed_since(tensors, versions)
        with torch._C.DisableTorchFunction():
            made = apart(made, (args, kwargs), changed)
        # What a layer writes to its statistics need not show in their versions.
        buffers = next(module.buffers(), None) is not None
        effect = bool(changed) or buffers or may_draw(type(module).forward)
        given_args = self.argument(tuple(args)), self.argument(dict(kwargs))
        node = self._create("call_module", path, *given_args, made, effect)
        self._bind(node, made)
        return made

    # --- around the run ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is recorded inside."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before

    def finish(self, returned: Any) -> None:
        """Ends the graph, without what nothing reads and has no effect.

        Where Python decides by draws, what was recorded stays: another way may read it.
        """
        self._asking.refuse_left()
        self._loops.check()
        self.take_from_lists(returned)
        self.graph.output(self.argument(returned))
        write_value_splits(self.graph)
        with torch._C.DisableTorchFunction():  # which would take it for what the model asks
            keep_masks(self.graph)
            keep_tensors(self.graph)
        if not self.decisions:
            self.sweep()


def _changed_since(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> list[torch.Tensor]:
    """Those that were written to since they had these versions."""
    pairs = zip(tensors, versions, strict=True)
    return [tensor for tensor, version in pairs if tensor._version != version]


@cache
def _writes_lists(func: Any) -> bool:
    """Whether a function writes to a list of tensors, which versions of fake ones do not show."""
    name = getattr(func, "__name__", "")
    return name.startswith("_foreach_") and name.endswith("_")


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = storage_key(one) == storage_key(other)
    return same and same_shape(one.shape, other.shape) and one.dtype == other.dtype


def _identities(module: nn.Module) -> list[int]:
    return [id(tensor) for _, tensor in named_state(module)]


@cache
def _has_effect(func: Any) -> bool:
    """Whether a function may draw, or write to statistics: that need not show in their versions."""
    name = getattr(func, "__name__", "")
    return may_draw(func) or name in ("batch_norm", "instance_norm")
